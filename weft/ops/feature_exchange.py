"""Features of images travel from the ranks that compute them to those that have their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from weft.ops.communicator import Communicator, all_to_all


@dataclass(frozen=True, eq=False)
class FeatureExchange:
    """The exchange of one row. sent: which of this rank's features go, rank by rank. order: which of those received
    belong to the row's image tokens in turn, then to its video tokens. images: how many are of images."""

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
