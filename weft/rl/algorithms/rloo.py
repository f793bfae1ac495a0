"""RLOO: rewards relative to the mean of the same prompt's other samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec, TokenLossSpec
from weft.rl.algorithms.ppo import clipped_loss


def estimate(groups: Sequence[Any], keys: Any) -> Sequence[Sequence[Any]]:
    """r - mean of the group's other rewards, which equals n / (n - 1) x (r - mean of all n) (Kool et al. 2019; Ahmadian
    et al. 2024, arXiv:2402.14740, section 3.3)."""
    from weft.rl.algorithms import returns

    scores = [returns.scores(group, keys) for group in groups]
    return [list(returns.centred(r) * (len(r) / max(1, len(r) - 1))) for r in scores]


def plain(rows: Sequence[Any], rewards: Sequence[Any], keys: Any) -> Sequence[Any]:
    """The same, row by row."""
    from weft.rl.algorithms.plain import per_token, scores_of_groups

    values = []
    for score, group in scores_of_groups(rows, rewards):
        is_flat = bool((group == group[0]).all())
        values.append(0.0 if is_flat else score - (group.sum() - score) / (len(group) - 1))
    return per_token(rows, values)


def ppo_sequence(tokens: Any, keys: Any) -> Any:
    """PPO's loss with the product of a sample's ratios, the ratio of whole samples' probabilities (TRL's RLOO).

    Each token has the loss of its sample, so that with sequence_mean every sample counts once.
    """
    return clipped_loss(tokens.product_ratio, tokens.advantage, keys)


def plain_ppo_sequence(logprob: Any, row: Any, keys: Any) -> Any:
    """The same for one row."""
    from weft.rl.algorithms.plain import clipped_loss

    return clipped_loss((logprob - row.old_logprobs).sum().exp().expand(len(logprob)), row, keys)


DECLARES = (
    AdvantageSpec("rloo", estimate, plain, "r - mean of the other samples of the group", compares_group=True),
    TokenLossSpec(
        "ppo_sequence",
        ppo_sequence,
        plain_ppo_sequence,
        "`ppo` with the product of the sample's ratios, whose gradient goes through all its tokens. Every token has "
        "the loss of its sample, so with `sequence_mean` a sample counts once (TRL's RLOO)",
        ratio="product_ratio",
    ),
    # Ahmadian et al. 2024
    AlgorithmSpec(
        "rloo",
        "2402.14740",
        {
            "advantage": "rloo",
            "policy_loss": "ppo",
            "loss_aggregation": "sequence_sum",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
)
