"""REINFORCE++: rewards to go, whitened over the step; and its variant with the group's mean as baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec, TokenLossSpec


def estimate(groups: Sequence[Any], keys: Any) -> Sequence[Sequence[Any]]:
    """Reward-to-go of each token, whitened over all tokens of the step (Hu et al. 2025, arXiv:2501.03262)."""
    from weft.rl.algorithms import returns

    to_go = [
        [returns.discounted_sums(returns.token_rewards(sample, keys), keys.gamma) for sample in group.samples]
        for group in groups
    ]
    return returns.whitened(to_go)


def plain(rows: Sequence[Any], rewards: Sequence[Any], keys: Any) -> Sequence[Any]:
    """The same, row by row."""
    from weft.rl.algorithms.plain import discounted_sums, whitened

    return whitened([discounted_sums(reward, keys.gamma) for reward in rewards])


def estimate_baseline(groups: Sequence[Any], keys: Any) -> Sequence[Sequence[Any]]:
    """r - mean of the group, whitened over all tokens of the step (Hu et al. 2025, arXiv:2501.03262, section 3.3)."""
    import numpy as np

    from weft.rl.algorithms import returns

    centred = [returns.centred(returns.scores(group, keys)) for group in groups]
    return returns.whitened(
        [
            [np.full(sample.length, value) for sample, value in zip(group.samples, values, strict=True)]
            for group, values in zip(groups, centred, strict=True)
        ]
    )


def plain_baseline(rows: Sequence[Any], rewards: Sequence[Any], keys: Any) -> Sequence[Any]:
    """The same, row by row."""
    from weft.rl.algorithms.plain import per_token, scores_of_groups, whitened

    pairs = scores_of_groups(rows, rewards)
    return whitened(per_token(rows, [0.0 if bool((g == g[0]).all()) else score - g.mean() for score, g in pairs]))


def reinforce(tokens: Any, keys: Any) -> Any:
    """-A log p (Williams 1992): the policy gradient, as long as the current policy is the old one."""
    return -tokens.advantage * tokens.logprob


def plain_reinforce(logprob: Any, row: Any, keys: Any) -> Any:
    """The same for one row."""
    return -row.advantage * logprob


DECLARES = (
    AdvantageSpec(
        "reinforce++",
        estimate,
        plain,
        "G_t = sum over k >= t of gamma^(k-t) r_k, whitened: minus its mean over all tokens of the step, divided by "
        "their std",
        reads=("gamma",),
        per_token=True,
    ),
    AdvantageSpec(
        "reinforce++_baseline",
        estimate_baseline,
        plain_baseline,
        "r - mean of the group, whitened in the same way",
        compares_group=True,
        per_token=True,
    ),
    TokenLossSpec(
        "reinforce",
        reinforce,
        plain_reinforce,
        "-A log p: correct while current equals old (`rl.minibatches` and `rl.epochs` 1)",
        reads=(),
        clipping="none",
    ),
    # Hu et al. 2025
    AlgorithmSpec(
        "reinforce++",
        "2501.03262",
        {
            "advantage": "reinforce++",
            "policy_loss": "ppo",
            "loss_aggregation": "token_mean",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
    AlgorithmSpec(
        "reinforce++_baseline",
        "2501.03262",
        {
            "advantage": "reinforce++_baseline",
            "policy_loss": "ppo",
            "loss_aggregation": "token_mean",
            "kl_in": "loss",
            "kl_estimator": "k2",
        },
    ),
)
