"""Losses of single pairs against a reference: the DPO family. Sources: weft/config/preference_losses.py. [P] each."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from weft.engine.losses.preference.answers import Pairs


def sigmoid(pairs: Pairs) -> Tensor:
    return pairs.smoothed(pairs.logit)


def hinge(pairs: Pairs) -> Tensor:
    return relu(1 - pairs.logit)


def ipo(pairs: Pairs) -> Tensor:
    """Of means over tokens, as the authors confirmed to TRL; sums would make the target depend on lengths."""
    chosen, rejected = pairs.chosen_score / pairs.chosen_tokens, pairs.rejected_score / pairs.rejected_tokens
    return (chosen - rejected - 1 / (2 * pairs.config.beta)).square()


def robust(pairs: Pairs) -> Tensor:
    wrong = pairs.config.label_smoothing
    return (wrong * logsigmoid(-pairs.logit) - (1 - wrong) * logsigmoid(pairs.logit)) / (1 - 2 * wrong)


def exo_pair(pairs: Pairs) -> Tensor:
    """KL of the policy's preference from the label's, (1 - label_smoothing, label_smoothing)."""
    wrong, logit = pairs.config.label_smoothing, pairs.logit
    chosen = logit.sigmoid() * (logsigmoid(logit) - math.log1p(-wrong))
    return chosen + (-logit).sigmoid() * (logsigmoid(-logit) - math.log(wrong))


def nca_pair(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.config.beta * pairs.chosen_ratio, pairs.config.beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(pairs: Pairs) -> Tensor:
    beta = pairs.config.beta
    return -logsigmoid(beta * pairs.chosen_ratio) - logsigmoid(-beta * pairs.rejected_ratio)


def sppo_hard(pairs: Pairs) -> Tensor:
    half = 0.5 / pairs.config.beta
    return (pairs.chosen_ratio - half).square() + (pairs.rejected_ratio + half).square()


def apo_zero(pairs: Pairs) -> Tensor:
    """Raises chosen answers and lowers rejected ones."""
    beta = pairs.config.beta
    return (-beta * pairs.chosen_ratio).sigmoid() + (beta * pairs.rejected_ratio).sigmoid()


def apo_down(pairs: Pairs) -> Tensor:
    """Lowers both, rejected answers more."""
    beta, chosen, rejected = pairs.config.beta, pairs.chosen_ratio, pairs.rejected_ratio
    return (beta * chosen).sigmoid() + (-beta * (chosen - rejected)).sigmoid()


def discopop(pairs: Pairs) -> Tensor:
    """A blend of logistic and exponential loss."""
    logit = pairs.logit
    share = (logit / pairs.config.discopop_tau).sigmoid()
    return -logsigmoid(logit) * (1 - share) + torch.exp(-logit) * share


def sigmoid_norm(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.chosen_score / pairs.chosen_tokens, pairs.rejected_score / pairs.rejected_tokens
    return -logsigmoid(pairs.config.beta * (chosen - rejected))


def sft(pairs: Pairs) -> Tensor:
    return pairs.chosen_nll
