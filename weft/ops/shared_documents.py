"""Sums over documents that mesh.cp splits over ranks: summed over the ranks, and counted once. D documents of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from weft.ops.communicator import Communicator, all_reduce_autograd


@dataclass(frozen=True, eq=False)
class SharedDocuments:
    """The documents of a row of which other ranks hold parts.

    row_indices: their indices in the row, int64. shared_indices: their indices among all `count` shared documents of
    the group. counted_indices: indices in the row of all documents that this rank counts. Exactly one rank of the group
    counts each document."""

    row_indices: Tensor
    shared_indices: Tensor
    count: int
    counted_indices: Tensor
    ranks: Communicator

    def complete(self, values: Tensor) -> Tensor:
        """[D, ...] sums over this rank's tokens of each document -> sums over full documents. Differentiable;
        collective."""
        total = values.new_zeros(self.count, *values.shape[1:]).index_add(
            0, self.shared_indices, values[self.row_indices]
        )
        return values.index_put((self.row_indices,), all_reduce_autograd(total, self.ranks)[self.shared_indices])

    def moved(self, move: Callable[[Tensor], Tensor]) -> SharedDocuments:
        """A copy whose tensors are passed through `move`."""
        return replace(
            self,
            row_indices=move(self.row_indices),
            shared_indices=move(self.shared_indices),
            counted_indices=move(self.counted_indices),
        )
