"""SAPO: a sigmoid of the ratio in place of clipping, so that the gradient fades and does not end."""

from __future__ import annotations

from typing import Any

from weft.rl.algorithms.base import AlgorithmSpec, TokenLossSpec

_RISING, _FALLING = 1.0, 1.05  # temperatures for advantages above 0, and for others


def loss(tokens: Any, keys: Any) -> Any:
    """-4 / t x sigmoid(t (r - 1)) x A, with t = 1 if A > 0, else 1.05 (arXiv:2511.20347; the temperatures are also
    TRL's defaults). At r = 1 its gradient is that of -r A."""
    temperature = _FALLING + (_RISING - _FALLING) * (tokens.advantage > 0).to(tokens.advantage.dtype)
    return -4 / temperature * (temperature * (tokens.ratio - 1)).sigmoid() * tokens.advantage


def plain(logprob: Any, row: Any, keys: Any) -> Any:
    """The same, token by token."""
    import torch

    values = []
    for current, old, advantage in zip(logprob, row.old_logprobs, row.advantage, strict=True):
        temperature = _RISING if advantage > 0 else _FALLING
        gate = 1 / (1 + (temperature * (1 - (current - old).exp())).exp())
        values.append(-gate * 4 / temperature * advantage)
    return torch.stack(values)


DECLARES = (
    TokenLossSpec(
        "sapo",
        loss,
        plain,
        "-4 / t sigmoid(t (ratio - 1)) A, with t = 1 if A > 0, else 1.05",
        reads=(),
        clipping="none",
    ),
    AlgorithmSpec(
        "sapo",
        "2511.20347",
        {"advantage": "grpo", "advantage_norm": "group", "policy_loss": "sapo", "loss_aggregation": "sequence_mean"},
    ),
)
