"""Weighted SwiGLU of rows: silu(gate) * up * weight. On CUDA in 16 bits, forward and backward are one kernel each,
which together make two passes over memory instead of the nine of torch's operations.

S rows, I width. gate and up are the halves of x_S2I.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.kernel_trial import try_kernels, uses_kernels


def weighted_swiglu(x_S2I: Tensor, weight_S: Tensor) -> Tensor:
    """[S, I]: silu(gate) * up * weight, in the dtype of x_S2I."""
    out: Tensor = _WeightedSwiGLU.apply(x_S2I, weight_S)
    return out


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_S2I: Tensor, weight_S: Tensor) -> Tensor:
        ctx.save_for_backward(x_S2I, weight_S)
        if uses_kernels(x_S2I, check_kernels):
            return torch.ops.weft.swiglu(x_S2I.contiguous(), weight_S.contiguous())
        return plain(x_S2I, weight_S)

    @staticmethod
    def backward(ctx: Any, grad_SI: Tensor) -> tuple[Tensor, Tensor]:
        x_S2I, weight_S = ctx.saved_tensors
        if uses_kernels(x_S2I, check_kernels):
            grads = torch.ops.weft.swiglu_gradient(grad_SI.contiguous(), x_S2I.contiguous(), weight_S.contiguous())
            return grads
        return plain_gradient(grad_SI, x_S2I, weight_S)


def plain(x_S2I: Tensor, weight_S: Tensor) -> Tensor:
    """weighted_swiglu, computed with torch's operations."""
    gate, up = x_S2I.chunk(2, -1)
    return F.silu(gate).mul_(up).mul_(weight_S[:, None])


def plain_gradient(grad_SI: Tensor, x_S2I: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x_S2I and weight_S, computed with torch's operations."""
    gate, up = x_S2I.chunk(2, -1)
    grad_x, silu, grad_silu = torch.empty_like(x_S2I), F.silu(gate), grad_SI * up
    grad_gate, grad_up = grad_x.chunk(2, -1)
    torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=grad_gate)
    grad_weight = grad_silu.mul_(silu).sum(-1, dtype=torch.promote_types(weight_S.dtype, grad_SI.dtype))
    torch.mul(grad_SI, silu, out=grad_up)
    grad_x.mul_(weight_S[:, None])
    return grad_x, grad_weight.to(weight_S.dtype)


# The kernels are registered as operators, so that simulations run without Triton.


@torch.library.custom_op("weft::swiglu", mutates_args=())
def _swiglu(x: Tensor, weight: Tensor) -> Tensor:
    from weft.ops import expert_kernels

    out = x.new_empty(len(x), x.shape[1] // 2)
    expert_kernels.forward(x, weight, out)
    return out


@_swiglu.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), x.shape[1] // 2)


@torch.library.custom_op("weft::swiglu_gradient", mutates_args=())
def _swiglu_gradient(upstream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from weft.ops import expert_kernels

    grads = torch.empty_like(x), torch.empty_like(weight)
    expert_kernels.backward(upstream, x, weight, *grads)
    return grads


@_swiglu_gradient.register_fake
def _(upstream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@functools.cache
def check_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device and equal torch's operations in fp32, within the rounding of `dtype`."""
    return try_kernels("SwiGLU of experts is computed", device, functools.partial(_largest_difference, device, dtype))


def _largest_difference(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference between a kernel and torch's operations, as a multiple of the tolerance for rounding to
    `dtype`. Infinite if a result is not finite."""
    generator, width, worst = torch.Generator().manual_seed(0), 1500, 0.0
    x, upstream = (torch.randn(3, n, generator=generator).mul_(2.0).to(device, dtype) for n in (2 * width, width))
    for weight in (torch.tensor([0.0, 0.3, 2.0], device=device), torch.tensor([1.0, 0.3, 2.0]).to(device, dtype)):
        results = (_swiglu(x, weight), *_swiglu_gradient(upstream, x, weight))
        wide = x.float(), weight.float()
        truths = (plain(*wide), *plain_gradient(upstream.float(), *wide))
        for result, truth in zip(results, truths, strict=True):
            step = torch.finfo(result.dtype).eps * (64 if result.dtype == torch.float32 else 2)
            allowed = step * (truth.abs() + truth.abs().mean())
            difference = ((result.float() - truth).abs() / allowed).max()
            worst = max(worst, float(difference) if bool(difference.isfinite()) else float("inf"))
    return worst
