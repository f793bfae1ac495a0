"""Triton kernels of expert layers: SwiGLU of weighted rows, forward and backward, and the sum of each token's rows.

Rows are in 16 bits, arithmetic is in fp32. This file is imported only if Triton is installed. swiglu.py and dispatch.py
compare the kernels with torch's operations before a run uses them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Columns that a program processes together: 8 values for each of 128 threads. SwiGLU: one program processes one row.
_BLOCK = 1024


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


@triton.jit
def _sum_rows(
    rows: tl.tensor, indices: tl.tensor, out: tl.tensor, width: tl.tensor, CHOSEN: tl.constexpr, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):  # unrolled: the loads of all rows are in flight at once
        row = tl.load(indices + token * CHOSEN + choice)
        total += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def forward(x_S2I: Tensor, weight_S: Tensor, out_SI: Tensor) -> None:
    """Write silu(gate) * up * weight into `out_SI`. gate and up are the halves of x_S2I. All tensors are contiguous."""
    _forward[(len(x_S2I),)](x_S2I, weight_S, out_SI, out_SI.shape[1], BLOCK=_BLOCK, num_warps=4)


def backward(upstream_SI: Tensor, x_S2I: Tensor, weight_S: Tensor, grad_S2I: Tensor, grad_weight_S: Tensor) -> None:
    """Write the gradients of x_S2I and weight_S into `grad_S2I` and `grad_weight_S`. All tensors are contiguous."""
    _backward[(len(x_S2I),)](
        upstream_SI, x_S2I, weight_S, grad_S2I, grad_weight_S, upstream_SI.shape[1], BLOCK=_BLOCK, num_warps=4
    )


def sum_rows(rows_SH: Tensor, indices_TK: Tensor, out_TH: Tensor) -> None:
    """Write the sum of rows_SH[indices_TK[t]] into out_TH[t], added in the order of K. All tensors are contiguous,
    indices are int64."""
    (tokens, chosen), width = indices_TK.shape, rows_SH.shape[1]
    _sum_rows[(tokens, triton.cdiv(width, _BLOCK))](
        rows_SH, indices_TK, out_TH, width, CHOSEN=chosen, BLOCK=_BLOCK, num_warps=4
    )
