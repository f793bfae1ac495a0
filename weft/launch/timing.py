"""Seconds of a step by phase: data, forward, backward, communication, optimizer.

The flight record (flight.py) marks the beginning of each phase. Times come from the host's clock or, on CUDA, from
events on the main stream. Events are read after the step, so that nothing waits for the device during it. The seconds
add up to the step's: work that overlaps with other work (a gather before its layer, rows built during device compute)
does not appear.

`waiting()` marks that this thread waits in a collective. This is communication that does not overlap, in any phase. On
CUDA a collective delays a stream and not this thread, so communication counts in its phase there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from weft.launch import flight

if TYPE_CHECKING:
    import torch

# Phase of the flight record -> the metric that its seconds count in. A step begins with the phase FIRST.
PHASES = {
    "plan": "data", "rows": "data", "count": "forward", "forward": "forward", "backward": "backward",
    "reduce": "backward", "optimizer": "optimizer",
    "logprobs": "forward", "evaluate": "forward", "readout": "forward",  # forwards that a recipe runs before its step
}  # fmt: skip
FIRST = "plan"
METRICS = ("data", "forward", "backward", "communication", "optimizer")


class StepTimes:
    """Measures phases by listening to the flight record between `open` and `close`. The metric `communication` is null
    if it cannot be measured."""

    def __init__(self, device: torch.device, world: int) -> None:
        self._cuda = device.type == "cuda"
        self._tells = not self._cuda or world == 1
        self._marks: list[tuple[str, Any]] = []
        self._waits: list[tuple[str, float]] = []

    def open(self) -> StepTimes:
        """Begin to listen, until `close`. Returns this object."""
        global _open
        flight.recorder.listeners.append(self._on_phase)
        _open = self
        return self

    def close(self) -> None:
        """Stop listening."""
        global _open
        if _open is self:
            _open = None
        if self._on_phase in flight.recorder.listeners:
            flight.recorder.listeners.remove(self._on_phase)

    def take(self) -> dict[str, float | None]:
        """The `time/...` metrics of the finished step, in seconds; empty if there was none."""
        marks, waits = self._marks, self._waits
        self._marks, self._waits = [], []
        if len(marks) < 2:
            return {}
        seconds = dict.fromkeys(METRICS, 0.0)
        for (phase, began), (_, ended) in pairwise(marks):
            seconds[PHASES[phase]] += self._between(began, ended)
        for phase, waited in waits:
            seconds[PHASES[phase]] -= waited
            seconds["communication"] += waited
        metrics: dict[str, float | None] = {f"time/{name}": value for name, value in seconds.items()}
        return metrics if self._tells else metrics | {"time/communication": None}

    def waited(self, since: float) -> None:
        if self._marks and self._marks[-1][0] in PHASES and not self._cuda:
            self._waits.append((self._marks[-1][0], time.perf_counter() - since))

    def _on_phase(self, phase: str, micro_batch: int) -> None:
        if phase == FIRST:
            self._marks, self._waits = [], []
        elif not self._marks or self._marks[-1][0] not in PHASES:
            return  # outside of a step
        self._marks.append((phase, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        if not self._cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000.0


_open: StepTimes | None = None


@contextmanager
def waiting() -> Iterator[None]:
    """Inside, this thread waits for a collective."""
    began = time.perf_counter()
    yield
    waited(began)


def waited(since: float) -> None:
    """Record that this thread has waited for a collective since `since`, a value of time.perf_counter()."""
    if _open is not None:
        _open.waited(since)
