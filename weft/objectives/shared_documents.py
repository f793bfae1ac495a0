"""Documents that several ranks of mesh.cp have parts of: sums over them are completed, and each is counted once.

D documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.ops.communicator import Communicator


@dataclass(frozen=True, eq=False)
class SharedDocuments:
    """Documents of a row that other ranks have parts of. slots_D: of each document of the row, its place among all
    shared ones of the group, -1 for one that is whole here. count: of all shared ones. counted_D: whether this rank
    counts the document, as one rank of the group does."""

    slots_D: Tensor
    count: int
    counted_D: Tensor
    ranks: Communicator

    def complete(self, values: Tensor) -> Tensor:
        """[D, ...] sums over parts of documents -> over whole ones. Collective, with a gradient."""
        shared = self.slots_D >= 0
        places, slots = shared.nonzero().flatten(), self.slots_D[shared]
        total = values.new_zeros(self.count, *values.shape[1:]).index_add(0, slots, values[places])
        complete: Tensor = _SumBoth.apply(total, self.ranks)
        return values.index_put((places,), complete[slots])

    def moved(self, move: Callable[[Tensor], Tensor]) -> SharedDocuments:
        """The same, with its tensors elsewhere."""
        return replace(self, slots_D=move(self.slots_D), counted_D=move(self.counted_D))


class _SumBoth(torch.autograd.Function):
    """The sum over ranks, which each rank's loss then depends on: so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return _summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.ranks), None


def _summed(x: Tensor, ranks: Communicator) -> Tensor:
    out = x.contiguous().clone()
    ranks.sum_(out)
    return out
