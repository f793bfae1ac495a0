"""DAPO: GRPO with a higher upper bound of the ratio, every token weighing the same, and groups without signal
replaced."""

from __future__ import annotations

from weft.rl.algorithms.base import AlgorithmSpec

DECLARES = (
    # Yu et al. 2025, equation 8. Its penalty for long samples needs a length: rl.overlong_buffer.
    AlgorithmSpec(
        "dapo",
        "2503.14476",
        {
            "advantage": "grpo",
            "advantage_norm": "group",
            "policy_loss": "ppo",
            "loss_aggregation": "token_mean",
            "clip": [0.2, 0.28],
            "dynamic_sampling": 10,
        },
    ),
)
