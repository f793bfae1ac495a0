"""The interface of an objective, which maps readouts to weighted sums over tokens.

An objective never divides by a count of its own rows, because a rank sees no others. The engine divides the sum by
`normaliser(plan)`, computed from the whole step's plan, so that gradients do not depend on how a step is cut.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from weft.errors import UserError
from weft.objectives.readouts import TOP, TOP_IDS, Wanted
from weft.objectives.shared_documents import SharedDocuments

if TYPE_CHECKING:
    from weft.engine.plan import StepPlan


@dataclass(frozen=True)
class Batch:
    """The predictions of one row, as an objective sees them.

    readouts: name -> [N] fp32 with gradients, or [N, ...] for readouts with several values per prediction (`top_ids/K`,
    of `top_logits/K`, is int64). weights_N, arrays: loss weights and the documents' arrays, of the predicted tokens.
    document_N: index into `documents` of each prediction. documents: indices of the row's documents in the step.
    shared: documents that other ranks have parts of.
    """

    readouts: dict[str, Tensor]
    weights_N: Tensor
    document_N: Tensor
    documents: tuple[int, ...]
    arrays: dict[str, Tensor]
    shared: SharedDocuments | None = None

    def document_sum(self, values_N: Tensor) -> Tensor:
        """Sum over each document's predictions, [documents]; differentiable, and equal on every mesh.

        Each document of the step is one element on one rank, so that losses and metrics may add the elements up. With
        mesh.cp a row may have parts of documents that another rank counts; per_token_document_sum covers those too.
        """
        sums_D = self._document_sums(values_N)
        return sums_D if self.shared is None else sums_D.index_select(0, self.shared.counted)

    def per_token_document_sum(self, values_N: Tensor) -> Tensor:
        """[N]: for each prediction the sum over its whole document; differentiable, and equal on every mesh."""
        return self._document_sums(values_N)[self.document_N]

    def _document_sums(self, values_N: Tensor) -> Tensor:
        out = torch.zeros(len(self.documents), dtype=values_N.dtype, device=values_N.device)
        out = out.index_add(0, self.document_N, values_N)
        return out if self.shared is None else self.shared.complete(out)


@dataclass(frozen=True)
class Terms:
    """The sums that an objective returns for a row.

    loss_sum: scalar with gradient, not normalised. metrics: name -> (sum, weight), added up over the step. balance_sum:
    the sum of the experts' auxiliary loss, which the engine adds and divides by the step's tokens.
    """

    loss_sum: Tensor
    metrics: dict[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)
    balance_sum: Tensor | None = None


def check_terms(found: Any, objective: Objective) -> Terms:
    """The Terms that an objective returned. Raises UserError if it returned something else."""
    if isinstance(found, Terms) and isinstance(found.loss_sum, Tensor) and not found.loss_sum.ndim:
        return found
    what = found.loss_sum if isinstance(found, Terms) else found
    shape = f" of shape {list(what.shape)}" if isinstance(what, Tensor) else ""
    raise UserError(
        f"train.objective: {type(objective).__name__} returned {'a loss_sum that is ' * isinstance(found, Terms)}"
        f"a {type(what).__name__}{shape}; it must be Terms(loss_sum=...), the sum over all predictions of the batch, a "
        "tensor without dimensions. docs/how-to/objective.md shows one that is whole."
    )


def chosen_tokens(objective: Objective, targets_N: Tensor, arrays: dict[str, Tensor]) -> Tensor | None:
    """[N, C] tokens whose logits an objective asks for; None if it does not read `chosen_logits`. Raises UserError for
    another shape or dtype."""
    if "chosen_logits" not in objective.readouts:
        return None
    ask: Any = objective
    ids, count = ask.token_ids(targets_N, arrays), len(targets_N)
    if not count and isinstance(ids, Tensor) and ids.ndim < 2:  # of a row without documents, which has no arrays
        return targets_N.new_empty(0, 0)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2 or len(ids) != count:
        what = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UserError(
            f"train.objective: token_ids() of {type(objective).__name__} gives {what}, and has to give int64 of shape "
            f"[{count}, tokens]: for each prediction the same number of tokens."
        )
    return ids.to(targets_N)


def metrics_of(objective: Objective) -> list[str]:
    """Names of an objective's metrics, from a row without predictions."""
    nothing, wanted = torch.zeros(0), Wanted.of(objective.readouts)
    targets_N, arrays = torch.zeros(0, dtype=torch.int64), defaultdict[str, Tensor](lambda: nothing)
    readouts: dict[str, Tensor] = dict.fromkeys(("logprob", *objective.readouts), nothing)
    for name in [name for name in objective.readouts if name.startswith(TOP)]:
        width = int(name.removeprefix(TOP))
        readouts |= {name: torch.zeros(0, width), TOP_IDS + str(width): targets_N.new_zeros(0, width)}
    chosen_NC = chosen_tokens(objective, targets_N, arrays)
    if chosen_NC is not None:
        readouts["chosen_logits"] = torch.zeros(chosen_NC.shape)
    assert not wanted.hidden, "a stage that computes no loss has no modules to read"
    batch = Batch(readouts, nothing, targets_N, (), arrays)
    return list(check_terms(objective(batch), objective).metrics)


class Objective(Protocol):
    """readouts: the readouts that it needs of the model (readouts.py). every_token: whether it needs them for tokens
    with a weight of zero, too.

    An objective that reads `chosen_logits` also has a method token_ids(targets_N, arrays) -> [N, C] int64 tokens.
    """

    readouts: frozenset[str]
    every_token: bool

    def normaliser(self, plan: StepPlan) -> float:
        """The divisor of the whole step's loss sum, from the plan alone."""
        ...

    def upstream(self, weights_N: Tensor) -> Tensor | None:
        """[N] gradient of the loss with respect to each logprob, up to one factor, if it is known before the forward;
        else None. A step whose real gradient differs ends with UserError."""
        ...

    def __call__(self, batch: Batch) -> Terms: ...
