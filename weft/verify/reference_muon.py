"""The reference's Muon: complete matrices in one process, in fp32 or the weights' wider dtype. Imports nothing of
weft."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Part = tuple[tuple[int, ...], tuple[int, ...]]  # start and size of a matrix in its parameter


class PlainMuon(torch.optim.AdamW):
    """Muon for parameters with `parts`, AdamW for the others. scale: `original` or `match_rms_adamw`."""

    def __init__(
        self, groups: Any, parts: Mapping[nn.Parameter, Sequence[Part]], *, betas: tuple[float, float], eps: float,
        momentum: float, scale: str,
    ) -> None:  # fmt: skip
        dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
        # In 16 bits only the fused kernel computes a step of AdamW in fp32.
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=torch.bfloat16 in dtypes)
        self.parts, self.momentum, self.scale = parts, momentum, scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.parts and parameter.grad is not None:
                    self._step_parameter(parameter, group)
        super().step()

    def _step_parameter(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        wide = max(parameter.dtype, torch.float32, key=lambda dtype: dtype.itemsize)
        gradient, parameter.grad = parameter.grad.to(wide), None
        state, weight = self.state[parameter], parameter.to(wide)
        before = state.get("momentum", torch.zeros_like(gradient))
        momentum = torch.lerp(gradient, before, self.momentum)
        update = torch.lerp(gradient, momentum, self.momentum)
        state["momentum"] = momentum.to(parameter.dtype).to(wide)
        weight = weight * (1 - group["lr"] * group["weight_decay"])
        for start, size in self.parts[parameter]:
            slices = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            rows, columns = size[-2:]
            original, matched = math.sqrt(max(1, rows / columns)), 0.2 * math.sqrt(max(rows, columns))
            scale = original if self.scale == "original" else matched
            step = orthogonal(update[slices].reshape(rows, columns)).reshape(size)
            weight[slices] -= group["lr"] * scale * step
        parameter.copy_(weight)


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps, X <- aX + (bA + cA^2) X with A = X X^T, from X of Frobenius norm 1."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
