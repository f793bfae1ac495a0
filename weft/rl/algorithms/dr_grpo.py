"""Dr. GRPO: GRPO without the standard deviation and without the length of a sample as divisors."""

from __future__ import annotations

from weft.rl.algorithms.base import AlgorithmSpec

DECLARES = (
    # Liu et al. 2025
    AlgorithmSpec(
        "dr_grpo",
        "2503.20783",
        {"advantage": "grpo", "advantage_norm": "none", "policy_loss": "ppo", "loss_aggregation": "sequence_sum"},
    ),
)
