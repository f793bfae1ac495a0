"""What the ranks of a tensor-parallel axis say to one another: sums, maxima and all parts, over a process group.

Threads of one process can stand for the ranks, so that a division of a model can be tried where there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Communicator(Protocol):
    """Every method is called by all ranks together, with tensors of one shape and dtype."""

    def sum_(self, x: Tensor) -> None:
        """x becomes the sum over the ranks."""
        ...

    def max_(self, x: Tensor) -> None:
        """x becomes the maximum over the ranks."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in order."""
        ...


@dataclass(frozen=True)
class OverGroup:
    """Over a process group."""

    group: dist.ProcessGroup

    def sum_(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def max_(self, x: Tensor) -> None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x, group=self.group)
        return parts


@dataclass(eq=False)
class Meeting:
    """Where `size` threads leave what they have. An error of one must abort the barrier, or the others wait."""

    size: int
    left: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.left = [torch.empty(0)] * self.size


@dataclass(frozen=True, eq=False)
class InThreads:
    """One of the threads of a meeting."""

    meeting: Meeting
    place: int

    def sum_(self, x: Tensor) -> None:
        self._each(x, lambda parts: x.copy_(torch.stack(parts).sum(0)))

    def max_(self, x: Tensor) -> None:
        self._each(x, lambda parts: x.copy_(torch.stack(parts).amax(0)))

    def gather(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        self._each(x, found.extend)
        return found

    def _each(self, x: Tensor, take: Callable[[list[Tensor]], object]) -> None:
        self.meeting.left[self.place] = x.clone()
        self.meeting.barrier.wait()
        parts = list(self.meeting.left)
        self.meeting.barrier.wait()  # nobody leaves the next before all have these
        take(parts)
