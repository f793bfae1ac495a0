"""DPPO: a trust region of probabilities in place of clipped ratios, and the square of the log ratio, as in prime-rl."""

from __future__ import annotations

from typing import Any

from weft.rl.algorithms.base import AlgorithmSpec, TokenLossSpec

_SQUARED = 1e-3  # factor on the squared log ratio: kl_tau of prime-rl


def loss(tokens: Any, keys: Any) -> Any:
    """-m r A + 0.001 (log r)^2. m is 0 if p - p_old is above `high` and A > 0, or below -`low` and A is not above 0; p
    is the token's probability (arXiv:2602.04879, Binary-TV; the square is that of arXiv:2602.02276; both as in
    prime-rl's default_loss_fn at 559b4477)."""
    low, high = keys.clip
    change = tokens.logprob.detach().exp() - tokens.old_logprob.exp()
    left = ((tokens.advantage > 0) & (change > high)) | ((tokens.advantage <= 0) & (change < -low))
    return -tokens.ratio.masked_fill(left, 0.0) * tokens.advantage + _SQUARED * tokens.log_ratio.square()


def plain(logprob: Any, row: Any, keys: Any) -> Any:
    """The same, token by token."""
    import torch

    values = []
    for current, old, advantage in zip(logprob, row.old_logprobs, row.advantage, strict=True):
        change = float(current.detach().exp() - old.exp())
        inside = change <= keys.clip[1] if advantage > 0 else change >= -keys.clip[0]
        values.append(_SQUARED * (current - old) ** 2 - (advantage * (current - old).exp() if inside else 0))
    return torch.stack(values)


DECLARES = (
    TokenLossSpec(
        "dppo",
        loss,
        plain,
        "-ratio A + 0.001 (log ratio)^2; no first term if p - p_old is above high and A > 0, or below -low and A is "
        "not above 0, where p is the token's probability",
        reads=("clip",),
        clipping="none",
    ),
    AlgorithmSpec(
        "dppo",
        "2602.04879",
        {
            "advantage": "grpo",
            "advantage_norm": "none",
            "policy_loss": "dppo",
            "loss_aggregation": "token_mean",
            "clip": [0.2, 0.2],
            "old_logprobs": "rollout",
            "correction": "none",
        },
    ),
)
