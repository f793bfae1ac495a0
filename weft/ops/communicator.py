"""What the ranks of an axis of the mesh say to one another: sums, maxima, all parts, exchanges, over a process group.

Threads of one process can stand for the ranks, so that a division of a model can be tried where there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.versions import reduce_scatter_single


class Communicator(Protocol):
    """Every method is called by all ranks together, with tensors of one shape and dtype."""

    def sum_(self, x: Tensor) -> None:
        """x becomes the sum over the ranks."""
        ...

    def max_(self, x: Tensor) -> None:
        """x becomes the maximum over the ranks."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in order."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part, of equal ones along the first dimension, of the sum over the ranks."""
        ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[sum(received), ...]: what the ranks send to this one, in their order, out of x [sum(sent), ...], of which
        the first sent[0] go to rank 0 and so on. Sizes may differ, and be 0; x has one shape but for its first."""
        ...


def summed(x: Tensor, ranks: Communicator) -> Tensor:
    """The sum over the ranks, beside x."""
    out = x.contiguous().clone()
    ranks.sum_(out)
    return out


@dataclass(frozen=True)
class GroupCommunicator:
    """Over a process group."""

    group: dist.ProcessGroup

    def sum_(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def max_(self, x: Tensor) -> None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x, group=self.group)
        return parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // dist.get_world_size(self.group), *x.shape[1:])
        reduce_scatter_single(out, x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=self.group)
        return out


@dataclass(frozen=True)
class MetaCommunicator:
    """Of so many ranks that are not there, for tensors on meta: what comes back has its shape and no values."""

    size: int

    def sum_(self, x: Tensor) -> None:
        pass

    def max_(self, x: Tensor) -> None:
        pass

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [torch.empty_like(x) for _ in range(self.size)]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x) // self.size, *x.shape[1:])

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x.new_empty(sum(received), *x.shape[1:])


@dataclass(frozen=True)
class ContextAxis:
    """A rank's place among those that share documents too long for one. Its ranks are ring x ulysses, ulysses inner.

    ranks: all of them. ring: those with the same heads, of which each has other tokens. ulysses: those that exchange
    heads for tokens. Either is None where it has one rank.
    """

    place: int
    ring_size: int
    ulysses_size: int
    ranks: Communicator
    ring: Communicator | None
    ulysses: Communicator | None

    @property
    def size(self) -> int:
        return self.ring_size * self.ulysses_size


@dataclass(eq=False)
class ThreadBarrier:
    """Where `size` threads leave what they have. An error of one must abort the barrier, or the others wait."""

    size: int
    left: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.left = [torch.empty(0)] * self.size


@dataclass(frozen=True, eq=False)
class ThreadCommunicator:
    """One of the threads of a meeting."""

    meeting: ThreadBarrier
    place: int

    def sum_(self, x: Tensor) -> None:
        self._each(x, lambda parts: x.copy_(torch.stack(parts).sum(0)))

    def max_(self, x: Tensor) -> None:
        self._each(x, lambda parts: x.copy_(torch.stack(parts).amax(0)))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        self._each(x, found.extend)
        return found

    def reduce_scatter(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self.sum_(total)
        return total.chunk(self.meeting.size)[self.place]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        found: list[Tensor] = []
        ends = torch.tensor([0, *sent]).cumsum(0).tolist()
        starts = self.all_gather(torch.tensor(ends))

        def take(parts: list[Tensor]) -> None:
            for part, start in zip(parts, starts, strict=True):
                found.append(part[start[self.place] : start[self.place + 1]])

        self._each(x, take)
        assert [len(part) for part in found] == list(received), (sent, received)
        return torch.cat(found)

    def _each(self, x: Tensor, take: Callable[[list[Tensor]], object]) -> None:
        self.meeting.left[self.place] = x.clone()
        self.meeting.barrier.wait()
        parts = list(self.meeting.left)
        self.meeting.barrier.wait()  # nobody leaves the next before all have these
        take(parts)
