"""CISPO: clipped ratios weight the logprobs, so every token keeps its gradient."""

from __future__ import annotations

from typing import Any

from weft.rl.algorithms.base import AlgorithmSpec, TokenLossSpec


def loss(tokens: Any, keys: Any) -> Any:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the clipped ratio is a weight without gradient, so that clipping stops
    no token's gradient (MiniMax 2025, arXiv:2506.13585, equations 4 and 5)."""
    low, high = keys.clip
    return -tokens.ratio.detach().clamp(1 - low, 1 + high) * tokens.advantage * tokens.logprob


def plain(logprob: Any, row: Any, keys: Any) -> Any:
    """The same for one row."""
    low, high = keys.clip
    return -(logprob - row.old_logprobs).exp().detach().clip(1 - low, 1 + high) * row.advantage * logprob


DECLARES = (
    TokenLossSpec(
        "cispo",
        loss,
        plain,
        "-clip(ratio, 1 - low, 1 + high) A log p, without a gradient through the ratio",
        reads=("clip",),
        clipping="all",
    ),
    # MiniMax 2025, equations 4 and 5: no lower bound. Upper bound: Khatri et al. 2025, arXiv:2510.13786.
    AlgorithmSpec(
        "cispo",
        "2506.13585",
        {
            "advantage": "grpo",
            "advantage_norm": "group",
            "policy_loss": "cispo",
            "loss_aggregation": "token_mean",
            "clip": [1.0, 4.0],
        },
    ),
)
