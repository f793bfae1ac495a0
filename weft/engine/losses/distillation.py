"""Losses of distillation: a student's distribution against that of one or several teachers.

N predictions, K tokens of a teacher's top list. Formulas: weft/ops/divergence.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.config.distill_schema import DIVERGENCES, TOP_IDS, TOP_LOGPROBS, DistillSection
from weft.engine.losses.base import Batch, LossOutput
from weft.errors import UserError
from weft.importing import import_named
from weft.ops import divergence
from weft.ops.divergence import Comparison, TeacherHead, TeacherLogits, Terms, TopTokens

if TYPE_CHECKING:
    from weft.engine.step_plan.plan import StepPlan

# Arrays of documents. HIDDEN: [T, widest teacher], last hidden states at the position that predicts token t. TEACHER:
# [T] int64, the number of the document's teacher; only with several teachers. TOP_IDS, TOP_LOGPROBS: [T, K], the
# listed tokens in the teacher's prediction of token t; unused entries have id -1.
HIDDEN, TEACHER = "teacher_hidden", "teacher"


class Listed:
    """Replaces TeacherHead for a teacher that is given as lists of its most likely tokens."""


class DistillationLoss:
    """alpha x cross entropy + (1 - alpha) x scale x divergence, a weighted mean over the step's tokens.

    The normaliser is the loss weight of the whole step, so that the loss does not depend on micro-batches. Teachers get
    no gradient. terms: the divergence; temperature divides both models' logits in it. scale: 1, or temperature squared
    (Hinton et al. 2015, arXiv:1503.02531), which keeps the size of gradients at temperature 1. measured: for held-out
    documents, also compute whether both models' most likely tokens agree. heads: of each teacher.
    """

    every_token = False

    def __init__(
        self,
        terms: Terms,
        heads: Sequence[TeacherHead | Listed] = (),
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
            chosen = None
            if count and len(self.heads) > 1:
                chosen = (arrays[TEACHER] == index).nonzero()[:, 0]
            rows = slice(None) if chosen is None else chosen
            any_read = count if chosen is None else len(chosen)
            teacher: TeacherLogits | TopTokens
            if isinstance(head, Listed):
                ids, logprobs = torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)
                if any_read:
                    ids, logprobs = arrays[TOP_IDS][rows], arrays[TOP_LOGPROBS][rows]
                teacher = TopTokens(ids, logprobs)
            else:
                width = head.weight.shape[1]
                hidden = arrays[HIDDEN][rows, :width] if any_read else head.weight.new_zeros(0, width)
                teacher = TeacherLogits(hidden.to(head.weight.dtype), head)
            out.append(Comparison(self.terms, teacher, self.temperature, chosen))
        return out

    def __call__(self, batch: Batch) -> LossOutput:
        return _mixed(batch, batch.readouts["divergence"], self.alpha, self.scale)


def _mixed(batch: Batch, divergence_N: Tensor, alpha: float, scale: float = 1.0) -> LossOutput:
    """alpha x cross entropy + (1 - alpha) x scale x divergence. Metrics: both terms, and the agreement if it was
    read."""
    weights_N, readouts = batch.weights_N, batch.readouts
    ce_sum, divergence_sum = -(weights_N * readouts["logprob"]).sum(), (weights_N * divergence_N).sum()
    loss_sum = alpha * ce_sum + (1 - alpha) * scale * divergence_sum
    metrics = {"loss": loss_sum, "divergence": divergence_sum, "ce": ce_sum}
    if "agreement" in readouts:
        metrics["agreement"] = (weights_N * readouts["agreement"]).sum()
    total = weights_N.sum()
    return LossOutput(loss_sum, {name: (value.detach(), total) for name, value in metrics.items()})


def loss_of(config: DistillSection, *, measured: bool = False) -> DistillationLoss:
    """The loss without teachers' heads. measured: as in DistillationLoss. Raises UserError if the import path of
    distill.loss leads to no function."""
    if config.loss in DIVERGENCES:
        terms = divergence.terms_of(config.loss, config.beta)
    else:
        function = import_named(config.loss, "distill.loss")
        if not callable(function):
            raise UserError(
                f"distill.loss: {config.loss} is not a function of two arguments: the student's and the teacher's "
                "log-probabilities, [tokens, vocabulary] each."
            )
        terms = divergence.differentiated(function, f"distill.loss: {config.loss}")
    scale = config.temperature**2 if config.temperature_squared else 1.0
    return DistillationLoss(terms, temperature=config.temperature, alpha=config.alpha, scale=scale, measured=measured)
