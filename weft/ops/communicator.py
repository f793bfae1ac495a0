"""Collectives over the ranks of a mesh axis: sums, maxima, all-gather, reduce-scatter, all-to-all.

Ranks are processes (GroupCommunicator) or threads of one process (ThreadCommunicator). The checks at the start use
threads to compare a sharded model with the full one in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.ops.recompute import reuse_in_recompute
from weft.versions import reduce_scatter_single


class Communicator(Protocol):
    """Collectives. All ranks must call each method together, with tensors of equal dtype and, except for all_to_all,
    equal shape."""

    def sum_(self, x: Tensor) -> None:
        """Replace x with the sum over the ranks."""
        ...

    def max_(self, x: Tensor) -> None:
        """Replace x with the maximum over the ranks."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in order of ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over the ranks. The sum is split evenly along the first dimension."""
        ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[sum(received), ...] from x [sum(sent), ...]. In order of ranks r, sent[r] rows of x go to rank r, and
        received[r] rows come from rank r. Counts may differ and may be 0."""
        ...


def all_reduce(x: Tensor, ranks: Communicator) -> Tensor:
    """The sum over the ranks. x does not change."""
    out = x.contiguous().clone()
    ranks.sum_(out)
    return out


def all_reduce_autograd(x: Tensor, ranks: Communicator) -> Tensor:
    """The sum over the ranks, differentiable. Ranks may use the sum differently, so backward sums their gradients."""
    out: Tensor = _AddUp.apply(x, ranks)
    return out


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return reuse_in_recompute(lambda: all_reduce(x, ranks), "collectives")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.ranks), None


def all_to_all(x: Tensor, ranks: Communicator, sent: list[int], received: list[int]) -> Tensor:
    """Communicator.all_to_all, differentiable: backward sends the gradients of the rows back."""
    out: Tensor = _Exchange.apply(x, ranks, sent, received)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator, sent: list[int], received: list[int]) -> Tensor:
        ctx.arguments = ranks, sent, received
        return reuse_in_recompute(lambda: ranks.all_to_all(x, sent, received), "collectives")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, sent, received = ctx.arguments
        return ranks.all_to_all(grad, received, sent), None, None, None


@dataclass(frozen=True, eq=False)
class FeatureExchange:
    """Sends the features of images from the ranks that compute them to the ranks that have their tokens.

    sent: indices of this rank's features to send, rank by rank. order: permutation of the received features into the
    order of the row's image tokens, followed by its video tokens. images: number of image tokens in `order`.
    """

    ranks: Communicator
    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    order: Tensor
    images: int

    def run(self, features_FH: Tensor) -> Tensor:
        """The features of this row's tokens, from the features computed on all ranks. Collective; differentiable."""
        received = all_to_all(features_FH[self.sent], self.ranks, self.sent_counts, self.received_counts)
        return received[self.order]

    def moved(self, move: Callable[[Tensor], Tensor]) -> FeatureExchange:
        return replace(self, sent=move(self.sent), order=move(self.order))


@dataclass(frozen=True)
class GroupCommunicator:
    """Collectives over a process group."""

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
    """The process group of a GroupCommunicator."""
    assert isinstance(ranks, GroupCommunicator)
    return ranks.group


@dataclass(frozen=True)
class MetaCommunicator:
    """Collectives over `size` simulated ranks, for tensors on meta: results have the right shapes and no values."""

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
class CPAxis:
    """This rank's position on mesh.cp. Its ranks share documents, and form a grid ring x ulysses, ulysses innermost.

    rank: index on mesh.cp. ranks: all ranks of mesh.cp. ring: ranks with the same heads and different tokens. ulysses:
    ranks that exchange heads for tokens. ring and ulysses are None if they have one rank.
    """

    rank: int
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
    """The tensors that `size` threads exchange. A thread that fails must abort the barrier; otherwise the other threads
    wait forever."""

    size: int
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.values = [torch.empty(0)] * self.size


@dataclass(frozen=True, eq=False)
class ThreadCommunicator:
    """Collectives over threads of one process. rank: the calling thread's rank."""

    group: ThreadGroup
    rank: int

    def sum_(self, x: Tensor) -> None:
        self._exchange(x, lambda parts: x.copy_(torch.stack(parts).sum(0)))

    def max_(self, x: Tensor) -> None:
        self._exchange(x, lambda parts: x.copy_(torch.stack(parts).amax(0)))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        parts: list[Tensor] = []
        self._exchange(x, parts.extend)
        return parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self.sum_(total)
        return total.chunk(self.group.size)[self.rank]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        received_parts: list[Tensor] = []
        ends = torch.tensor([0, *sent]).cumsum(0).tolist()
        starts = self.all_gather(torch.tensor(ends))

        def select(values: list[Tensor]) -> None:
            for value, start in zip(values, starts, strict=True):
                received_parts.append(value[start[self.rank] : start[self.rank + 1]])

        self._exchange(x, select)
        assert [len(part) for part in received_parts] == list(received), (sent, received)
        return torch.cat(received_parts)

    def _exchange(self, x: Tensor, use: Callable[[list[Tensor]], object]) -> None:
        """Call `use` with the tensors of all threads."""
        self.group.values[self.rank] = x.clone()
        self.group.barrier.wait()
        values = list(self.group.values)
        self.group.barrier.wait()  # no thread may overwrite its value before all threads have read it
        use(values)
