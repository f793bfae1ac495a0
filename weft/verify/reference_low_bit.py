"""The reference's AdamW with low-bit state: the same lossy algorithm on complete tensors. Imports nothing of weft.

State is stored decoded, in fp32. docs/explanation/exact.md and weft/engine/optim/low_bit.py have the formulas.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class CodedAdamW(torch.optim.Optimizer):
    """AdamW whose moments are rounded to codes of 8 bits after each step, and whose weights may be bf16.

    names: of parameters, for the random bits. coded: parameters whose state is in codes; others have it in `state`.
    rounding: of weights in bf16: `nearest`, `stochastic`, or `kahan`, which keeps the rounding error.
    """

    def __init__(
        self, groups: Any, names: Mapping[nn.Parameter, str], coded: Mapping[nn.Parameter, bool], *,
        betas: tuple[float, float], eps: float, seed: int, state: torch.dtype = torch.float32,
        rounding: str = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.names, self.coded, self.seed, self.stored, self.rounding = names, coded, seed, state, rounding

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        g, state, (beta1, beta2) = parameter.grad.float(), self.state[parameter], group["betas"]
        t = state["step"] = state.get("step", 0) + 1
        m = state.get("exp_avg", torch.zeros_like(g)) * beta1 + g * (1 - beta1)
        v = state.get("exp_avg_sq", torch.zeros_like(g)) * beta2 + g * g * (1 - beta2)
        change = m / (root_of(v) / math.sqrt(1 - beta2**t) + group["eps"]) * (group["lr"] / (1 - beta1**t))
        weight = parameter.float() + state.get("lost", 0.0)
        weight = weight * (1 - group["lr"] * group["weight_decay"]) - change
        name = f"{self.seed}/{t}/{self.names[parameter]}".encode()
        key = int.from_bytes(hashlib.blake2s(name, digest_size=4).digest(), "little")
        words = bits(key, g.numel()).view(g.shape).to(g.device)
        if self.rounding == "stochastic" and parameter.dtype == torch.bfloat16:
            pattern = (weight.view(torch.int32).long() + (words >> 16)) & ~0xFFFF
            parameter.copy_(pattern.to(torch.int32).view(torch.float32))
        else:
            parameter.copy_(weight)
        if self.rounding == "kahan" and parameter.dtype == torch.bfloat16:
            state["lost"] = (weight - parameter.float()).bfloat16().float()
        if self.coded[parameter]:
            m, v = rounded_first(m), rounded_second(v, words)
        else:
            m, v = m.to(self.stored).float(), v.to(self.stored).float()
        state["exp_avg"], state["exp_avg_sq"] = m, v


def root_of(x: Tensor) -> Tensor:
    """The correctly rounded square root; torch's on a CPU may differ."""
    return x.double().sqrt().to(x.dtype)


def rounded_first(m: Tensor) -> Tensor:
    """The first moment decoded from its nearest code: s c |c| / 127^2, c in -127..127, s the block's largest |m|."""
    s = largest(m.abs())
    c = root_of(m.abs() / s.clamp(min=1e-37)).mul(127.0).round().copysign(m)
    return c * c.abs() * (s * (1 / 127.0**2))


def rounded_second(v: Tensor, word: Tensor) -> Tensor:
    """The second moment decoded from a neighbouring code: sqrt(v) = s c^2 / 255^2, c in 0..255, s the block's largest
    sqrt(v). The low 16 bits of `word` choose between the two neighbours."""
    root = root_of(v)
    s = largest(root)
    c = (root_of(root / s.clamp(min=1e-37)) * 255.0 + (word & 0xFFFF) * (1 / 65536)).floor()
    root = torch.maximum(c, (root > 0).to(c)).clamp(max=255.0).square() * (s * (1 / 255.0**2))
    return root.square()


def largest(x: Tensor) -> Tensor:
    """For each element, the largest element of its block: 256 along the last dimension, fewer at a row's end."""
    blocks = [part.amax(-1, keepdim=True).expand_as(part) for part in x.split(256, -1)]
    return torch.cat(blocks, -1)


def bits(key: int, count: int) -> Tensor:
    """32 random bits for each of `count` elements, in int64."""
    x = (torch.arange(count) & 0xFFFFFFFF) ^ key
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        x = (x * (factor & 0xFFFF) + (((x * (factor >> 16)) & 0xFFFF) << 16)) & 0xFFFFFFFF
    return x ^ (x >> 16)
