"""Losses that compare the distributions of a whole step, whatever ranks and micro-batches have of it. Sources:
weft/config/preference_losses.py. [P] each; the pairs are all of the step."""

from __future__ import annotations

from torch import Tensor

from weft.engine.losses.preference.answers import Pairs


def aot(pairs: Pairs) -> Tensor:
    """The k-th smallest log ratio of chosen and rejected under the policy, against the reference's k-th smallest."""
    policy = (pairs.chosen - pairs.rejected).sort().values
    reference = (pairs.ref_chosen - pairs.ref_rejected).sort().values
    return pairs.smoothed(pairs.config.beta * (policy - reference))


def aot_unpaired(pairs: Pairs) -> Tensor:
    """The k-th smallest log ratio of chosen answers, against the k-th smallest of rejected ones."""
    difference = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return pairs.smoothed(pairs.config.beta * difference)
