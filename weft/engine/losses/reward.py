"""Losses of reward models. Their readout is `score`, at the last token of an answer, or of each of its steps.

Sums are divided by counts of the whole step, never of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.engine.losses.base import Batch, LossOutput
from weft.launch.simulated import read

if TYPE_CHECKING:
    from weft.engine.step_plan.plan import StepPlan


class _ScoreLoss:
    """The base of these losses: they only read scores, and divide by the step's loss weight."""

    readouts = frozenset({"score"})
    every_token = False

    def normaliser(self, plan: StepPlan) -> float:
        return plan.totals.weight or 1.0

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return None


class BradleyTerryLoss(_ScoreLoss):
    """The mean over the step's pairs of

        -log sigmoid(r_c - r_r - m) + a (r_c + r_r)^2

    with the scores r of the chosen and the rejected answer, a margin m and `center` a (Bradley and Terry 1952; margins
    of Touvron et al. 2023, arXiv:2307.09288, equation 2; centering of Eisenstein et al. 2023, arXiv:2312.09244).

    Documents 2 i and 2 i + 1 of a step are the chosen and the rejected answer of its pair i. Both carry `margin`. The
    gradient is summed answer by answer, each with the other answer's score as a constant. The sum is the gradient of
    the pair, on whichever rank the other answer is. `scores` holds the scores of answers outside of the row, by index
    in the step.
    """

    def __init__(self, center: float = 0.0) -> None:
        self.center = center
        self.scores: Mapping[int, float] = {}

    def normaliser(self, plan: StepPlan) -> float:
        return plan.totals.documents / 2 or 1.0

    def __call__(self, batch: Batch) -> LossOutput:
        score_N, margin_N = batch.readouts["score"], batch.arrays["margin"]
        numbers = read(batch.document_N, lambda: range(len(score_N)))
        answers = [batch.documents[number] for number in numbers]
        index_of = {answer: n for n, answer in enumerate(answers)}
        opposite_N = torch.zeros_like(score_N)  # the score of the pair's other answer
        near = [(n, index_of[answer ^ 1]) for n, answer in enumerate(answers) if answer ^ 1 in index_of]
        if near:
            indices, opposites = torch.tensor(near, device=score_N.device).T
            opposite_N[indices] = score_N.detach()[opposites]
        far = [n for n, answer in enumerate(answers) if answer ^ 1 not in index_of]
        if far:
            opposite_N[far] = score_N.new_tensor([self.scores[answers[n] ^ 1] for n in far])
        sign_N = score_N.new_tensor([1.0 - 2.0 * (answer % 2) for answer in answers])
        gap_N = sign_N * (score_N - opposite_N)
        loss_N = self.center * (score_N + opposite_N).square() - F.logsigmoid(gap_N - margin_N)
        with torch.no_grad():  # each answer counts for half of its pair
            half, chosen_N = 0.5 * len(answers), (sign_N > 0).to(score_N.dtype)
            metrics: dict[str, tuple[Tensor, Tensor | float]] = {
                "loss": (loss_N.sum() / 2, half),
                "accuracy": ((gap_N > 0).to(score_N.dtype).sum() / 2, half),
                "margin": (gap_N.sum() / 2, half),
                "scores/chosen": ((chosen_N * score_N).sum(), chosen_N.sum()),
                "scores/rejected": (((1 - chosen_N) * score_N).sum(), (1 - chosen_N).sum()),
            }
        return LossOutput(loss_N.sum(), metrics)


class ScoreRegressionLoss(_ScoreLoss):
    """The mean over the step's answers of (r - y)^2, with the score r and the document's `label` y."""

    def __call__(self, batch: Batch) -> LossOutput:
        score_N, weights_N = batch.readouts["score"], batch.weights_N
        error_N = score_N - batch.arrays["label"]
        loss_sum = (weights_N * error_N.square()).sum()
        with torch.no_grad():
            weight = weights_N.sum()
            metrics: dict[str, tuple[Tensor, Tensor | float]] = {
                "loss": (loss_sum, weight),
                "error": ((weights_N * error_N.abs()).sum(), weight),
                "scores/mean": ((weights_N * score_N).sum(), weight),
            }
        return LossOutput(loss_sum, metrics)


class ScoreClassificationLoss(_ScoreLoss):
    """The mean cross entropy of the labels, over all labelled answers, or steps of answers, of the step.

    Documents carry their class as `label`, a number from 0, at the token after the scored token.
    """

    def __call__(self, batch: Batch) -> LossOutput:
        score_NL, weights_N, label_N = batch.readouts["score"], batch.weights_N, batch.arrays["label"].long()
        if not len(label_N):  # the number of labels is unknown in a row without documents
            empty = score_NL.sum()
            return LossOutput(empty, {"loss": (empty.detach(), 0.0), "accuracy": (empty.detach(), 0.0)})
        loss_sum = (weights_N * F.cross_entropy(score_NL, label_N, reduction="none")).sum()
        with torch.no_grad():
            right = (weights_N * (score_NL.argmax(1) == label_N)).sum()
            metrics = {"loss": (loss_sum.detach(), weights_N.sum()), "accuracy": (right, weights_N.sum())}
        return LossOutput(loss_sum, metrics)
