"""Collectives over the ranks of a mesh axis: sums, maxima, all-gather, reduce-scatter, all-to-all.

Besides process groups there is a version for threads of one process, with which a division of a model is tested where
there is only one rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.versions import reduce_scatter_single


class Communicator(Protocol):
    """Collectives: all ranks call each method together, with tensors of equal dtype and, but for all_to_all, equal
    shape."""

    def sum_(self, x: Tensor) -> None:
        """Replace x with the sum over the ranks."""
        ...

    def max_(self, x: Tensor) -> None:
        """Replace x with the maximum over the ranks."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ranks' x, in order of ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over the ranks, cut evenly along the first dimension."""
        ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[sum(received), ...] from x [sum(sent), ...]: rank r gets the next sent[r] rows, and received[r] rows come
        from it. Sizes may differ, and be 0."""
        ...


def summed(x: Tensor, ranks: Communicator) -> Tensor:
    """The sum over the ranks; x is unchanged."""
    out = x.contiguous().clone()
    ranks.sum_(out)
    return out


def added_up(x: Tensor, ranks: Communicator) -> Tensor:
    """The sum over the ranks, each of which goes on with it to something of its own: gradients are summed, too."""
    out: Tensor = _AddUp.apply(x, ranks)
    return out


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.ranks), None


def all_to_all(x: Tensor, ranks: Communicator, sent: list[int], received: list[int]) -> Tensor:
    """Communicator.all_to_all with a gradient, which travels back."""
    out: Tensor = _Exchange.apply(x, ranks, sent, received)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator, sent: list[int], received: list[int]) -> Tensor:
        ctx.rest = ranks, sent, received
        return ranks.all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, sent, received = ctx.rest
        return ranks.all_to_all(grad, received, sent), None, None, None


@dataclass(frozen=True, eq=False)
class FeatureExchange:
    """The features of images, on their way from the ranks that compute them to those that have their tokens.

    sent: which of this rank's go, rank by rank. order: which of those received belong to the row's image tokens in
    turn, then to its video tokens. images: how many are of images.
    """

    ranks: Communicator
    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    order: Tensor
    images: int

    def run(self, features_FH: Tensor) -> Tensor:
        """The features of this row's tokens, from those that this rank has computed. Collective, with a gradient."""
        received = all_to_all(features_FH[self.sent], self.ranks, self.sent_counts, self.received_counts)
        return received[self.order]

    def moved(self, move: Callable[[Tensor], Tensor]) -> FeatureExchange:
        return replace(self, sent=move(self.sent), order=move(self.order))


@dataclass(frozen=True)
class GroupCommunicator:
    """A process group."""

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


def process_group(ranks: Communicator) -> dist.ProcessGroup:
    """The group behind ranks that are processes."""
    assert isinstance(ranks, GroupCommunicator)
    return ranks.group


@dataclass(frozen=True)
class MetaCommunicator:
    """`size` ranks that do not exist, for tensors on meta: results have shapes only."""

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
    """This rank's place among the ranks of cp, which share documents. They are ring x ulysses; ulysses is the inner
    dimension.

    ranks: all of them. ring: those with the same heads and different tokens. ulysses: those that exchange heads for
    tokens. ring and ulysses are None where they have one rank.
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
class ThreadGroup:
    """The tensors that `size` threads exchange. A thread that fails must abort the barrier, or the others wait for
    ever."""

    size: int
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.values = [torch.empty(0)] * self.size


@dataclass(frozen=True, eq=False)
class ThreadCommunicator:
    """One thread of a group of threads that stand for ranks."""

    group: ThreadGroup
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
        return total.chunk(self.group.size)[self.place]

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
        self.group.values[self.place] = x.clone()
        self.group.barrier.wait()
        parts = list(self.group.values)
        self.group.barrier.wait()  # nobody leaves the next before all have these
        take(parts)
