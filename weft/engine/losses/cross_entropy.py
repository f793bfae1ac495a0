"""Supervised fine-tuning: loss = sum(w ce) / sum(w) over the whole step, ce = -log p(token)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from weft.engine.losses.base import Batch, LossOutput

if TYPE_CHECKING:
    from weft.engine.step_plan.plan import StepPlan


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
