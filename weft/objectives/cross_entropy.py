"""Supervised fine-tuning: loss = sum(w ce) / sum(w) over the whole step, ce = -log p(token)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from weft.objectives.base import Batch, Terms

if TYPE_CHECKING:
    from weft.engine.plan import StepPlan


class CrossEntropy:
    """Weighted token-mean cross entropy; a step whose weights are all zero has loss 0."""

    readouts = frozenset({"logprob"})
    every_token = False

    def normaliser(self, plan: StepPlan) -> float:
        return plan.totals.weight or 1.0

    def upstream(self, weights_N: Tensor) -> Tensor | None:
        return -weights_N

    def __call__(self, batch: Batch) -> Terms:
        loss_sum = -(batch.weights_N * batch.readouts["logprob"]).sum()
        return Terms(loss_sum, {"loss": (loss_sum.detach(), batch.weights_N.sum())})
