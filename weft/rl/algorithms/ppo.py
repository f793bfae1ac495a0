"""PPO: the ratio of current and old policy, clipped, with advantages from a critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec, TokenLossSpec


def estimate(groups: Sequence[Any], keys: Any) -> Sequence[Sequence[Any]]:
    """Sum over k of (gamma lambda)^k delta_(t+k), with delta_t = r_t + gamma V_(t+1) - V_t (Schulman et al. 2015,
    arXiv:1506.02438, equation 16).

    V_t is the critic's value before token t is sampled, and 0 after the last token. Tokens of an environment are
    skipped: t + 1 is the next sampled token. Also sets sample.returns to advantage + V. With rl.advantage_norm=batch,
    advantages are whitened over the step afterwards.
    """
    import numpy as np

    from weft.rl.algorithms import returns

    estimates: list[list[Any]] = []
    for group in groups:
        estimates.append([])
        for sample in group.samples:
            assert sample.values is not None, f"sample {sample.id} has no values"
            values = sample.values[sample.sampled].astype(np.float64)
            following = np.append(values[1:], 0.0)[: len(values)]
            deltas = returns.token_rewards(sample, keys) + keys.gamma * following - values
            advantage = returns.discounted_sums(deltas, keys.gamma * keys.gae_lambda)
            sample.returns = np.zeros(len(sample), np.float32)
            sample.returns[sample.sampled] = advantage + values
            estimates[-1].append(advantage)
    return returns.whitened(estimates) if keys.advantage_norm == "batch" else estimates


def plain(rows: Sequence[Any], rewards: Sequence[Any], keys: Any) -> Sequence[Any]:
    """The same, row by row; also sets their returns."""
    from weft.rl.algorithms.plain import discounted_sums, whitened

    advantages = []
    for row, reward in zip(rows, rewards, strict=True):
        values = row.values.double()
        following = values.roll(-1)
        following[-1:] = 0.0
        deltas = reward + keys.gamma * following - values
        advantages.append(discounted_sums(deltas, keys.gamma * keys.gae_lambda))
        row.returns = advantages[-1] + values
    return whitened(advantages) if keys.advantage_norm == "batch" else advantages


def loss(tokens: Any, keys: Any) -> Any:
    """PPO's loss with each token's own ratio."""
    return clipped_loss(tokens.ratio, tokens.advantage, keys)


def clipped_loss(ratio: Any, advantage: Any, keys: Any) -> Any:
    """[N] -min(r A, clip(r, 1 - low, 1 + high) A), with r the ratio and A the advantage (Schulman et al. 2017,
    arXiv:1707.06347, equation 7; separate low and high: DAPO, arXiv:2503.14476, equation 8). Where A < 0, it is at most
    -rl.dual_clip x A (Ye et al. 2019, arXiv:1912.09729, equation 5)."""
    import torch

    low, high = keys.clip
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if keys.dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, keys.dual_clip * advantage), gain)
    return -gain


def plain_loss(logprob: Any, row: Any, keys: Any) -> Any:
    """The same for one row."""
    from weft.rl.algorithms.plain import clipped_loss

    return clipped_loss((logprob - row.old_logprobs).exp(), row, keys)


DECLARES = (
    AdvantageSpec(
        "gae",
        estimate,
        plain,
        "sum over k >= t of (gamma lambda)^(k-t) (r_k + gamma V_(k+1) - V_k), with the critic's V; whitened with "
        "`rl.advantage_norm: batch`",
        reads=("advantage_norm", "gamma", "gae_lambda"),
        needs_critic=True,
        per_token=True,
    ),
    TokenLossSpec(
        "ppo",
        loss,
        plain_loss,
        "-min(ratio A, clip(ratio, 1 - low, 1 + high) A); with `rl.dual_clip` c and A < 0 at most c \\|A\\|",
    ),
    # Schulman et al. 2017, with the KL of Ouyang et al. 2022, arXiv:2203.02155, in the reward
    AlgorithmSpec(
        "ppo",
        "1707.06347",
        {
            "advantage": "gae",
            "advantage_norm": "batch",
            "policy_loss": "ppo",
            "loss_aggregation": "token_mean",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
)
