"""The loss of a critic. A critic predicts the return from each token on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.engine.losses.base import Batch, LossOutput

if TYPE_CHECKING:
    from weft.engine.step_plan.plan import StepPlan


class ValueLoss:
    """PPO's clipped value loss (of Schulman et al.'s code, arXiv:1707.06347; Huang et al. 2022, "The 37 implementation
    details of PPO", 9):

        1/2 sum_t w_t max((V_t - R_t)^2, (V'_t - R_t)^2) / sum_t w_t,    V' = clip(V, V_old - c, V_old + c)

    over the whole step. Documents carry R as `returns` and V_old, the critic's own value before its first update of
    these samples, as `values`, [T] fp32. clip: c; None for no clipping, and `values` is not read.
    """

    readouts = frozenset({"value"})
    every_token = False

    def __init__(self, clip: float | None = 0.2) -> None:
        self.clip = clip

    def normaliser(self, plan: StepPlan) -> float:
        return plan.totals.weight or 1.0

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return None

    def __call__(self, batch: Batch) -> LossOutput:
        weights_N, value_N, return_N = batch.weights_N, batch.readouts["value"], batch.arrays["returns"]
        square_N, clipped_N = (value_N - return_N).square(), torch.zeros_like(value_N)
        if self.clip is not None:
            old_N = batch.arrays["values"]
            near_N = torch.minimum(torch.maximum(value_N, old_N - self.clip), old_N + self.clip)
            other_N = (near_N - return_N).square()
            clipped_N = (other_N > square_N).detach().to(value_N.dtype)
            square_N = torch.maximum(square_N, other_N)
        loss_sum, weight = (weights_N * square_N).sum() / 2, weights_N.sum()
        metrics: dict[str, tuple[Tensor, Tensor | float]] = {"loss/value_avg": (loss_sum.detach(), weight)}
        if self.clip is not None:
            metrics["val/clipfrac_avg"] = ((weights_N * clipped_N).sum(), weight)
        return LossOutput(loss_sum, metrics)
