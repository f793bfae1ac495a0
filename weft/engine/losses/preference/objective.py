"""The loss of `weft dpo`: a weighted sum of preference losses, exact on every mesh.

D documents of the step, by their indices in it; P pairs or E answers one by one (answers.py). If both answers of a pair
are in one row of one rank, the pair is differentiated there. For other pairs, and for losses of the whole step, the
logprob sums are read first, without gradients (engine/document_sums.py); the step then trains the linear form of
answers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.config.dpo_schema import PreferenceConfig
from weft.config.preference_losses import LOSSES
from weft.engine.losses.base import Batch, LossOutput
from weft.engine.losses.preference import formulas
from weft.engine.losses.preference.answers import Pairs, Singles
from weft.errors import UserError
from weft.importing import import_named

if TYPE_CHECKING:
    from weft.engine.step_plan.plan import StepPlan

LossFunction = Callable[[Any], Tensor]


@dataclass(frozen=True)
class StepAnswers:
    """The values of a step that are known before its gradient; fp64 on the host. chosen, rejected: [P] documents; for
    single answers `chosen` has all of them, and `rejected` is empty. reference, tokens: [D] logprob sums of the
    reference, number of trained tokens. margin: [P]. desired: [E], for single answers. kl: as in Singles. policy: [D]
    logprob sums, NaN if they were not read first."""

    chosen: Tensor
    rejected: Tensor
    reference: Tensor
    tokens: Tensor
    margin: Tensor
    desired: Tensor
    kl: float
    policy: Tensor

    @cached_property
    def mean_tokens(self) -> float:
        """Trained tokens of the chosen answers."""
        return float(self.tokens[self.chosen].mean())

    def compared(self, policy: Tensor, examples: Tensor, config: PreferenceConfig) -> Pairs | Singles:
        """The pairs or answers with these indices. policy: their logprob sums, [2, P] or [1, E]."""
        numbers = policy.detach()

        def like(values: Tensor) -> Tensor:
            return values.to(numbers, non_blocking=True)

        chosen = self.chosen[examples]
        if not len(self.rejected):
            return Singles(
                policy[0], like(self.reference[chosen]), like(self.tokens[chosen]), like(self.desired[examples]),
                self.kl, config,
            )  # fmt: skip
        rejected = self.rejected[examples]
        return Pairs(
            policy[0], policy[1], like(self.reference[chosen]), like(self.reference[rejected]),
            like(self.tokens[chosen]), like(self.tokens[rejected]), like(self.margin[examples]), self.mean_tokens,
            config,
        )  # fmt: skip


def load_losses(config: PreferenceConfig) -> list[tuple[float, LossFunction]]:
    """(weight, function) of each loss. Raises UserError for an import path that is not a function."""
    out: list[tuple[float, LossFunction]] = []
    for name, weight in zip(config.losses, config.weights or (1.0,) * len(config.losses), strict=True):
        function: Any = getattr(formulas, name) if name in LOSSES else import_named(name, "preference.loss")
        if not callable(function):
            raise UserError(
                f"preference.loss: {name} is not a function of pairs (weft/engine/losses/preference/answers.py)."
            )
        out.append((weight, function))
    return out


class PreferenceLoss:
    """The mean over a step's examples of the sum of preference.weights x losses. `begin` is called before each step and
    each evaluation, on every rank with the same values."""

    readouts = frozenset({"logprob"})
    every_token = False

    def __init__(self, config: PreferenceConfig) -> None:
        self.config, self.losses = config, load_losses(config)
        self.whole_step = any(facts.whole_step for facts in config.facts)
        self._step: StepAnswers | None = None
        self._columns: list[list[int]] = []  # documents of the examples: [2, P] or [1, E]
        self._example: list[int] = []  # index of each document's example
        self._read: list[bool] = []  # whether each example's answers were read first
        # [D] d loss / d logprob sum, of answers that were read first
        self._factors = torch.zeros(0, dtype=torch.float64)
        self._metrics: dict[str, Tensor] = {}  # [examples], of answers that were read first

    def begin(self, step: StepAnswers) -> None:
        """Set the data of the next step, and differentiate the losses of answers that were read first."""
        self._step = step
        columns = [step.chosen, step.rejected] if len(step.rejected) else [step.chosen]
        documents = torch.stack(columns)
        self._example = [0] * len(step.tokens)
        self._columns = documents.tolist()
        for column in self._columns:
            for example, document in enumerate(column):
                self._example[document] = example
        read = step.policy[documents].isfinite().all(0)
        self._read = read.tolist()
        examples = read.nonzero()[:, 0]
        self._factors, self._metrics = torch.zeros_like(step.tokens), {}
        if self.whole_step and len(examples) < documents.shape[1]:
            raise RuntimeError("a loss of the whole step needs the logprob sums of all answers in `policy`")
        policy = step.policy[documents[:, examples]].requires_grad_()
        metrics = self._measure(policy, examples)
        if len(examples):
            (gradient,) = torch.autograd.grad(metrics["loss"].sum(), policy)
            self._factors[documents[:, examples]] = gradient
        for name, values in metrics.items():
            self._metrics[name] = torch.zeros(documents.shape[1], dtype=torch.float64)
            self._metrics[name][examples] = values.detach().double()

    def normaliser(self, plan: StepPlan) -> float:
        return float(len(self._current_step.chosen)) or 1.0

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return None  # the gradient depends on the logprobs

    @property
    def _current_step(self) -> StepAnswers:
        assert self._step is not None, "call begin() before each step"
        return self._step

    def __call__(self, batch: Batch) -> LossOutput:
        sums_D = batch.document_sum((batch.weights_N * batch.readouts["logprob"]).double())
        documents = batch.counted_documents
        index_of = {document: index for index, document in enumerate(documents)}
        chosen, is_paired = self._columns[0], len(self._columns) == 2
        first = [document for document in documents if self._read[self._example[document]]]
        loss_sum = sums_D.sum() * 0.0
        if first:
            indices, factors = [index_of[document] for document in first], self._factors[first]
            loss_sum = loss_sum + (factors.to(sums_D.device) * sums_D[indices]).sum()
        direct = [e for document in documents if not self._read[e := self._example[document]] and chosen[e] == document]
        policy = torch.stack([sums_D[[index_of[column[e]] for e in direct]] for column in self._columns])
        metrics = self._measure(policy, torch.tensor(direct, dtype=torch.int64))
        loss_sum = loss_sum + metrics["loss"].sum()
        counted = [self._example[document] for document in first if chosen[self._example[document]] == document]
        ones = torch.ones(len(direct) + len(counted), dtype=torch.float64)
        weights = dict.fromkeys(metrics, ones)
        if not is_paired:
            desired = self._current_step.desired[[*direct, *counted]]
            weights |= {name: desired if name.endswith("chosen") else 1 - desired for name in metrics if "/" in name}
        sums: dict[str, tuple[Tensor, Tensor | float]] = {}
        for name, values in metrics.items():
            values_read_first = self._metrics[name][counted].to(values)
            combined = torch.cat([values.detach(), values_read_first])
            weight = weights[name].to(combined)
            sums[name] = (combined * weight).sum(), weight.sum()
        if not is_paired:
            sums["kl"] = ones.sum() * self._current_step.kl, ones.sum()
        return LossOutput(loss_sum, sums)

    def _measure(self, policy: Tensor, examples: Tensor) -> dict[str, Tensor]:
        """Name -> [examples]; `loss` with gradient. For single answers, chosen means desired."""
        compared = self._current_step.compared(policy, examples, self.config)
        loss = torch.zeros_like(policy[0])
        for weight, function in self.losses if len(examples) else ():
            loss = loss + weight * self._checked(function, compared, policy)
        rows: list[tuple[str, Tensor, Tensor]]
        if isinstance(compared, Singles):
            rows = [(name, compared.policy, compared.reference) for name in ("chosen", "rejected")]
        else:
            rows = [
                ("chosen", compared.chosen, compared.ref_chosen),
                ("rejected", compared.rejected, compared.ref_rejected),
            ]
        metrics = {"loss": loss}
        for name, sums, reference in rows:
            metrics[f"rewards/{name}"] = (self.config.beta * (sums - reference)).detach()
            metrics[f"logps/{name}"] = sums.detach()
        if isinstance(compared, Pairs):
            margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            metrics["rewards/margin"] = margin
            metrics["rewards/accuracy"] = (margin > 0).to(margin.dtype)
        return metrics

    def _checked(self, function: LossFunction, compared: Pairs | Singles, policy: Tensor) -> Tensor:
        loss = function(compared)
        if not isinstance(loss, Tensor) or loss.shape != policy[0].shape:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"preference.loss: {getattr(function, '__name__', function)} must return a loss for each of the "
                f"{len(policy[0])} pairs, not {shape}."
            )
        return loss


def split_examples(columns: Sequence[Sequence[int]], plan: StepPlan) -> list[int]:
    """The examples whose documents are not all complete in one row of the plan. columns: [2, P] or [1, E] documents."""
    rows = plan.rows_of_uncut()
    return [
        example
        for example, documents in enumerate(zip(*columns, strict=True))
        if len({rows.get(document, (-1, document)) for document in documents}) > 1
    ]
