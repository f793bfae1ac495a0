"""A training sequence. What a step plan needs to know of it is in plan.py, rows of them are in row.py.

T tokens of a document or row, N predictions of a row that somebody needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from weft.engine.plan import DocumentMeta


@dataclass(frozen=True, slots=True)
class Document:
    """One training sequence.

    tokens: [T] int64. weights: [T] fp32, the loss weight of each token as a target; the first token has no
    prediction, so its weight is never used. positions: [T] or [3, T] int64, default 0..T-1.
    arrays: further per-token values [T] (old logprobs, advantages), aligned with tokens.
    routes: [T, decoder layers, k] int16 or uint8, the experts that each token is to go to; -1 for its router's own
    choice (engine/replay.py). source: where it came from, for messages ("chat.jsonl:12"). dataset: the name of its
    source, where several have one.
    """

    tokens: Tensor
    weights: Tensor
    positions: Tensor | None = None
    arrays: dict[str, Tensor] = field(default_factory=dict)
    routes: Tensor | None = None
    group: int | None = None
    source: str = ""
    dataset: str = ""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def meta(self, cost: float = 0.0, unread: int = 0) -> DocumentMeta:
        """cost, unread: as DocumentMeta has them."""
        predicted = self.weights[1:].numpy().astype(np.float64)  # for short documents a third of torch's time
        return DocumentMeta(
            length=len(self),
            weight=float(predicted.sum()),
            loss_tokens=int(np.count_nonzero(predicted)),
            group=self.group,
            cost=cost,
            routed=self.routes is not None,
            unread=unread,
        )
