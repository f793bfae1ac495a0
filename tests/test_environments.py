"""Rollouts in token space: single turns as one request, conversations with an environment; what of them is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from examples.calculator_env import result_of
from tests.toy_tokenizers import family_tokenizer
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.data.encode import Encoding
from weft.errors import UserError
from weft.rl.chat import Chats
from weft.rl.environments import Environment, Episodes, Reply, load_environment
from weft.rl.prompts import PromptRules, PromptStream, load_rl_prompts, read_prompts
from weft.rl.rewards import Failures, Rewards, decode
from weft.rl.rollouts import groups_to_train, rollout_group
from weft.rl.types import Group, Prompt, Sample
from weft.rollout.base import Completion, Request, Sampling, seed_of

TOKENIZER = family_tokenizer("qwen", "qwen3")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SAMPLING = Sampling(max_new_tokens=400, ends=(END,))
(QUESTION,) = read_prompts(
    [{"messages": [{"role": "user", "content": "3+4?"}], "answer": "7"}], TOKENIZER, Encoding(), PromptRules(999)
)


class Scripted:
    """An engine that says what it is told to, and keeps what it was asked."""

    def __init__(self, *lines: str, end: bool = True) -> None:
        self.lines, self.end = lines, end
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        await asyncio.sleep(0)
        turn = int(request.id.rpartition("turn ")[2]) - 1 if "turn" in request.id else 0
        return [self._completion(self.lines[turn], turn, request) for _ in request.seeds]

    def _completion(self, line: str, turn: int, request: Request) -> Completion:
        tokens = TOKENIZER(line, add_special_tokens=False)["input_ids"] + [END] * self.end
        finish: Any = "end"
        if len(tokens) > request.sampling.max_new_tokens:
            tokens, finish = tokens[: request.sampling.max_new_tokens], "length"
        n = len(tokens)
        known = len(request.tokens) + n - 1
        routes = np.full((known, 1, 1), turn, np.uint8)
        return Completion(tuple(tokens), (-0.5 - turn,) * n, finish, ((turn, n),), routes=routes)


class Echo(Environment):
    """Says back what it hears, once."""

    gives_reward = True

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        if text.startswith("say "):
            return Reply(messages=[{"role": "tool", "content": text[4:]}], reward=0.25, notes={"heard": text})
        return Reply(done=True, reward=1.0)


class Blocking(Environment):
    """As Echo, by a plain function."""

    def step(self, text: str, tokens: Sequence[int]) -> Reply:  # type: ignore[override]
        return Reply(text="\n> ") if text.startswith("say ") else Reply(done=True)


class Broken(Environment):
    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        raise KeyError("nothing here")


class Sleeping(Environment):
    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        await asyncio.sleep(60)
        return Reply(done=True)


class Silent(Environment):
    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        return Reply()


def episodes(kind: type[Environment], max_turns: int = 5, most: int = 400, timeout: float = 20) -> Episodes:
    return Episodes(kind, Chats(TOKENIZER), max_turns, most, timeout)


def play(engine: Scripted, env: Episodes | None, prompt: Prompt = QUESTION, count: int = 1) -> Group:
    return asyncio.run(rollout_group(prompt, count, engine, SAMPLING, env, seed=11))


def shown(sample: Sample, sampled: bool) -> str:
    """The completion with what was not sampled, or what was, left out."""
    n = len(sample.prompt.tokens)
    kept = [int(t) for t, s in zip(sample.tokens[n:], sample.sampled[n:], strict=True) if s == sampled]
    return str(TOKENIZER.decode(kept))


def test_without_an_environment_a_group_is_one_request() -> None:
    engine = Scripted("seven")
    group = play(engine, None, count=3)
    (request,) = engine.requests
    assert request.tokens == QUESTION.tokens and request.id == "0.0"
    assert request.seeds == tuple(seed_of(11, "0.0", number) for number in range(3))
    sample = group.samples[2]
    n = len(QUESTION.tokens)
    assert sample.number == 2 and sample.length == 6 and sample.tokens[-1] == END
    assert not sample.sampled[:n].any() and sample.sampled[n:].all()
    assert set(sample.rollout[:n]) == {0.0} and set(sample.rollout[n:]) == {-0.5}
    assert set(sample.versions[:n]) == {-1} and set(sample.versions[n:]) == {0}
    assert sample.kept_logmass is None and sample.routes is not None and len(sample.routes) == len(sample) - 1


def test_a_conversation_is_appended_and_its_replies_are_not_trained() -> None:
    """By hand, with Qwen3's template: the policy's tokens as sampled, the tool's result as the template renders it."""
    engine = Scripted("say <b>", "done")
    (sample,) = play(engine, episodes(Echo)).samples
    given = "\n<|im_start|>user\n<tool_response>\n<b>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(sample.completion()) == f"say <b><|im_end|>{given}done<|im_end|>"
    assert shown(sample, True) == "say <b><|im_end|>done<|im_end|>" and shown(sample, False) == given
    first, second = engine.requests
    assert second.tokens[: len(first.tokens) + 8] == tuple(int(t) for t in sample.tokens[: len(first.tokens) + 8])
    assert (first.seeds, second.seeds) == ((seed_of(11, "0.0", 0, 0),), (seed_of(11, "0.0", 0, 1),))
    assert second.sampling.max_new_tokens == 400 - (len(second.tokens) - len(first.tokens))
    assert sample.turns == 2 and sample.finish == "end" and sample.rewards == {"environment": 1.25}
    assert sample.notes["heard"] == "say <b>"
    assert [message["role"] for message in sample.notes["messages"]] == ["assistant", "tool", "assistant"]
    assert sorted(set(sample.rollout.tolist())) == [-1.5, -0.5, 0.0]


def test_routes_are_those_that_each_answer_was_sampled_with() -> None:
    (sample,) = play(Scripted("say <b>", "done"), episodes(Echo)).samples
    first = len(QUESTION.tokens) + 8 - 1
    assert sample.routes.ravel().tolist() == [0] * first + [1] * (len(sample) - 1 - first)


def test_an_answer_that_a_stop_text_ended_is_closed() -> None:
    (sample,) = play(Scripted("say x", "done", end=False), episodes(Echo)).samples
    assert shown(sample, False).startswith("<|im_end|>\n<|im_start|>user")


def test_plain_text_goes_behind_an_answer_as_it_stands() -> None:
    prompt = Prompt(0, 0, tuple(TOKENIZER("> ")["input_ids"]), "> ")
    (sample,) = play(Scripted("say x", "done", end=False), episodes(Blocking), prompt).samples
    assert TOKENIZER.decode(sample.completion()) == "say x\n> done" and sample.rewards == {}
    with pytest.raises(UserError, match="the prompt is a text, and rl.environment replies with messages"):
        play(Scripted("say x", "done"), episodes(Echo), prompt)


def test_where_a_conversation_ends() -> None:
    (sample,) = play(Scripted("say a", "say b", "say c"), episodes(Echo, max_turns=2)).samples
    assert sample.turns == 2 and shown(sample, True) == "say a<|im_end|>say b<|im_end|>"
    (sample,) = play(Scripted("say a", "x" * 500), episodes(Echo, most=120)).samples
    assert sample.finish == "length" and len(sample) == len(QUESTION.tokens) + 120
    (sample,) = play(Scripted("say " + "x" * 60, "done"), episodes(Echo, most=100)).samples
    assert sample.finish == "length" and sample.sampled[-1] and sample.turns == 1


def test_an_environment_that_fails_costs_one_sample() -> None:
    for kind, message in ((Broken, "Broken.step: KeyError: 'nothing here'"), (Sleeping, "took more than 0.1 seconds")):
        (sample,) = play(Scripted("say a"), episodes(kind, timeout=0.1)).samples
        assert message in sample.notes["error"] and not sample.trained and sample.length == 6
    with pytest.raises(UserError, match="Silent replied nothing"):
        play(Scripted("say a"), episodes(Silent))


def test_groups_without_signal_are_replaced_in_the_order_of_the_data() -> None:
    """Rewards of prompt i's group: equal where i is even. Five rounds find enough; one fills up with what it has."""
    asked: list[list[int]] = []

    async def roll(prompts: Sequence[Prompt]) -> list[Group]:
        asked.append([prompt.index for prompt in prompts])
        (sample,) = (await rollout_group(QUESTION, 1, Scripted("a"), SAMPLING, None, 0)).samples
        rewards = [(1.0, float(prompt.index % 2 == 0)) for prompt in prompts]
        return [
            Group(prompt, [replace(sample, prompt=prompt, reward=reward) for reward in pair])
            for prompt, pair in zip(prompts, rewards, strict=True)
        ]

    def run(rounds: int) -> tuple[list[int], int]:
        asked.clear()
        stream = PromptStream([replace(QUESTION, index=i) for i in range(20)], 4, 0, shuffle=False)
        groups, replaced = asyncio.run(groups_to_train(stream, roll, rounds))
        return [group.prompt.index for group in groups], replaced

    assert run(5) == ([1, 3, 5, 7], 4) and asked == [[0, 1, 2, 3], [4, 5], [6], [7]]
    assert run(1) == ([1, 3, 5, 0], 2) and asked == [[0, 1, 2, 3], [4, 5]]
    assert run(0) == ([0, 1, 2, 3], 0) and asked == [[0, 1, 2, 3]]


# ---------------------------------------------------------------- the example


def test_the_calculator_offers_its_tool_and_answers_calls() -> None:
    """Through the keys of a config, with a policy that calls it rightly, then wrongly, then answers."""
    config = load_config(
        [],
        ["model.path=none", f"data.path={__file__}", "rl.environment=examples.calculator_env:Calculator",
         "rl.reward=[exact_match]", "rl.max_turns=4", "rl.environment_timeout=7", "rollout.max_new_tokens=900"],
        schema=RlConfig,
    )  # fmt: skip
    loaded = load_environment(config, TOKENIZER)
    assert loaded is not None
    assert (loaded.max_turns, loaded.timeout, loaded.most_tokens) == (4, 7.0, 900)
    rows = [{"messages": [{"role": "user", "content": "12*(3+4)?"}], "answer": 84}]
    (prompt,) = load_rl_prompts(config, TOKENIZER, rows)
    assert '"name": "calculator"' in TOKENIZER.decode(list(prompt.tokens))
    engine = Scripted(
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}\n</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "open(1)"}}</tool_call>',
        "84",
    )
    group = play(engine, loaded, prompt, count=2)
    for sample in group.samples:
        given = shown(sample, False)
        assert "<tool_response>\n84\n</tool_response>" in given
        assert "<tool_response>\nerror: `open(1)` is no arithmetic\n</tool_response>" in given
        assert sample.turns == 3 and sample.notes["calls"] == 2 and sample.trained
    rewards = Rewards(config.rl)
    decode(group.samples, TOKENIZER)
    asyncio.run(rewards.score(group.samples, Failures()))
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]  # of what was said last


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('{"arguments": {"expression": "-7 // 2 + 1.5"}}', "-2.5"),
        ('{"arguments": {"expression": "1 / 0"}}', "error: float division by zero"),
        ('{"arguments": {}}', 'error: write {"name": "calculator", "arguments": {"expression": "1 + 2"}}'),
        ("7", "error: write"),
        ("{", "error: the call is no JSON"),
    ],
)
def test_results_of_the_calculator(call: str, expected: str) -> None:
    assert result_of(call).startswith(expected)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.test_environments:Scripted", "is no environment: write a class of"),
        ("tests.test_environments:Blocking", "rl.reward is empty, and .* gives no rewards"),
        ("tests.test_environments:Absent", "has no Absent"),
    ],
)
def test_what_is_no_environment_is_refused(path: str, message: str) -> None:
    overrides = ["model.path=none", f"data.path={__file__}", "rl.reward=[]", f"rl.environment={path}"]
    config = load_config([], overrides, schema=RlConfig)
    with pytest.raises(UserError, match=message):
        load_environment(config, TOKENIZER)
