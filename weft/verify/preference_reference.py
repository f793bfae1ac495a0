"""Losses of preferences in plain PyTorch, over a complete step. Imports nothing of weft's losses and data.

An answer is a document whose last tokens are trained. A pair is (chosen, rejected). In KTO each answer is compared
alone, and has a mismatched answer: the same prompt with the previous answer in the data. Formulas and their sources are
in docs/reference/preference-losses.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from weft.importing import import_named
from weft.verify.reference import Reference


@dataclass
class ComparedAnswer:
    """ids: of prompt and answer. prompt: tokens of the prompt, at least 1. margin: of its pair. desired: for losses of
    single answers. shorter: tokens of the shorter answer of its pair; further tokens count `tail` times. mismatched:
    for KTO. reference: its logprob sum under the reference, 0 without one."""

    ids: list[int]
    prompt: int
    margin: float = 0.0
    desired: bool = True
    shorter: int = 10**9
    tail: float = 1.0
    mismatched: ComparedAnswer | None = None
    reference: float = 0.0

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return len(self.ids) - self.prompt


@dataclass(frozen=True)
class PlainPairs:
    """The pairs of a step, with the attributes that a user's loss may read; [P] each. config: the section
    `preference`."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    margin: Tensor
    config: Any

    @property
    def chosen_ratio(self) -> Tensor:
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.ref_rejected

    @property
    def chosen_score(self) -> Tensor:
        return _slope(self.chosen_ratio.exp(), self.config)

    @property
    def rejected_score(self) -> Tensor:
        return _slope(self.rejected_ratio.exp(), self.config)

    @property
    def logit(self) -> Tensor:
        return self.config.beta * (self.chosen_score - self.rejected_score) - self.margin

    @property
    def mean_tokens(self) -> float:
        return float(self.chosen_tokens.mean())

    @property
    def chosen_nll(self) -> Tensor:
        """Its mean over the pairs is the cross entropy over all tokens of chosen answers."""
        return -self.chosen * len(self.chosen) / self.chosen_tokens.sum()

    def smoothed(self, logit: Tensor) -> Tensor:
        wrong = self.config.label_smoothing
        return (1 - wrong) * -logsigmoid(logit) + wrong * -logsigmoid(-logit)


def _slope(u: Tensor, config: Any) -> Tensor:
    """f'(u) of the f-divergence sum q f(p / q), u = policy / reference, with f'(1) = 0."""
    if config.f_divergence == "forward_kl":  # f = u - 1 - log u
        return 1 - 1 / u
    if config.f_divergence == "js_divergence":  # f = u log u - (u + 1) log((u + 1) / 2)
        return (2 * u / (1 + u)).log()
    if config.f_divergence == "alpha_divergence" and abs(config.f_alpha - 1) > 1e-6:
        return (u ** (config.f_alpha - 1) - 1) / (config.f_alpha - 1)
    return u.log()


def pair_losses(name: str, p: PlainPairs) -> Tensor:
    """[P] the loss of each pair. For losses that sort a step, the values are in sorted order."""
    c, wrong, sigmoid = p.config, p.config.label_smoothing, torch.sigmoid
    beta, x, dc, dr = c.beta, p.logit, p.chosen_ratio, p.rejected_ratio
    mean_c, mean_r = p.chosen / p.chosen_tokens, p.rejected / p.rejected_tokens
    score_c, score_r = p.chosen_score / p.chosen_tokens, p.rejected_score / p.rejected_tokens

    def sort(values: Tensor) -> Tensor:
        return values.sort().values

    losses: dict[str, Callable[[], Tensor]] = {
        "sigmoid": lambda: p.smoothed(x),
        "hinge": lambda: relu(1 - x),
        "ipo": lambda: (score_c - score_r - 1 / (2 * beta)) ** 2,
        "robust": lambda: (-(1 - wrong) * logsigmoid(x) + wrong * logsigmoid(-x)) / (1 - 2 * wrong),
        "exo_pair": lambda: (
            sigmoid(x) * (logsigmoid(x) - math.log(1 - wrong)) + sigmoid(-x) * (logsigmoid(-x) - math.log(wrong))
        ),
        "nca_pair": lambda: -logsigmoid(beta * dc) - 0.5 * logsigmoid(-beta * dc) - 0.5 * logsigmoid(-beta * dr),
        "bco_pair": lambda: -logsigmoid(beta * dc) - logsigmoid(-beta * dr),
        "sppo_hard": lambda: (dc - 0.5 / beta) ** 2 + (dr + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - sigmoid(beta * dc) + sigmoid(beta * dr),
        "apo_down": lambda: sigmoid(beta * dc) + 1 - sigmoid(beta * (dc - dr)),
        "discopop": lambda: (
            -logsigmoid(x) * (1 - sigmoid(x / c.discopop_tau)) + (-x).exp() * sigmoid(x / c.discopop_tau)
        ),
        "sigmoid_norm": lambda: -logsigmoid(beta * (score_c - score_r)),
        "sft": lambda: p.chosen_nll,
        "aot": lambda: p.smoothed(beta * (sort(p.chosen - p.rejected) - sort(p.ref_chosen - p.ref_rejected))),
        "aot_unpaired": lambda: p.smoothed(beta * (sort(dc) - sort(dr))),
        "simpo": lambda: p.smoothed(beta * (mean_c - mean_r) - c.gamma - p.margin),
        "cpo": lambda: p.smoothed(beta * (p.chosen - p.rejected) - p.margin) + c.cpo_alpha * p.chosen_nll,
        "orpo": lambda: (
            p.chosen_nll
            - beta * logsigmoid(mean_c - mean_r - (1 - mean_c.exp()).log() + (1 - mean_r.exp()).log())
        ),
    }  # fmt: skip
    result: Tensor = losses[name]() if name in losses else import_named(name, "preference.loss")(p)
    return result


def single_losses(name: str, ratio: Tensor, desired: Tensor, kl: float, config: Any) -> Tensor:
    """[E] the loss of each answer. ratio: log policy - log reference. desired: bool. kl: KTO's z."""
    z = kl if name == "kto" else 0.0
    good = config.desirable_weight * (1 - torch.sigmoid(config.beta * (ratio - z)))
    bad = config.undesirable_weight * (1 - torch.sigmoid(config.beta * (z - ratio)))
    return torch.where(desired, good, bad)


def logprob_sum(plain: Reference, answer: ComparedAnswer) -> Tensor:
    """The sum of the logprobs of the answer's tokens, in fp64; tokens beyond the shorter answer count `tail` times."""
    logprob = plain.logits(answer.ids)[:-1].log_softmax(-1)
    targets = torch.tensor(answer.ids[1:], device=logprob.device)
    trained = logprob.gather(1, targets[:, None])[answer.prompt - 1 :, 0]
    factors = torch.ones(len(trained), device=trained.device)
    factors[answer.shorter :] = answer.tail
    return (trained * factors).double().sum()


@torch.no_grad()
def read_reference(plain: Reference, answers: Sequence[ComparedAnswer]) -> None:
    """Set the reference's sums of the answers and of their mismatched answers."""
    mismatched = [answer.mismatched for answer in answers if answer.mismatched is not None]
    for answer in (*answers, *mismatched):
        answer.reference = float(logprob_sum(plain, answer))


@torch.no_grad()
def kl_of(plain: Reference, answers: Sequence[ComparedAnswer]) -> float:
    """KTO's z over these answers: the mean log ratio of the mismatched answers, at least 0."""
    mismatched = [answer.mismatched for answer in answers if answer.mismatched is not None]
    ratios = [float(logprob_sum(plain, answer)) - answer.reference for answer in mismatched]
    return max(0.0, sum(ratios) / len(ratios)) if ratios else 0.0


def plain_losses(plain: Reference, step: Sequence[Sequence[ComparedAnswer]], config: Any) -> Iterator[Tensor]:
    """[examples] the terms of a step's loss. step: pairs, or single answers. config: the section `preference`."""
    weights = config.weights or [1.0] * len(config.losses)
    device = next(plain.model.parameters()).device

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    policy = [torch.stack([logprob_sum(plain, answer) for answer in answers]) for answers in zip(*step, strict=True)]
    references = [column([answer.reference for answer in answers]) for answers in zip(*step, strict=True)]
    if len(policy) == 1:
        answers = [answer for (answer,) in step]
        kl = kl_of(plain, answers) if "kto" in config.losses else 0.0
        desired = torch.tensor([answer.desired for answer in answers], device=device)
        losses = [single_losses(name, policy[0] - references[0], desired, kl, config) for name in config.losses]
    else:
        tokens = [column([answer.tokens for answer in answers]) for answers in zip(*step, strict=True)]
        columns = [*policy, *references, *tokens, column([chosen.margin for chosen, _ in step])]
        chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens, margin = columns
        pairs = PlainPairs(chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens, margin, config)
        losses = [pair_losses(name, pairs) for name in config.losses]
    yield sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / len(step)
