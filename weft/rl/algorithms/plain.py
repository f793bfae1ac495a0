"""Functions of the plain implementations (base.AdvantageSpec.plain, TokenLossSpec.plain): torch on single rows, in
fp64.

Shares no code with returns.py, nor with the advantages and losses under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def scores_of_groups(rows: Sequence[Any], rewards: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """For each row: the sum of its rewards, and the sums of all rows of its group."""
    scores = [reward.sum() for reward in rewards]
    members = {
        row.group: [s for _member, s in zip(rows, scores, strict=True) if _member.group == row.group] for row in rows
    }
    return [(score, torch.stack(members[row.group])) for row, score in zip(rows, scores, strict=True)]


def per_token(rows: Sequence[Any], values: Sequence[Tensor | float]) -> list[Tensor]:
    """Each row's value, repeated for each of its sampled tokens."""
    return [
        torch.full((len(row.drawn),), float(value), dtype=torch.float64)
        for row, value in zip(rows, values, strict=True)
    ]


def discounted_sums(values: Tensor, factor: float) -> Tensor:
    """[G] out_t = values_t + factor x out_(t+1)."""
    out = values.clone()
    for t in range(len(out) - 2, -1, -1):
        out[t] += factor * out[t + 1]
    return out


def whitened(estimates: Sequence[Tensor]) -> list[Tensor]:
    """(value - mean) / standard deviation, over the tokens of all rows."""
    tokens = torch.cat(list(estimates))
    if len(tokens) < 2 or bool((tokens == tokens[0]).all()):
        return [torch.zeros_like(values) for values in estimates]
    return [(values - tokens.mean()) / (tokens.var() + 1e-8).sqrt() for values in estimates]


def clipped_loss(ratio: Tensor, row: Any, keys: Any) -> Tensor:
    """PPO's loss for these ratios, with rl.clip and rl.dual_clip."""
    a, (low, high) = row.advantage, keys.clip
    gain = torch.min(ratio * a, ratio.clip(1 - low, 1 + high) * a)
    if keys.dual_clip is not None:
        gain = torch.where(a < 0, torch.max(gain, keys.dual_clip * a), gain)
    return -gain
