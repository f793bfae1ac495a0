"""GRPO: rewards relative to those of the same prompt's other samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec


def estimate(groups: Sequence[Any], keys: Any) -> Sequence[Sequence[Any]]:
    """(r - mean) / (std + 1e-4) over the group (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); std with n - 1.

    rl.advantage_norm: `batch` divides by the standard deviation of all rewards of the step (Lite PPO,
    arXiv:2508.08221); `none` does not divide (Dr. GRPO, arXiv:2503.20783, section 3.1).
    """
    import numpy as np

    from weft.rl.algorithms import returns

    scores = [returns.scores(group, keys) for group in groups]
    divisors = [1.0] * len(scores)
    if keys.advantage_norm == "group":
        divisors = [returns.deviation(r) + returns.BESIDE_DEVIATION for r in scores]
    elif keys.advantage_norm == "batch":
        divisors = [returns.deviation(np.concatenate(scores)) + returns.BESIDE_DEVIATION] * len(scores)
    return [list(returns.centred(r) / divisor) for r, divisor in zip(scores, divisors, strict=True)]


def plain(rows: Sequence[Any], rewards: Sequence[Any], keys: Any) -> Sequence[Any]:
    """The same, row by row."""
    import torch

    from weft.rl.algorithms.plain import per_token, scores_of_groups

    pairs = scores_of_groups(rows, rewards)
    all_scores = torch.stack([score for score, _ in pairs])
    values = []
    for score, group in pairs:
        value = 0.0 if bool((group == group[0]).all()) else float(score - group.mean())
        divisor = {"group": group, "batch": all_scores}.get(keys.advantage_norm)
        values.append(value / (float(divisor.std()) + 1e-4) if divisor is not None and value else value)
    return per_token(rows, values)


DECLARES = (
    AdvantageSpec(
        "grpo",
        estimate,
        plain,
        "(r - mean of the group) / (std + 1e-4). std is the group's (`rl.advantage_norm: group`) or that of all "
        "rewards of the step (`batch`); `none` does not divide",
        reads=("advantage_norm",),
        compares_group=True,
    ),
    # Shao et al. 2024, equation 3
    AlgorithmSpec(
        "grpo",
        "2402.03300",
        {"advantage": "grpo", "advantage_norm": "group", "policy_loss": "ppo", "loss_aggregation": "sequence_mean"},
    ),
)
