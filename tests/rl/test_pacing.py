"""Pacing of rollouts: more groups than a step needs (rollout.oversample), and samples of older weights."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support import local_rl
from tests.support.cases import saved_model
from tests.support.local_rl import LocalGroup, rollouts_of
from tests.support.rl_samples import sharing
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.generate import Generator
from weft.inference.types import Prompt, SampleGroup, samples_of
from weft.launch.summary import Phases
from weft.rl.batch_pool import BatchPool, EmbeddedPool
from weft.rl.corrections import note_on_staleness
from weft.rl.rollouts import EarlyStop, rewarded_groups, rollout_group


def open_generator(path: str) -> Generator:
    return Generator(AutoModelForCausalLM.from_pretrained(path), 0)


@pytest.mark.parametrize(
    ("needed", "filtered", "complete"), [(2, (), [0, 3]), (3, (3,), [0, 2, 3, 4]), (5, (0,), [0, 1, 2, 3, 4])]
)
def test_the_slowest_groups_are_stopped(needed: int, filtered: tuple[int, ...], complete: list[int]) -> None:
    """Groups of 2, 90, 6, 2 and 6 tokens, on one engine. Filtered ones do not count, so that others are waited for.
    What is stopped leaves nothing behind: the next request is answered as by an engine that had none before."""
    actors: Any = LocalGroup("rollout engine", [partial(open_generator, saved_model("qwen3"))])
    pool = BatchPool(actors)
    pool.method, pool.turn = "advance", 0.0
    lengths, scored = [2, 90, 6, 2, 6], list[int]()
    prompts = [Prompt(index, 0, (1, 2 + index), "") for index in range(len(lengths))]
    following = Request("after", (1, 2), (5, 6), SamplingParams(3))

    async def play() -> tuple[list[SampleGroup], int, Any]:
        stop = EarlyStop(pool, needed, lambda group: group.prompt.index not in filtered)

        async def generate(prompt: Prompt) -> SampleGroup:
            return await rollout_group(prompt, 2, stop, SamplingParams(lengths[prompt.index]), None, 0)

        async def reward(group: SampleGroup) -> None:
            scored.append(group.prompt.index)

        groups = await rewarded_groups(prompts, generate, reward, Phases(), sharing(pool), stop)
        assert not pool._running and not pool._waiting
        return groups, stop.groups, await pool.generate(following)

    groups, stopped, after = asyncio.run(play())
    assert [group.prompt.index for group in groups] == sorted(scored) == complete
    assert stopped == len(prompts) - len(complete)
    assert (pool.drawn < 100) == bool(stopped)  # 90 x 2 tokens of a group that is not stopped
    assert all(sample.finish == "length" for sample in samples_of(groups))
    assert after == open_generator(saved_model("qwen3")).generate([following])[0]
    actors.end()


class HoldingActors:
    """An actor that never finishes a request by itself. work: how often it was called with requests to work on."""

    work = 0

    def __init__(self) -> None:
        self.held: dict[int, Request] = {}

    def __len__(self) -> int:
        return 1

    async def call_one(self, number: int, method: str, requests: dict[int, Request], seconds: float) -> Any:
        self.held |= requests
        self.work += bool(self.held)
        await asyncio.sleep(0)
        return {}, 0

    async def call_all(self, method: str) -> list[Any]:
        ended = {key: [Completion((), (), "abort", ()) for _ in request.seeds] for key, request in self.held.items()}
        self.held = {}
        await asyncio.sleep(0)
        return [ended]


@pytest.mark.parametrize("ends", ["abort", "cancel"])
def test_an_end_leaves_no_request_behind(ends: str) -> None:
    """Whenever an abort comes, or the one who asks goes: before the request is dealt, sent or begun, or while it is
    worked on. The pool forgets it, and no actor works on it any longer."""

    async def play(steps: int) -> tuple[str, int]:
        actors: Any = HoldingActors()
        pool = EmbeddedPool(actors)
        asking = asyncio.ensure_future(pool.generate(Request("a", (5,), (1,), SamplingParams(9))))
        for _ in range(steps):
            await asyncio.sleep(0)
        if ends == "cancel":
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await pool.sleep()
        else:
            await pool.abort()
        (outcome,) = await asyncio.wait_for(asyncio.gather(asking, return_exceptions=True), 5)
        for _ in range(20):
            await asyncio.sleep(0)
        work = actors.work
        for _ in range(20):
            await asyncio.sleep(0)
        assert actors.work == work and not actors.held and not pool._running and not pool._waiting, steps
        assert pool._idle == {0} and not pool._working, steps
        return "cancelled" if isinstance(outcome, asyncio.CancelledError) else outcome[0].finish, work

    outcomes = [asyncio.run(play(steps)) for steps in range(1, 12)]
    finish = {"abort": "abort", "cancel": "cancelled"}[ends]
    assert outcomes[0] == ("cancelled", 0) and outcomes[-1][0] == finish and outcomes[-1][1] > 0
    assert sum(work == 0 for _, work in outcomes) == {"abort": 3, "cancel": 2}[ends]  # not sent, or not begun


@pytest.mark.covers("rollout.oversample")
@pytest.mark.parametrize("engine", ["hf", "embedded"])
def test_a_run_with_more_groups_than_it_needs(tmp_path: Path, engine: str) -> None:
    """A step trains as many groups as without, and counts those that it does not."""
    task, run = local_rl.make_task(tmp_path), tmp_path / "run"
    local_rl.start(task, run, f"rollout.engine={engine}", "rollout.oversample=2", "train.steps=2")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines, 1):
        assert line["rollout/dropped_samples"] == 2 * 3 and 0 <= line["rollout/stopped_groups"] <= 2
        assert len({row["prompt"] for row in rollouts_of(run)[number]}) == 2 and len(rollouts_of(run)[number]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rl.on_policy=exact"], "the trained groups depend on how fast they are sampled: set rollout.oversample=0"),
        (["rl.agent=a:b"], "weft cannot stop a run of rl.agent: set rollout.oversample=0"),
    ],
)
def test_where_groups_cannot_be_stopped(words: list[str], message: str) -> None:
    needed = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]", "rollout.oversample=2"]
    with pytest.raises(UserError, match=message):
        load_config([], [*needed, *words], RlConfig)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["rl.correction=none"], "(set rl.correction=tis to correct it)"),
        (
            ["rl.old_logprobs=rollout", "rl.policy_loss=reinforce"],
            "(set rl.old_logprobs=recompute rl.correction=tis to correct it)",
        ),
        (["rl.old_logprobs=rollout"], ""),
        (["rl.correction=mis"], ""),
        (["rl.correction=none", "cluster.max_staleness=0"], ""),
    ],
)
def test_stale_samples_that_nothing_corrects_are_warned_of(words: list[str], fix: str) -> None:
    needed = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]", "rollout.engine=hf", "cluster.max_staleness=2"]
    lines = note_on_staleness(load_config([], [*needed, *words], RlConfig))
    assert len(lines) == bool(fix) and all(fix in line and "max_staleness is 2" in line for line in lines)
