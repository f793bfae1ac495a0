"""Sums over documents that mesh.cp cuts over several ranks: completed over the ranks, and counted once. D documents of
a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from weft.ops.communicator import Communicator, added_up


@dataclass(frozen=True, eq=False)
class SharedDocuments:
    """The documents of a row that other ranks share. places: their indices in the row, int64. slots: their numbers
    among all `count` shared documents of the group. counted: indices in the row of the documents that this rank counts;
    exactly one rank of the group counts each."""

    places: Tensor
    slots: Tensor
    count: int
    counted: Tensor
    ranks: Communicator

    def complete(self, values: Tensor) -> Tensor:
        """[D, ...] sums over this rank's tokens -> sums over whole documents; differentiable. Collective."""
        total = values.new_zeros(self.count, *values.shape[1:]).index_add(0, self.slots, values[self.places])
        return values.index_put((self.places,), added_up(total, self.ranks)[self.slots])

    def moved(self, move: Callable[[Tensor], Tensor]) -> SharedDocuments:
        """A copy whose tensors are passed through `move`."""
        return replace(self, places=move(self.places), slots=move(self.slots), counted=move(self.counted))
