"""Where the time of `weft rl` goes: shares of trainers and engines, and the times of each sample."""

from __future__ import annotations

import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from tests.support import local_rl
from tests.support.local_rl import LocalGroup, local_actors
from weft.inference.engine_clock import EngineClock
from weft.launch.summary import Phases
from weft.rl.trainer_clock import TrainerClock

DELAY = 0.3


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_seconds_of_engines_by_state() -> None:
    now = Now()
    clock = EngineClock(2, now)
    now.seconds += 1  # no rollout step: 2 engine-seconds for weights
    with clock.rollout():
        with clock.generating(0):
            now.seconds += 2  # 2 generate, 2 wait for prompts
            with clock.generating(0), clock.generating(1):
                now.seconds += 1  # 2 generate; two requests of an engine count once
            clock.pause(1)
            now.seconds += 1  # 2 wait for weights
            clock.pause(-1)
        clock.lost(1)
        now.seconds += 1  # 1 for prompts, 1 for weights
        clock.ready(1)
        clock.lost(1, gone=True)
        now.seconds += 1  # 1 for prompts
    assert clock.take() == {
        "engine_time/generate": pytest.approx(4 / 13),
        "engine_time/weights": pytest.approx(5 / 13),
        "engine_time/prompts": pytest.approx(4 / 13),
    }
    assert clock.take() == {} and EngineClock(0, now).take() == {}


def test_shares_of_trainers_are_of_the_time_since_the_last() -> None:
    now, phases = Now(), Phases()
    phases.add({"rollout": 5.0})
    clock = TrainerClock(phases, now)
    now.seconds += 10
    phases.add({"rollout": 6.0, "train": 2.0, "sync": 1.0, "save": 0.5})
    expected = {"samples": 0.6, "train": 0.2, "sync": 0.1, "other": 0.1}
    assert clock.take() == {f"trainer_time/{name}": pytest.approx(share) for name, share in expected.items()}
    now.seconds += 4
    phases.add({"train": 4.0})
    assert clock.take()["trainer_time/train"] == 1.0


class SlowGroup(LocalGroup):
    """Actors of which one method takes longer."""

    slow = ("", 0)  # method, actor

    def _call(self, number: int, method: str, args: Any) -> Any:
        if (method, number) == self.slow:
            time.sleep(DELAY)
        return super()._call(number, method, args)


@pytest.mark.parametrize(
    ("slow", "ahead", "trainer", "engines"),
    [
        (("advance", 1), 0, "samples", "prompts"),  # the other engine waits for the slow one
        (("update", 0), 1, "train", "weights"),
    ],
)
def test_shares_move_to_where_the_time_goes(
    tmp_path: Path, slow: tuple[str, int], ahead: int, trainer: str, engines: str
) -> None:
    """A slow part takes DELAY in each step, which each role's clock finds where it must; both add up to 1."""
    task, run, steps = local_rl.make_task(tmp_path), tmp_path / "run", 3
    words = [
        "rollout.engine=hf",
        "rollout.num_engines=2",
        "cluster.placement=disaggregated",
        f"cluster.max_staleness={ahead}",
        f"train.steps={steps}",
    ]
    with (
        mock.patch.object(SlowGroup, "slow", slow),
        mock.patch.object(local_rl, "local_actors", partial(local_actors, kind=SlowGroup)),
    ):
        local_rl.start(task, run, *words, "checkpoint.every=0")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps_rows = [pq.read_table(path).to_pylist() for path in sorted((run / "rollouts").glob("*.parquet"))]
    for line in lines:
        for role in ("trainer_time/", "engine_time/"):
            shares = [value for key, value in line.items() if key.startswith(role)]
            assert all(0.0 <= share <= 1.0 for share in shares)
            assert sum(shares) == pytest.approx(1.0, abs=1e-6)
        assert line["rollout/keep_rate"] == 1 - line["rollout/untrained"] / 6
    # Between two ends of training the slow part takes DELAY of the wall-clock; the shares are of nearly the same span.
    trained = [max(row["times"]["trained"] for row in rows) for rows in steps_rows]
    for line, wall in zip(lines[1:], [after - before for before, after in pairwise(trained)], strict=True):
        assert line[f"trainer_time/{trainer}"] * wall > 0.75 * DELAY
        of_engines = DELAY / 2 if engines == "prompts" else DELAY  # of two engines, one waits for the other
        assert line[f"engine_time/{engines}"] * wall > 0.75 * of_engines
    assert max(line["rollout/buffered"] for line in lines) == 0.0
    for row in (row for rows in steps_rows for row in rows):
        times = row["times"]
        (call,) = times["calls"]
        order = [call["queued"], call["began"], call["ended"], times["ended"], times["rewarded"], times["trained"]]
        assert times["queued"] <= order[0] and order == sorted(order) and call["engine"] in (0, 1)
        if slow == ("advance", 1):
            assert (call["ended"] - call["began"] > DELAY) == (call["engine"] == 1)
