"""Losses of single pairs that read no reference. Sources: weft/config/preference_losses.py. [P] each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from weft.engine.losses.preference.answers import Pairs

_LOG_HALF = -0.6931471805599453


def simpo(pairs: Pairs) -> Tensor:
    """Rewards are beta x mean log probability; the chosen one has to be larger by gamma."""
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
    x = x.clamp(max=-1e-12)  # a certain answer would have infinite odds
    small = torch.log1p(-x.clamp(max=_LOG_HALF).exp())
    return torch.where(x > _LOG_HALF, torch.log(-torch.expm1(x.clamp(min=_LOG_HALF))), small)
