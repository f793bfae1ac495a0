"""The inputs of preference losses: log probabilities of answers, summed over their tokens.

P pairs, E answers one by one. Each loss is a function of them and returns a value for each pair or answer; the loss of
a step is their mean over the whole step. It depends on the logprobs only through sums over documents, so its gradient
is the gradient of

    sum over documents of (d loss / d logprob sum) x logprob sum

with the factors as constants. This linear form is exact for any assignment of documents to ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from weft.config.dpo_schema import PreferenceConfig

_LARGEST = 80.0  # of an exponent in fp32


@dataclass(frozen=True)
class Pairs:
    """Pairs of answers, [P] each, in fp32 or fp64.

    chosen, rejected: logprob sums of the policy, with gradient. ref_chosen, ref_rejected: of the reference; zeros if no
    loss reads it. chosen_tokens, rejected_tokens: trained tokens. margin: the data's. mean_tokens: mean number of
    trained tokens of the step's chosen answers.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    margin: Tensor
    mean_tokens: float
    config: PreferenceConfig

    @property
    def chosen_ratio(self) -> Tensor:
        """log policy - log reference of the chosen answers."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.ref_rejected

    @property
    def chosen_score(self) -> Tensor:
        """The chosen ratios through the derivative of preference.f_divergence."""
        return divergence_score(self.chosen_ratio, self.config)

    @property
    def rejected_score(self) -> Tensor:
        return divergence_score(self.rejected_ratio, self.config)

    @property
    def logit(self) -> Tensor:
        """beta x (chosen score - rejected score) - margin (ODPO, arXiv:2402.10571)."""
        return self.config.beta * (self.chosen_score - self.rejected_score) - self.margin

    @property
    def chosen_nll(self) -> Tensor:
        """Cross entropy of the chosen answers, scaled so that its mean over the step's pairs is the mean over their
        tokens."""
        return -self.chosen / self.mean_tokens

    def smoothed(self, logit: Tensor) -> Tensor:
        """-log sigmoid(logit), smoothed by the probability that the label is wrong (Mitchell 2023, cDPO)."""
        wrong = self.config.label_smoothing
        return -(1 - wrong) * logsigmoid(logit) - wrong * logsigmoid(-logit)


@dataclass(frozen=True)
class Singles:
    """Single labelled answers, [E] each. policy, reference: logprob sums. tokens: number of trained tokens. desired: 1
    or 0. kl: z of KTO, the mean log ratio of the step's mismatched answers, at least 0; without gradient."""

    policy: Tensor
    reference: Tensor
    tokens: Tensor
    desired: Tensor
    kl: float
    config: PreferenceConfig

    @property
    def ratio(self) -> Tensor:
        """log policy - log reference."""
        return self.policy - self.reference

    @property
    def weight(self) -> Tensor:
        """preference.desirable_weight or undesirable_weight of each answer."""
        config = self.config
        return self.desired * config.desirable_weight + (1 - self.desired) * config.undesirable_weight


def divergence_score(ratio: Tensor, config: PreferenceConfig) -> Tensor:
    """f'(policy / reference) of the log ratio (f-DPO, arXiv:2309.16240, table 1), 0 where both are equal. A constant
    cancels between the answers of a pair, but not in losses that divide by their lengths."""
    name, alpha = config.f_divergence, config.f_alpha
    if name == "forward_kl":
        return 1 - (-ratio).clamp(max=_LARGEST).exp()
    if name == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if name == "alpha_divergence" and abs(alpha - 1) > 1e-6:
        return torch.expm1(((alpha - 1) * ratio).clamp(max=_LARGEST)) / (alpha - 1)
    return ratio
