"""The interface of a loss: it maps readouts to weighted sums over tokens.

A loss never divides by counts of its batch, because a batch is only one row of one rank. The engine divides the sum by
`normaliser(plan)`, which is computed from the whole step's plan. So gradients do not depend on how a step is split into
rows.
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
    """The predictions of one row, as a loss reads them.

    readouts: name -> [N] fp32 with gradients, or [N, ...] for readouts with several values per prediction (`top_ids/K`,
    of `top_logits/K`, is int64). weights_N, arrays: loss weights and the documents' arrays, of the predicted tokens.
    document_N: index into `documents` of each prediction. documents: indices of the row's documents in the step.
    shared: documents of which other ranks hold parts.
    """

    readouts: dict[str, Tensor]
    weights_N: Tensor
    document_N: Tensor
    documents: tuple[int, ...]
    arrays: dict[str, Tensor]
    shared: SharedDocuments | None = None

    def document_sum(self, values_N: Tensor) -> Tensor:
        """Sum over each document's predictions, [documents]; differentiable, and equal on every mesh.

        Each document of the step is one element on exactly one rank, so losses and metrics may add the elements up.
        With mesh.cp a row may hold parts of documents that another rank counts; per_token_document_sum covers these
        too.
        """
        sums_D = self._document_sums(values_N)
        return sums_D if self.shared is None else sums_D.index_select(0, self.shared.counted_indices)

    @property
    def counted_documents(self) -> list[int]:
        """The indices in the step of the documents of document_sum, in its order."""
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
    """The sums that a loss returns for a row.

    loss_sum: scalar with gradient, not normalised. metrics: name -> (sum, weight), added up over the step. balance_sum:
    the sum of the experts' auxiliary loss; the engine sets it, and divides it by the step's tokens.
    """

    loss_sum: Tensor
    metrics: dict[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)
    balance_sum: Tensor | None = None


Terms = LossOutput  # the former name, for losses written with it


class Loss(Protocol):
    """readouts: names of the per-token outputs that it needs (readouts.py). every_token: whether it also needs them at
    tokens with weight 0.

    A loss that reads `chosen_logits` must also have a method token_ids(targets_N, arrays) -> [N, C] int64 tokens. A
    loss that reads `divergence` must have a method comparisons(arrays, N) -> the teachers of the N predictions.
    """

    readouts: frozenset[str]
    every_token: bool

    def normaliser(self, plan: StepPlan) -> float:
        """The divisor of the whole step's loss sum, computed from the plan alone."""
        ...

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        """[N] gradient of the loss with respect to each logprob, up to a common factor, if it is known before the
        forward; else None. With the readout `divergence`: [2 N], followed by the gradient with respect to each
        divergence. If the computed gradient differs, the step raises UserError."""
        ...

    def __call__(self, batch: Batch) -> LossOutput: ...


def known_logprob_grad(objective: Loss, weights_N: Tensor) -> Tensor | None:
    """Calls Loss.logprob_grad, or `upstream`, its former name, which users' losses may still have."""
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
    model's most likely token. exact: the share of documents for which this holds at all trained tokens, so that greedy
    decoding would produce them."""

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
