"""What was in memory in a step, by class, when there was most.

`weights`, `optimizer` and `gradients` are those that the engine holds. `gathered` are whole parameters of FSDP units,
with the buffers in which they arrive; `unreduced` the gradients of whole units on their way to the ranks that keep
parts of them. `head` is what the head makes in a forward. Of what else a forward makes, `activations` outlive it,
because backward needs them; a layer that runs again in backward has its own until its backward is done. All the rest
is `temporary`. What an allocator rounds up, keeps back or cannot use is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CLASSES = ("weights", "gradients", "optimizer", "activations", "head", "gathered", "unreduced", "temporary")


@dataclass(slots=True)
class Life:
    """A storage. born: the number of the operation that made it, from 1; 0: before the first. died: the last operation
    that was over before it went; None: it is still there. kind: its class, where that is known."""

    bytes: int
    born: int
    died: int | None = None
    kind: str | None = None


class Moment(NamedTuple):
    """One operation. phase, micro_batch: as in telemetry/flight.py. gathered: bytes of FSDP's gathered parameters.
    node: the number of what backward computes; -1: nothing. again: it belongs to a layer that runs again."""

    phase: str
    micro_batch: int
    gathered: int
    node: int
    again: bool


@dataclass(frozen=True)
class Peak:
    """classes: bytes of each of CLASSES when there was most in all. phase, micro_batch: when that was. most: the most
    of each class at any time."""

    classes: dict[str, int]
    phase: str
    micro_batch: int
    most: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.classes.values())


def peak_of(lives: Sequence[Life], moments: Sequence[Moment]) -> Peak:
    """The moment with most bytes, the first of several."""
    count, ends = len(moments), _ends_of_forwards(moments)
    change = {kind: np.zeros(count + 2, np.int64) for kind in CLASSES}
    for life in lives:
        of_class = change[life.kind or _class_of(life, ends)]
        of_class[life.born] += life.bytes
        of_class[count + 1 if life.died is None else life.died + 1] -= life.bytes
    series = {kind: of_class.cumsum()[1 : count + 1] for kind, of_class in change.items()}
    series["gathered"] += np.array([moment.gathered for moment in moments], np.int64)
    at = int(sum(series.values(), np.zeros(count, np.int64)).argmax())
    return Peak(
        {kind: int(values[at]) for kind, values in series.items()},
        moments[at].phase,
        moments[at].micro_batch,
        {kind: int(values.max()) for kind, values in series.items()},
    )


def _class_of(life: Life, ends: Sequence[int]) -> str:
    end = ends[life.born - 1]
    return "activations" if end >= 0 and (life.died is None or life.died > end + 1) else "temporary"


def _ends_of_forwards(moments: Sequence[Moment]) -> list[int]:
    """For each operation of a forward, the last one of it; -1 for others. Forwards are those of a micro-batch, and
    those of layers that run again, which one node of a backward's graph has run."""
    ends, end, previous = [-1] * len(moments), -1, None
    for at in reversed(range(len(moments))):
        moment = moments[at]
        part = moment.phase, moment.micro_batch, moment.node
        if part != previous:
            end, previous = -1, part
        if end < 0 and (moment.phase == "forward" or moment.again):
            end = at
        ends[at] = end
    return ends
