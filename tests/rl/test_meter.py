"""What is said of rollouts while they are under way, and of a signal that comes meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_rl import make_task, start
from weft.errors import StoppedError
from weft.inference.base import Completion, Request, SamplingParams
from weft.launch.stopping import StopSignals
from weft.observe import progress
from weft.rl import batch_pool
from weft.rl import meter as meter_module
from weft.rl.batch_pool import BatchPool
from weft.rl.meter import Meter


def test_what_it_says() -> None:
    now, drawn = [0.0], [1000]
    meter = Meter("rollout step 3", lambda: drawn[0], clock=lambda: now[0])
    meter.expected = 256
    now[0], drawn[0] = 2.0, 3468
    assert meter.text() == "rollout step 3: 0/256 samples, 1,234 tokens/s"
    meter.done = 96
    with meter.scoring(8), meter.scoring(4):
        assert meter.text() == "rollout step 3: 96/256 samples, 1,234 tokens/s, 12 rewards pending"
    meter.done = 256
    assert meter.text() == "rollout step 3: 256/256 samples"


def test_an_engine_is_asked_in_turns_and_counts_what_it_has_drawn() -> None:
    class Actors:
        """One that finishes a request in each turn."""

        waiting: dict[int, Request]
        drawn_counts: list[int]

        def __init__(self) -> None:
            self.waiting, self.seen = {}, []

        def __len__(self) -> int:
            return 1

        async def call_one(self, number: int, method: str, requests: dict[int, Request], seconds: float) -> Any:
            self.seen.append(batch_pool.drawn)
            self.waiting |= requests
            key = min(self.waiting)
            completions = [Completion((s,), (0.0,), "end", ((0, 1),)) for s in self.waiting.pop(key).seeds]
            return {key: completions}, 10

    batch_pool = BatchPool(Actors())  # type: ignore[arg-type]

    async def play() -> list[list[Completion]]:
        return await asyncio.gather(
            *(batch_pool.generate(Request(str(n), (5,), (n,), SamplingParams(1))) for n in range(3))
        )

    assert [completions[0].tokens for completions in asyncio.run(play())] == [(0,), (1,), (2,)]
    assert batch_pool.actors.seen == [0, 10, 20] and batch_pool.drawn == 30  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_run_says_how_far_its_rollouts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every turn of an engine is one token here, and everything that could be said is."""
    monkeypatch.setattr(progress, "_DOING_SECONDS", 0.0)
    monkeypatch.setattr(meter_module, "_SECONDS", 0.0)
    monkeypatch.setattr(batch_pool.BatchPool, "turn", 0.0)
    start(make_task(tmp_path), tmp_path / "run", "train.steps=2")
    lines = capsys.readouterr().out.splitlines()
    first = [line for line in lines if line.startswith("rollout step 1: ")]
    assert any(line.startswith("rollout step 1: 0/6 samples, ") and line.endswith(" tokens/s") for line in first)
    assert any(line.startswith("rollout step 2: ") for line in lines)
    step = next(line for line in lines if line.startswith("step 1/2  "))
    assert "reward " in step and "reward_std " in step and "length " in step and "loss" not in step
    assert lines.index(first[-1]) < lines.index(step)


@pytest.mark.slow
def test_a_signal_is_answered_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before the rollouts in which it comes are done."""
    outputs = []

    def strike(method: str, before: int) -> None:
        if (method, before) == ("generate", 0):
            os.kill(os.getpid(), signal.SIGINT)
            outputs.append(capfd.readouterr().err)

    with pytest.raises(StoppedError):
        start(make_task(tmp_path), tmp_path / "run", "train.steps=2", hook=strike)
    assert outputs[0].strip() == (
        "stopping SIGINT: this rollout step is finished, trained and saved, and then the run ends; a "
        "second signal ends it at once, unsaved"
    )
    assert (tmp_path / "run/checkpoints/latest").is_dir()


def test_a_rank_that_promises_nothing_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.number == signal.SIGTERM
    assert capfd.readouterr().err == ""
