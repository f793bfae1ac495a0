"""The formulas of preference losses. Sources: weft/config/preference_losses.py. Losses of pairs return [P]; losses of
single answers return [E]."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from weft.engine.losses.preference.answers import Pairs, Singles

# ---------------------------------------------------------------- single pairs against a reference: the DPO family


def sigmoid(pairs: Pairs) -> Tensor:
    return pairs.smoothed(pairs.logit)


def hinge(pairs: Pairs) -> Tensor:
    return relu(1 - pairs.logit)


def ipo(pairs: Pairs) -> Tensor:
    """Uses means over tokens, as the authors confirmed to TRL: with sums the target would depend on lengths."""
    chosen, rejected = pairs.chosen_score / pairs.chosen_tokens, pairs.rejected_score / pairs.rejected_tokens
    return (chosen - rejected - 1 / (2 * pairs.config.beta)).square()


def robust(pairs: Pairs) -> Tensor:
    wrong = pairs.config.label_smoothing
    return (wrong * logsigmoid(-pairs.logit) - (1 - wrong) * logsigmoid(pairs.logit)) / (1 - 2 * wrong)


def exo_pair(pairs: Pairs) -> Tensor:
    """KL of the policy's preference from the label's distribution (1 - label_smoothing, label_smoothing)."""
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


# ---------------------------------------------------------------- single pairs, without a reference

_LOG_HALF = -0.6931471805599453


def simpo(pairs: Pairs) -> Tensor:
    """Rewards are beta x mean log probability; the chosen answer's should be larger by gamma."""
    config = pairs.config
    difference = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return pairs.smoothed(config.beta * difference - config.gamma - pairs.margin)


def cpo(pairs: Pairs) -> Tensor:
    """DPO's loss with a uniform reference, and cross entropy of the chosen answers."""
    logit = pairs.config.beta * (pairs.chosen - pairs.rejected) - pairs.margin
    return pairs.smoothed(logit) + pairs.config.cpo_alpha * pairs.chosen_nll


def orpo(pairs: Pairs) -> Tensor:
    """Cross entropy of the chosen answers, and beta x -log sigmoid of the log odds ratio of mean probabilities."""
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return pairs.chosen_nll - pairs.config.beta * logsigmoid(log_odds)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0 (Maechler 2012)."""
    x = x.clamp(max=-1e-12)  # an answer with probability 1 would have infinite odds
    small = torch.log1p(-x.clamp(max=_LOG_HALF).exp())
    return torch.where(x > _LOG_HALF, torch.log(-torch.expm1(x.clamp(min=_LOG_HALF))), small)


# ---------------------------------------------------------------- answers one by one, each with a label


def kto(singles: Singles) -> Tensor:
    """weight x (1 - value), with value = sigmoid(beta (ratio - z)) for a desired answer, and sigmoid(beta (z - ratio))
    for others."""
    sign = 2 * singles.desired - 1
    return singles.weight * (-singles.config.beta * sign * (singles.ratio - singles.kl)).sigmoid()


def apo_zero_unpaired(singles: Singles) -> Tensor:
    sign = 2 * singles.desired - 1
    return singles.weight * (-singles.config.beta * sign * singles.ratio).sigmoid()


# ---------------------------------------------------------------- the distributions of a whole step


def aot(pairs: Pairs) -> Tensor:
    """Compares the k-th smallest log ratio of chosen and rejected under the policy with the reference's k-th
    smallest."""
    policy = (pairs.chosen - pairs.rejected).sort().values
    reference = (pairs.ref_chosen - pairs.ref_rejected).sort().values
    return pairs.smoothed(pairs.config.beta * (policy - reference))


def aot_unpaired(pairs: Pairs) -> Tensor:
    """Compares the k-th smallest log ratio of chosen answers with the k-th smallest of rejected answers."""
    difference = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return pairs.smoothed(pairs.config.beta * difference)
