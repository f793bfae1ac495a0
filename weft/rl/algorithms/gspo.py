"""GSPO: GRPO with one ratio for a whole sample."""

from __future__ import annotations

from typing import Any

from weft.rl.algorithms.base import AlgorithmSpec, TokenLossSpec
from weft.rl.algorithms.ppo import clipped_loss


def loss(tokens: Any, keys: Any) -> Any:
    """PPO's loss with the ratio of the whole sample (Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7).

    Where all of a sample's advantages are equal, as in the paper, the gradient is GSPO's: s A / G sum of grad log p.
    """
    return clipped_loss(tokens.sequence_ratio, tokens.advantage, keys)


def plain(logprob: Any, row: Any, keys: Any) -> Any:
    """The same for one row. The gradient goes through each token's own logprob only."""
    from weft.rl.algorithms.plain import clipped_loss

    mean = (logprob - row.old_logprobs).mean().detach()
    return clipped_loss(mean.exp() * (logprob - logprob.detach()).exp(), row, keys)


DECLARES = (
    TokenLossSpec(
        "gspo",
        loss,
        plain,
        "`ppo` with s, the geometric mean of the sample's ratios, instead of the ratio",
        ratio="sequence_ratio",
    ),
    # Zheng et al. 2025, equation 5 and section 5.1
    AlgorithmSpec(
        "gspo",
        "2507.18071",
        {
            "advantage": "grpo",
            "advantage_norm": "group",
            "policy_loss": "gspo",
            "loss_aggregation": "sequence_mean",
            "clip": [3e-4, 4e-4],
        },
    ),
)
