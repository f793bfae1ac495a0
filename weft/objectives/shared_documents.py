"""Documents that several ranks of mesh.cp have parts of: sums over them are completed, and each is counted once.

D documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.ops.communicator import Communicator, summed


@dataclass(frozen=True, eq=False)
class SharedDocuments:
    """Documents of a row that other ranks have parts of.

    places: of these in the row, int64. slots: their numbers among all shared ones of the group, which are `count`.
    counted: places in the row of the documents that this rank counts; each is counted by one rank of the group.
    """

    places: Tensor
    slots: Tensor
    count: int
    counted: Tensor
    ranks: Communicator

    def complete(self, values: Tensor) -> Tensor:
        """[D, ...] sums over parts of documents -> over whole ones. Collective, with a gradient."""
        total = values.new_zeros(self.count, *values.shape[1:]).index_add(0, self.slots, values[self.places])
        complete: Tensor = _SumBoth.apply(total, self.ranks)
        return values.index_put((self.places,), complete[self.slots])

    def moved(self, move: Callable[[Tensor], Tensor]) -> SharedDocuments:
        """The same, with its tensors elsewhere."""
        return replace(self, places=move(self.places), slots=move(self.slots), counted=move(self.counted))


class _SumBoth(torch.autograd.Function):
    """The sum over ranks, which each rank's loss then depends on: so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.ranks), None
