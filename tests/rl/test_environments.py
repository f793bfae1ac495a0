"""Rollouts in token space: single turns as one request, conversations with an environment; what of them is sampled."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from examples.calculator_env import result_of
from tests.support.environments import Blocking, Broken, Echo, Faulty, Patient, SilentEnvironment
from tests.support.soak import is_fork_server
from tests.support.toy_tokenizers import family_tokenizer
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.data.encode import Encoding
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams, seed_of
from weft.inference.types import Prompt, Sample, SampleGroup
from weft.rl.chat import ChatRenderer
from weft.rl.environments import pool
from weft.rl.environments.base import Environment
from weft.rl.environments.episodes import EnvironmentFailure, Episodes, load_environment
from weft.rl.environments.pool import EnvironmentPool
from weft.rl.prompts import PromptRules, PromptStream, load_rl_prompts, read_prompts
from weft.rl.rewards.base import Failures, Rewards, decode
from weft.rl.rollouts import groups_to_train, rollout_group
from weft.rl.workers import PARENT_LOST

TOKENIZER = family_tokenizer("qwen", "qwen3")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SAMPLING = SamplingParams(max_new_tokens=400, ends=(END,))
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
        length = len(request.tokens) + n - 1
        routes = np.full((length, 1, 1), turn, np.uint8)
        return Completion(tuple(tokens), (-0.5 - turn,) * n, finish, ((turn, n),), routes=routes)


def episodes(kind: type[Environment], max_turns: int = 5, max_tokens: int = 400, timeout: float = 20) -> Episodes:
    pool = EnvironmentPool(f"{kind.__module__}:{kind.__name__}")
    return Episodes(kind, pool, ChatRenderer(TOKENIZER), max_turns, 999, max_tokens, timeout)


def play(engine: Scripted, env: Episodes | None, prompt: Prompt = QUESTION, count: int = 1) -> SampleGroup:
    return play_all(engine, env, [prompt], count)[0]


def play_all(engine: Scripted, env: Episodes | None, prompts: Sequence[Prompt], count: int = 1) -> list[SampleGroup]:
    """Groups of several prompts, at the same time."""

    async def run() -> list[SampleGroup]:
        try:
            groups = (rollout_group(prompt, count, engine, SAMPLING, env, seed=11) for prompt in prompts)
            return list(await asyncio.gather(*groups))
        finally:
            if env is not None:
                await env.pool.close()

    return asyncio.run(run())


def shown(sample: Sample, sampled: bool) -> str:
    """The completion with what was not sampled, or what was, left out."""
    n = len(sample.prompt.tokens)
    selected = [int(t) for t, s in zip(sample.tokens[n:], sample.sampled[n:], strict=True) if s == sampled]
    return str(TOKENIZER.decode(selected))


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
    assert set(sample.rollout_logprobs[:n]) == {0.0} and set(sample.rollout_logprobs[n:]) == {-0.5}
    assert set(sample.versions[:n]) == {-1} and set(sample.versions[n:]) == {0}
    assert sample.kept_logmass is None and sample.routes is not None and len(sample.routes) == len(sample) - 1


def test_a_conversation_is_appended_and_its_replies_are_not_trained() -> None:
    """By hand, with Qwen3's template: the policy's tokens as sampled, the tool's result as the template renders it."""
    engine = Scripted("say <b>", "done")
    (sample,) = play(engine, episodes(Echo)).samples
    reply = "\n<|im_start|>user\n<tool_response>\n<b>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(sample.completion()) == f"say <b><|im_end|>{reply}done<|im_end|>"
    assert shown(sample, True) == "say <b><|im_end|>done<|im_end|>" and shown(sample, False) == reply
    first, second = engine.requests
    assert second.tokens[: len(first.tokens) + 8] == tuple(int(t) for t in sample.tokens[: len(first.tokens) + 8])
    assert (first.seeds, second.seeds) == ((seed_of(11, "0.0", 0, 0),), (seed_of(11, "0.0", 0, 1),))
    assert second.sampling.max_new_tokens == 400 - (len(second.tokens) - len(first.tokens))
    assert sample.turns == 2 and sample.finish == "end" and sample.rewards == {"environment": 1.25}
    assert sample.notes["heard"] == "say <b>"
    assert [message["role"] for message in sample.notes["messages"]] == ["assistant", "tool", "assistant"]
    assert sorted(set(sample.rollout_logprobs.tolist())) == [-1.5, -0.5, 0.0]


def test_the_numbers_that_samples_and_turns_are_drawn_with() -> None:
    """Pinned: engines and resumed runs depend on them. Each turn draws others."""
    assert [seed_of(11, "0.0", sample, turn) for sample, turn in ((0, 0), (0, 1), (1, 0))] == [
        7461438677038929148,
        1993593076995242913,
        3246968229877497124,
    ]
    engine = Scripted("say <b>", "done")
    play(engine, episodes(Echo))
    assert [request.seeds for request in engine.requests] == [(7461438677038929148,), (1993593076995242913,)]


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
    with pytest.raises(UserError, match="the prompt is a text, but rl.environment replies with messages"):
        play(Scripted("say x", "done"), episodes(Echo), prompt)


@pytest.mark.covers("rl.max_turns")
def test_where_a_conversation_ends() -> None:
    (sample,) = play(Scripted("say a", "say b", "say c"), episodes(Echo, max_turns=2)).samples
    assert sample.turns == 2 and shown(sample, True) == "say a<|im_end|>say b<|im_end|>"
    (sample,) = play(Scripted("say a", "x" * 500), episodes(Echo, max_tokens=120)).samples
    assert sample.finish == "length" and len(sample) == len(QUESTION.tokens) + 120
    (sample,) = play(Scripted("say " + "x" * 60, "done"), episodes(Echo, max_tokens=100)).samples
    assert sample.finish == "length" and sample.sampled[-1] and sample.turns == 1


def test_a_reply_that_leaves_no_token_for_an_answer_is_not_taken() -> None:
    engine = Scripted("say a", "say b")
    play(engine, episodes(Echo, max_turns=2))
    full = len(engine.requests[1].tokens) - len(QUESTION.tokens)
    for max_tokens, turns in ((full, 1), (full + 1, 2)):
        (sample,) = play(Scripted("say a", "say b"), episodes(Echo, max_turns=2, max_tokens=max_tokens)).samples
        assert (sample.finish, sample.turns) == ("length", turns)


@pytest.mark.covers("rl.environment_timeout")
def test_an_environment_that_fails_costs_one_sample() -> None:
    (sample,) = play(Scripted("say a"), episodes(Broken)).samples
    assert sample.notes["error"] == "Broken.step: KeyError: 'nothing here'"
    assert not sample.trained and sample.length == 6
    with pytest.raises(UserError, match="SilentEnvironment returned an empty reply"):
        play(Scripted("say a"), episodes(SilentEnvironment))


def test_a_coroutine_that_takes_too_long_is_cancelled_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    (sample,) = play(Scripted("say a"), episodes(Patient, timeout=0.1)).samples
    assert sample.notes["error"] == "Patient.step took more than 0.1 seconds" and not sample.trained
    assert (tmp_path / "closed").exists()


ENDS = {
    "hang": " took more than 10 seconds",
    "hold_the_lock": " took more than 10 seconds",
    "leave": ": its process ended with status 9",
    "exit": ": SystemExit: 3",
    "crash": ": its process was ended by signal 11",
    "be_killed": ": its process was ended by signal 9",
    "run_out": ": MemoryError: MemoryError",
    "nothing": ": TypeError: returned None, which is not a Reply (weft.rl.environments.base)",
    "nan": ": ValueError: `reward` of a Reply is nan",
    "unsendable": ": its reply cannot be sent: cannot pickle",
    "words": ": TypeError: `messages` and `calls` of a Reply are lists of dicts",
}


def wait_until_gone(processes: Sequence[int]) -> None:
    """Init buries what has lost its parent in its own time."""
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_that_hang_or_end_cost_their_own_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each fault, more than there are threads of a default pool, beside as many healthy ones."""
    monkeypatch.setenv("STARTED", str(tmp_path))
    began, columns = time.monotonic(), [{"how": how} for how in (*ENDS, *["hang"] * 6, *["well"] * 4)]
    prompts = [Prompt(i, 0, (1,), "?", None, column) for i, column in enumerate(columns)]
    groups = play_all(Scripted("a", "b", end=True), episodes(Faulty, timeout=10), prompts)
    assert time.monotonic() - began < 60
    samples = [group.samples[0] for group in groups]
    failed = {column["how"]: sample.notes.get("error", "") for column, sample in zip(columns, samples, strict=True)}
    assert "TextIOWrapper" in failed["unsendable"]
    failed["unsendable"] = re.sub(" '.*", "", failed["unsendable"])  # Python names the type in other words by version
    assert {how: error.removeprefix("Faulty.step") for how, error in failed.items() if how != "well"} == ENDS
    well = samples[-4:]
    assert [sample.rewards for sample in well] == [{"environment": 2.0}] * 4 and all(s.trained for s in well)
    assert len({sample.notes["process"] for sample in well} | {os.getpid()}) == 5
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 2 * 7
    wait_until_gone(started)


def test_more_conversations_than_there_is_room_for_wait() -> None:
    env = replace(episodes(Echo), pool=EnvironmentPool("tests.support.environments:Echo", at_once=2))
    assert [s.rewards for s in play(Scripted("say a", "b"), env, count=5).samples] == [{"environment": 1.25}] * 5


def test_a_fork_server_that_is_stopped_is_told_apart_from_a_late_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the run would end where all conversations of a step are late."""
    monkeypatch.setattr(pool, "_OBEYS_SECONDS", 0.2)
    env = episodes(Echo, timeout=0.1)

    async def play_stopped() -> str:
        await (await env.open()).close()
        (server,) = filter(is_fork_server, psutil.Process().children(recursive=True))
        server.suspend()
        session = await env.open()
        with pytest.raises(EnvironmentFailure) as error:
            await session.start(QUESTION)
        await env.close()
        return str(error.value)

    assert asyncio.run(play_stopped()) == f"Echo.start: its process {PARENT_LOST}"


def test_a_controller_may_have_thousands_of_files_open() -> None:
    """Of hundreds of conversations, of Ray, of data: descriptors of the fork server have numbers above 1023, then."""
    with open(os.devnull) as file:
        descriptors = [os.dup(file.fileno()) for _ in range(1100)]
    try:
        (sample,) = play(Scripted("say a", "b"), episodes(Echo)).samples
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert sample.rewards == {"environment": 1.25} and "error" not in sample.notes


def test_a_fork_server_that_is_killed_is_replaced() -> None:
    async def run() -> list[Sample]:
        env, samples = episodes(Echo), list[Sample]()
        try:
            for _ in range(2):
                group = await rollout_group(QUESTION, 1, Scripted("say a", "b"), SAMPLING, env, seed=1)
                samples += group.samples
                for child in psutil.Process().children():
                    if "weft.rl.environments.worker" in child.cmdline():
                        child.kill()
                        await asyncio.sleep(0.3)
        finally:
            await env.pool.close()
        return samples

    assert [sample.notes.get("error") for sample in asyncio.run(run())] == [None, None]


CONTROLLER = """
import asyncio, os, sys
from tests.support.environments import Faulty
from weft.rl.environments.pool import EnvironmentPool
from weft.inference.types import Prompt

async def main():
    worker = await EnvironmentPool("tests.support.environments:Faulty").open()
    await worker.ask(("start", (Prompt(0, 0, (1,), "?", None, {"how": "hang"}),), 9), 9)
    await worker.ask(("step", ("a", [1]), 9), 9)
    await worker.ask(("step", ("a", [1]), 99), 99)

asyncio.run(main())
"""


def test_they_end_with_the_controller(tmp_path: Path) -> None:
    """kill -9 of it, while an environment hangs that has started something."""
    folder = Path(__file__).parents[2]
    env = {**os.environ, "STARTED": str(tmp_path), "PYTHONPATH": str(folder)}
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER], env=env, cwd=folder)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline and controller.poll() is None
            time.sleep(0.05)
    finally:
        controller.kill()
        controller.wait()
    wait_until_gone([int(path.name) for path in tmp_path.iterdir()])


@pytest.mark.covers("rl.dynamic_sampling")
def test_groups_without_signal_are_replaced_in_the_order_of_the_data() -> None:
    """Rewards of prompt i's group: equal where i is even. Five rounds find enough; one fills up with what it has."""
    requested: list[list[int]] = []

    async def roll(prompts: Sequence[Prompt], needed: int) -> list[SampleGroup]:
        requested.append([prompt.index for prompt in prompts])
        (sample,) = (await rollout_group(QUESTION, 1, Scripted("a"), SAMPLING, None, 0)).samples
        rewards = [(1.0, float(prompt.index % 2 == 0)) for prompt in prompts]
        return [
            SampleGroup(prompt, [replace(sample, prompt=prompt, reward=reward) for reward in pair])
            for prompt, pair in zip(prompts, rewards, strict=True)
        ]

    def run(rounds: int, extra: int = 0) -> tuple[list[int], int]:
        requested.clear()
        stream = PromptStream([replace(QUESTION, index=i) for i in range(20)], 4, 0, shuffle=False)
        groups, replaced = asyncio.run(groups_to_train(stream, roll, rounds, extra))
        return [group.prompt.index for group in groups], replaced

    assert run(5) == ([1, 3, 5, 7], 4) and requested == [[0, 1, 2, 3], [4, 5], [6], [7]]
    assert run(1) == ([1, 3, 5, 0], 2) and requested == [[0, 1, 2, 3], [4, 5]]
    assert run(0) == ([0, 1, 2, 3], 0) and requested == [[0, 1, 2, 3]]
    # With more than are needed, each round starts them; what is not needed is not trained.
    assert run(1, extra=3) == ([1, 3, 5, 7], 6) and requested == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    assert run(0, extra=2) == ([0, 1, 2, 3], 0) and requested == [[0, 1, 2, 3, 4, 5]]


# ---------------------------------------------------------------- the example


@pytest.mark.covers("rl.environment")
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
        replies = shown(sample, False)
        assert "<tool_response>\n84\n</tool_response>" in replies
        assert "<tool_response>\nerror: `open(1)` is no arithmetic\n</tool_response>" in replies
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
        ("tests.rl.test_environments:Scripted", "is not an environment: write a subclass of"),
        ("tests.support.environments:Blocking", "rl.reward is empty, and .* returns no rewards"),
        ("tests.rl.test_environments:Absent", "has no Absent"),
    ],
)
def test_what_is_no_environment_is_refused(path: str, message: str) -> None:
    overrides = ["model.path=none", f"data.path={__file__}", "rl.reward=[]", f"rl.environment={path}"]
    with pytest.raises(UserError, match=message):
        load_environment(load_config([], overrides, schema=RlConfig), TOKENIZER)
