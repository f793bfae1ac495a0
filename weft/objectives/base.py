"""What an objective is: a map from readouts to weighted sums over tokens.

It never divides by what it sees: a rank sees only its own rows. The engine divides the sum by `normaliser(plan)`,
computed from the whole step's plan, so that no cut of the step can change a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from weft.errors import UserError

if TYPE_CHECKING:
    from weft.engine.plan import StepPlan


@dataclass(frozen=True)
class Batch:
    """The predictions of one row, as an objective sees them.

    readouts: name -> [N] fp32, with gradients, or [N, ...] of what has several values for each prediction (`top_ids/K`,
    of `top_logits/K`, is int64). weights_N, arrays: those of the predicted tokens. document_N: place of
    each prediction's document in `documents`, the step's indices of the documents of this row.
    """

    readouts: dict[str, Tensor]
    weights_N: Tensor
    document_N: Tensor
    documents: tuple[int, ...]
    arrays: dict[str, Tensor]

    def document_sum(self, values_N: Tensor) -> Tensor:
        """Sum over each document's predictions, [documents]; differentiable, and complete on every mesh."""
        out = torch.zeros(len(self.documents), dtype=values_N.dtype, device=values_N.device)
        return out.index_add(0, self.document_N, values_N)


@dataclass(frozen=True)
class Terms:
    """loss_sum: scalar with gradient, not yet normalised. metrics: name -> (sum, weight), summed over the step.

    balance_sum: of experts, added by the engine; it has a normaliser of its own, the step's tokens.
    """

    loss_sum: Tensor
    metrics: dict[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)
    balance_sum: Tensor | None = None


def check_terms(found: Any, objective: Objective) -> Terms:
    """What an objective returned, if it is what it must return. Raises UserError."""
    if isinstance(found, Terms) and isinstance(found.loss_sum, Tensor) and not found.loss_sum.ndim:
        return found
    what = found.loss_sum if isinstance(found, Terms) else found
    shape = f" of shape {list(what.shape)}" if isinstance(what, Tensor) else ""
    raise UserError(
        f"train.objective: {type(objective).__name__} returned {'a loss_sum that is ' * isinstance(found, Terms)}"
        f"a {type(what).__name__}{shape}; it must be Terms(loss_sum=...), the sum over all predictions of the batch, a "
        "tensor without dimensions. docs/how-to/objective.md shows one that is whole."
    )


class Objective(Protocol):
    """readouts: what of the model is wanted, by the names of readouts.py. every_token: also of tokens whose weight is
    zero.

    One that asks for `chosen_logits` has a method `token_ids(targets_N, arrays)`, which gives the tokens: [N, C] int64.
    """

    readouts: frozenset[str]
    every_token: bool

    def normaliser(self, plan: StepPlan) -> float:
        """What the whole step's loss sum is divided by; from the plan alone."""
        ...

    def upstream(self, weights_N: Tensor) -> Tensor | None:
        """The gradient that each logprob will receive, up to one factor, where it is known before the forward; else
        None. A step in which it turns out to be another raises UserError."""
        ...

    def __call__(self, batch: Batch) -> Terms: ...
