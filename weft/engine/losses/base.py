"""The interface of an objective, which maps readouts to weighted sums over tokens.

An objective never divides by a count of its own rows, because a rank sees no others. The engine divides the sum by
`normaliser(plan)`, computed from the whole step's plan, so that gradients do not depend on how a step is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from weft.ops.shared_documents import SharedDocuments

if TYPE_CHECKING:
    from weft.engine.step_plan.plan import StepPlan


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
        return sums_D if self.shared is None else sums_D.index_select(0, self.shared.counted_indices)

    @property
    def counted_documents(self) -> list[int]:
        """The places in the step of the documents of document_sum, in its order."""
        if self.shared is None:
            return list(self.documents)
        return [self.documents[index] for index in self.shared.counted_indices.tolist()]

    def per_token_document_sum(self, values_N: Tensor) -> Tensor:
        """[N]: for each prediction the sum over its whole document; differentiable, and equal on every mesh."""
        return self._document_sums(values_N)[self.document_N]

    def _document_sums(self, values_N: Tensor) -> Tensor:
        out = torch.zeros(len(self.documents), dtype=values_N.dtype, device=values_N.device)
        out = out.index_add(0, self.document_N, values_N)
        return out if self.shared is None else self.shared.complete(out)


@dataclass(frozen=True)
class LossOutput:
    """The sums that an objective returns for a row.

    loss_sum: scalar with gradient, not normalised. metrics: name -> (sum, weight), added up over the step. balance_sum:
    the sum of the experts' auxiliary loss, which the engine adds and divides by the step's tokens.
    """

    loss_sum: Tensor
    metrics: dict[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)
    balance_sum: Tensor | None = None


Terms = LossOutput  # the former name, for losses written with it


class Loss(Protocol):
    """readouts: the readouts that it needs of the model (readouts.py). every_token: whether it needs them for tokens
    with a weight of zero, too.

    An objective that reads `chosen_logits` also has a method token_ids(targets_N, arrays) -> [N, C] int64 tokens, and
    one that reads `divergence` a method comparisons(arrays, N) -> the teachers of the N predictions.
    """

    readouts: frozenset[str]
    every_token: bool

    def normaliser(self, plan: StepPlan) -> float:
        """The divisor of the whole step's loss sum, from the plan alone."""
        ...

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        """[N] gradient of the loss with respect to each logprob, up to one factor, if it is known before the forward;
        else None. With the readout `divergence` [2 N], then with respect to each of these. A step whose real gradient
        differs ends with UserError."""
        ...

    def __call__(self, batch: Batch) -> LossOutput: ...


def known_logprob_grad(objective: Loss, weights_N: Tensor) -> Tensor | None:
    """What Loss.logprob_grad returns. `upstream` is its former name, which losses of users may still have."""
    name = "logprob_grad" if hasattr(objective, "logprob_grad") else "upstream"
    gradient_N: Tensor | None = getattr(objective, name)(weights_N)
    return gradient_N


class CrossEntropy:
    """Weighted token-mean cross entropy; a step whose weights are all zero has loss 0."""

    readouts = frozenset({"logprob"})
    every_token = False

    def normaliser(self, plan: StepPlan) -> float:
        return plan.totals.weight or 1.0

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return -weights_N

    def __call__(self, batch: Batch) -> LossOutput:
        loss_sum = -(batch.weights_N * batch.readouts["logprob"]).sum()
        return LossOutput(loss_sum, {"loss": (loss_sum.detach(), batch.weights_N.sum())})


class HeldOutLoss(CrossEntropy):
    """The same loss without gradients, with two more metrics. accuracy: the weighted share of tokens that are the
    likeliest. exact: the share of documents whose trained tokens all are, so that greedy decoding would write them."""

    readouts = frozenset({"logprob", "top1"})

    def __call__(self, batch: Batch) -> LossOutput:
        terms = super().__call__(batch)
        weights_N = batch.weights_N
        accuracy = (weights_N * batch.readouts["top1"]).sum(), weights_N.sum()
        trained = (weights_N != 0).to(weights_N.dtype)
        missed = batch.document_sum(trained * (1 - batch.readouts["top1"]))
        has_targets = batch.document_sum(trained) > 0
        exact = ((missed == 0) & has_targets).sum().double(), has_targets.sum().double()
        return LossOutput(terms.loss_sum, {**terms.metrics, "accuracy": accuracy, "exact": exact})
