"""Seconds of a step by phase: they add up, waiting is told from computing, and what is sent stays the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.cases import ALL_GATHER, open_engine, saved_model, world_of
from tests.support.machine import business
from tests.support.pool import run
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch import flight, timing
from weft.launch.timing import StepTimes
from weft.observe import profiling
from weft.parallel.fsdp import TimedAllGather, time_collectives
from weft.verify.documents import awkward_steps

CPU = torch.device("cpu")


class Clock:
    """time.perf_counter that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_seconds_by_hand(clock: Clock) -> None:
    times = StepTimes(CPU, world=2)
    times.open()
    try:
        for phase, seconds in [("save", 50), ("plan", 1), ("rows", 2), ("forward", 4), ("backward", 8), ("rows", 0.5),
                               ("forward", 16)]:  # fmt: skip
            flight.enter(phase)
            clock.now += seconds
        timing.waited(clock.now - 3)  # of the 16
        flight.enter("reduce")
        with timing.waiting():
            clock.now += 32
        for phase, seconds in [("optimizer", 64), ("record", 128), ("save", 256)]:
            flight.enter(phase)
            clock.now += seconds
        timing.waited(clock.now - 9)  # after the step: nobody's
        assert times.take() == {
            "time/data": 3.5, "time/forward": 17.0, "time/backward": 8.0, "time/communication": 35.0,
            "time/optimizer": 64.0,
        }  # fmt: skip
        assert times.take() == {}
    finally:
        times.close()
    assert flight.recorder.listeners == []


def test_on_several_accelerators_communication_is_not_told() -> None:
    times = StepTimes(torch.device("cuda"), world=2)
    times._now = lambda: Event(next(counting))  # type: ignore[method-assign]
    counting = iter(range(0, 9000, 1000))
    for phase in ("plan", "forward", "optimizer", "record"):
        times._on_phase(phase, 0)
    assert times.take() == {
        "time/data": 1.0, "time/forward": 1.0, "time/backward": 0.0, "time/communication": None, "time/optimizer": 1.0,
    }  # fmt: skip


class Event:
    """A CUDA event at so many milliseconds."""

    def __init__(self, at: float) -> None:
        self.at, self.waited = at, False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        assert end.waited
        return end.at - self.at


# ---------------------------------------------------------------- real ranks


def step(engine: Engine) -> tuple[dict[str, torch.Tensor], float]:
    """One step on awkward documents: this rank's shards of its gradients, and its seconds."""
    documents = [Document(torch.tensor(ids), torch.tensor(mask)) for ids, mask in awkward_steps(128)[0]]
    began = time.perf_counter()
    flight.step(1, 1)
    plan = engine.plan(engine.planner.metadata(documents))
    engine.accumulate(plan, dict(enumerate(documents)), CrossEntropy())
    gradients = {
        name: local_shard(p.grad).clone() for name, p in engine.module.named_parameters() if p.grad is not None
    }
    engine.apply(1e-3)
    flight.enter("record")
    return gradients, time.perf_counter() - began


def local_shard(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def timed_and_not(path: str, mesh: str, slow_rank: int | None) -> dict[str, Any]:
    """Gradients of one step with and without timing, and the seconds of the timed one."""
    plain, _ = step(open_engine(path, mesh))
    engine = open_engine(path, mesh)
    time_collectives(engine.module)
    if dist.get_rank() == slow_rank:
        make_slow(engine)
    times = StepTimes(engine.device, engine.ranks.world)
    times.open()
    timed, seconds = step(engine)
    times.close()
    return {
        "equal": plain.keys() == timed.keys() and all(torch.equal(plain[name], timed[name]) for name in plain),
        "seconds": seconds,
        "times": times.take(),
    }


def make_slow(engine: Engine) -> None:
    """Three tenths of a second more for the forward of the first layer; on a busy machine, whose noise grows, more."""
    pause = 0.3 * business()
    engine.module.layers[0][1].register_forward_pre_hook(lambda *_: time.sleep(pause))


@pytest.mark.parametrize("mesh", ["2", "2x1"])
def test_who_waits_for_a_slow_rank_is_told_and_nothing_else_changes(mesh: str) -> None:
    fast, slow = run(world_of(mesh), timed_and_not, saved_model("llama"), mesh, 1)
    for facts in (fast, slow):
        assert facts["equal"]
        assert sum(facts["times"].values()) == pytest.approx(facts["seconds"], rel=0.05, abs=0.05)
    assert slow["times"]["time/forward"] > 0.3 and fast["times"]["time/communication"] > 0.2
    assert slow["times"]["time/communication"] < fast["times"]["time/communication"]


def test_the_gather_is_timed_in_the_phase_that_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(*_: Any, **__: Any) -> None:
        clock.now += 5

    monkeypatch.setattr(dist, ALL_GATHER, gather)
    times = StepTimes(CPU, world=2)
    times.open()
    try:
        flight.enter("plan")
        flight.enter("forward")
        TimedAllGather()(torch.zeros(2), torch.zeros(1), None)  # type: ignore[arg-type]
        clock.now += 2
        flight.enter("record")
        seconds = times.take()
    finally:
        times.close()
    assert seconds["time/forward"] == 2.0 and seconds["time/communication"] == 5.0


# ---------------------------------------------------------------- traces


@pytest.mark.covers("profile.steps", "profile.ranks", "profile.memory")
def test_a_trace_holds_the_phases(tmp_path: Path) -> None:
    import gzip
    import json

    from weft.config.run_schema import ProfileConfig

    config = ProfileConfig(steps=(2,), memory=True)
    for number in (1, 2):
        with profiling.profiled(config, number, tmp_path, rank=0):
            flight.enter("forward", 1)
            torch.ones(64, 64).matmul(torch.ones(64, 64))
            flight.enter("optimizer")
        with profiling.profiled(config, number, tmp_path, rank=1):
            pass
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-0-step-2.json.gz"]
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank-0-step-2.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"weft: forward 1", "weft: optimizer", "aten::matmul", "[memory]"} <= names
    assert flight.recorder.listeners == []
