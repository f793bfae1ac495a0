"""Losses of distillation: a student's distribution against that of one or several teachers.

N predictions, K tokens of a teacher's top list. Formulas: weft/ops/divergence.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.engine.losses.base import Batch, LossOutput
from weft.ops.divergence import Comparison, TeacherHead, Terms

if TYPE_CHECKING:
    from weft.engine.step_plan.plan import StepPlan

# Arrays of documents. HIDDEN: [T, widest teacher], last hidden states at the position that predicts token t. TEACHER:
# [T] int64, which teacher's; only with several.
HIDDEN, TEACHER = "teacher_hidden", "teacher"
TOP_IDS, TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"  # [T, K]; unused places have id -1


class DistillationLoss:
    """alpha x cross entropy + (1 - alpha) x scale x divergence, a weighted mean over the step's tokens.

    The normaliser is the loss weight of the whole step, so that the loss does not depend on micro-batches. Teachers get
    no gradient. terms: the divergence; temperature divides both models' logits in it. scale: 1, or temperature squared
    (Hinton et al., 1503.02531), which keeps gradients as large as at temperature 1. measured: for held-out documents,
    also whether both models' most likely tokens are the same.
    """

    every_token = False

    def __init__(
        self,
        terms: Terms,
        heads: Sequence[TeacherHead] = (),
        *,
        temperature: float = 1.0,
        alpha: float = 0.0,
        scale: float = 1.0,
        measured: bool = False,
    ) -> None:
        self.terms, self.heads, self.temperature = terms, list(heads), temperature
        self.alpha, self.scale = alpha, scale
        self.readouts = frozenset({"logprob", "divergence", *(["agreement"] if measured else [])})

    def normaliser(self, plan: StepPlan) -> float:
        return plan.totals.weight or 1.0

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return torch.cat([-self.alpha * weights_N, (1 - self.alpha) * self.scale * weights_N])

    def comparisons(self, arrays: Mapping[str, Tensor], count: int) -> list[Comparison]:
        """The teachers of a row's predictions. A row without documents has a comparison without predictions."""
        out = []
        for index, head in enumerate(self.heads):
            width, hidden = head.weight.shape[1], arrays[HIDDEN]
            chosen = None
            if not count:
                hidden = head.weight.new_zeros(0, width)
            elif len(self.heads) > 1:
                chosen = (arrays[TEACHER] == index).nonzero()[:, 0]
                hidden = hidden[chosen]
            hidden = hidden[:, :width].to(head.weight.dtype)
            out.append(Comparison(self.terms, hidden, head, self.temperature, chosen))
        return out

    def __call__(self, batch: Batch) -> LossOutput:
        return _mixed(batch, batch.readouts["divergence"], self.alpha, self.scale)


class TopKDistillationLoss:
    """As DistillationLoss at temperature 1, with forward KL from a teacher's K most likely tokens and a tail.

    The teacher's other tokens are one bin, and so are the student's: sum_k q_k (log q_k - log p_k) + q_tail (log q_tail
    - log p_tail). Without the tail the sum is no divergence: it may be negative, and its minimum is not q
    (2601.19897, section 3; verl's top-k loss leaves it out).
    """

    every_token = False

    def __init__(self, *, alpha: float = 0.0) -> None:
        self.alpha = alpha
        self.readouts = frozenset({"logprob", "logsumexp", "chosen_logits"})

    def normaliser(self, plan: StepPlan) -> float:
        return plan.totals.weight or 1.0

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return None  # the head gives single logits, whose gradients it computes in backward

    def token_ids(self, targets_N: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """[N, K] the teacher's tokens. Unused places read token 0, and count nothing."""
        ids = arrays[TOP_IDS]
        return ids.clamp(min=0).to(targets_N.dtype) if ids.ndim == 2 else targets_N.new_zeros(len(targets_N), 0)

    def __call__(self, batch: Batch) -> LossOutput:
        readouts = batch.readouts
        log_p = readouts["chosen_logits"] - readouts["logsumexp"][:, None]
        if len(batch.weights_N):
            is_used, log_q = batch.arrays[TOP_IDS] >= 0, batch.arrays[TOP_LOGPROBS].to(log_p.dtype)
            divergence = _with_tail(log_p, log_q, is_used)
        else:
            divergence = log_p.sum(1)
        return _mixed(batch, divergence, self.alpha)


def _mixed(batch: Batch, divergence_N: Tensor, alpha: float, scale: float = 1.0) -> LossOutput:
    """alpha x cross entropy + (1 - alpha) x scale x divergence, with both, and the agreement if it was read, as
    metrics."""
    weights_N, readouts = batch.weights_N, batch.readouts
    ce_sum, divergence_sum = -(weights_N * readouts["logprob"]).sum(), (weights_N * divergence_N).sum()
    loss_sum = alpha * ce_sum + (1 - alpha) * scale * divergence_sum
    metrics = {"loss": loss_sum, "divergence": divergence_sum, "ce": ce_sum}
    if "agreement" in readouts:
        metrics["agreement"] = (weights_N * readouts["agreement"]).sum()
    total = weights_N.sum()
    return LossOutput(loss_sum, {name: (value.detach(), total) for name, value in metrics.items()})


def _with_tail(log_p: Tensor, log_q: Tensor, is_used: Tensor) -> Tensor:
    """[N] KL(q || p) over the used tokens [N, K] and one bin for all others."""
    smallest = torch.finfo(log_p.dtype).eps
    q = torch.where(is_used, log_q.exp(), 0.0)
    of_listed = torch.where(is_used, q * (log_q - log_p), 0.0).sum(1)
    p_tail = (1 - torch.where(is_used, log_p.exp(), 0.0).sum(1)).clamp(min=smallest)
    q_tail = (1 - q.sum(1)).clamp(min=0.0)
    tail = torch.where(q_tail > smallest, q_tail * (q_tail.clamp(min=smallest).log() - p_tail.log()), 0.0)
    return of_listed + tail
