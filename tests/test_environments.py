"""Rollouts in token space: single turns as one request, conversations with an environment; what of them is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.toy_tokenizers import family_tokenizer
from weft.data.encode import Encoding
from weft.errors import UserError
from weft.rl.chat import Chats
from weft.rl.environments import Environment, Episodes, Reply
from weft.rl.prompts import PromptRules, read_prompts
from weft.rl.rollouts import rollout_group
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
