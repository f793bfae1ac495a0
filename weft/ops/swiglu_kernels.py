"""SwiGLU of weighted rows as one Triton kernel for forward and one for backward.

Rows are in 16 bits, arithmetic is in fp32. One program processes one row. This file is imported only if Triton is
installed. swiglu.py compares the kernels with its operations before a run uses them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # columns that a program processes together: 8 values for each of 128 threads


@triton.jit
def _forward(
    x: tl.tensor, weights: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    upstream: tl.tensor, x: tl.tensor, weights: tl.tensor, grad_x: tl.tensor, grad_weights: tl.tensor,
    width: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(upstream + row * width + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        total += tl.sum(d * silu * up, 0)
        d = d * weight
        grad_gate = d * up * s * (1.0 + gate * (1.0 - s))
        tl.store(grad_x + row * 2 * width + column, grad_gate.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(grad_x + row * 2 * width + width + column, (d * silu).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weights + row, total)


def forward(x_S2I: Tensor, weight_S: Tensor, out_SI: Tensor) -> None:
    """Write silu(gate) * up * weight into `out_SI`. gate and up are the halves of x_S2I. All tensors are contiguous."""
    _forward[(len(x_S2I),)](x_S2I, weight_S, out_SI, out_SI.shape[1], BLOCK=_BLOCK, num_warps=4)


def backward(upstream_SI: Tensor, x_S2I: Tensor, weight_S: Tensor, grad_S2I: Tensor, grad_weight_S: Tensor) -> None:
    """Write the gradients of x_S2I and weight_S into `grad_S2I` and `grad_weight_S`. All tensors are contiguous."""
    _backward[(len(x_S2I),)](
        upstream_SI, x_S2I, weight_S, grad_S2I, grad_weight_S, upstream_SI.shape[1], BLOCK=_BLOCK, num_warps=4
    )
