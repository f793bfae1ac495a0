"""MaxRL: GRPO with the mean of the group's rewards in place of their standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec


def estimate(groups: Sequence[Any], keys: Any) -> Sequence[Sequence[Any]]:
    """(r - mean) / mean over the group; 0 where the mean is not above 0 (Tajwar et al. 2026, arXiv:2602.02710).

    With rewards of 0 and 1, a prompt that is solved with probability p weighs 1 / p: the gradient is that of the
    likelihood of a correct answer, to the order of the group's size.
    """
    from weft.rl.algorithms import returns

    scores = [returns.scores(group, keys) for group in groups]
    return [list(returns.centred(r) / r.mean() if r.mean() > 0 else 0.0 * r) for r in scores]


def plain(rows: Sequence[Any], rewards: Sequence[Any], keys: Any) -> Sequence[Any]:
    """The same, row by row."""
    from weft.rl.algorithms.plain import per_token, scores_of_groups

    values = []
    for score, group in scores_of_groups(rows, rewards):
        has_signal = float(group.mean()) > 0 and not bool((group == group[0]).all())
        values.append(score / group.mean() - 1 if has_signal else 0.0)
    return per_token(rows, values)


DECLARES = (
    AdvantageSpec(
        "max_rl",
        estimate,
        plain,
        "(r - mean of the group) / mean of the group; 0 where that mean is not above 0",
        compares_group=True,
    ),
    AlgorithmSpec(
        "max_rl", "2602.02710", {"advantage": "max_rl", "policy_loss": "ppo", "loss_aggregation": "token_mean"}
    ),
)
