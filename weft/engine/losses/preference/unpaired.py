"""Losses of answers one by one, each with a label. Sources: weft/config/preference_losses.py. [E] each."""

from __future__ import annotations

from torch import Tensor

from weft.engine.losses.preference.answers import Singles


def kto(singles: Singles) -> Tensor:
    """weight x (1 - value), value = sigmoid(beta (ratio - z)) of a desired answer, sigmoid(beta (z - ratio)) else."""
    sign = 2 * singles.desired - 1
    return singles.weight * (-singles.config.beta * sign * (singles.ratio - singles.kl)).sigmoid()


def apo_zero_unpaired(singles: Singles) -> Tensor:
    sign = 2 * singles.desired - 1
    return singles.weight * (-singles.config.beta * sign * singles.ratio).sigmoid()
