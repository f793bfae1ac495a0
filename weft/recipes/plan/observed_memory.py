"""The content of memory at the peak of a step, by class.

`weights`, `optimizer` and `gradients` are the engine's. `frozen` are the weights of frozen models. `gathered` are
complete parameters of FSDP units, and their receive buffers. `unreduced` are gradients of complete units before they
are reduced. `head` is allocated by the head in a forward. `activations` are other tensors that outlive the forward that
made them, because backward needs them; a layer that is recomputed in backward has activations until its backward ends.
All other tensors are `temporary`. Memory that an allocator rounds up, caches or cannot use is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CLASSES = ("weights", "gradients", "optimizer", "frozen", "activations", "head", "gathered", "unreduced", "temporary")


@dataclass(slots=True)
class Life:
    """A storage. born: the number of the operation that made it, from 1; 0 if it existed before the first. died: the
    number of operations that had run when it was freed; None if it still exists. kind: its class, if known."""

    bytes: int
    born: int
    died: int | None = None
    kind: str | None = None


class Moment(NamedTuple):
    """One operation. phase, micro_batch: as in launch/flight.py. gathered: bytes of FSDP's gathered parameters.
    node: the number of the autograd node that runs in backward; -1 for none. recomputes: whether the operation
    recomputes a layer."""

    phase: str
    micro_batch: int
    gathered: int
    node: int
    recomputes: bool


@dataclass(frozen=True)
class Peak:
    """The moment of the peak. classes: bytes of each of CLASSES at that moment. phase, micro_batch: of that moment.
    maxima: the maximum of each class at any time."""

    classes: dict[str, int]
    phase: str
    micro_batch: int
    maxima: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.classes.values())


def peak_of(lives: Sequence[Life], moments: Sequence[Moment]) -> Peak:
    """The moment with the most bytes; the first, if there are several."""
    count, ends = len(moments), _ends_of_forwards(moments)
    change = {kind: np.zeros(count + 2, np.int64) for kind in CLASSES}
    for life in lives:
        of_class = change[life.kind or _class_of(life, ends)]
        of_class[life.born] += life.bytes
        of_class[count + 1 if life.died is None else life.died + 1] -= life.bytes
    series = {kind: of_class.cumsum()[1 : count + 1] for kind, of_class in change.items()}
    series["gathered"] += np.array([moment.gathered for moment in moments], np.int64)
    peak_index = int(sum(series.values(), np.zeros(count, np.int64)).argmax())
    return Peak(
        {kind: int(values[peak_index]) for kind, values in series.items()},
        moments[peak_index].phase,
        moments[peak_index].micro_batch,
        {kind: int(values.max()) for kind, values in series.items()},
    )


def _class_of(life: Life, ends: Sequence[int]) -> str:
    end = ends[life.born - 1]
    return "activations" if end >= 0 and (life.died is None or life.died > end + 1) else "temporary"


def _ends_of_forwards(moments: Sequence[Moment]) -> list[int]:
    """For each operation of a forward, the index of the forward's last operation; -1 for other operations. A forward is
    that of a micro-batch, or the recomputation of a layer by one node of a backward's graph."""
    ends, end, previous = [-1] * len(moments), -1, None
    for index in reversed(range(len(moments))):
        moment = moments[index]
        part = moment.phase, moment.micro_batch, moment.node
        if part != previous:
            end, previous = -1, part
        if end < 0 and (moment.phase == "forward" or moment.recomputes):
            end = index
        ends[index] = end
    return ends
