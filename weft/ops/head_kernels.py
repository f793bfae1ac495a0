"""Triton kernels for the head's elementwise work on a tile of logits. The operations of head.py read and write the tile
several times in fp32; a kernel reads it in 16 bits.

A kernel reads and writes a tile [t, v] in its 16-bit dtype, and computes in fp32. One program processes one row. This
file is imported only if Triton is installed. head.py compares each kernel with its operations before a run uses it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # columns that a program processes together: 16 values for each of 256 threads


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _load(logits: tl.tensor, column: tl.tensor, inside: tl.tensor, outer: tl.tensor, CAPPED: tl.constexpr) -> tl.tensor:
    z = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        z = outer * _tanh(z)
    return z


@triton.jit
def _load_with_slope(
    logits: tl.tensor, column: tl.tensor, inside: tl.tensor, inner: tl.tensor, outer: tl.tensor, CAPPED: tl.constexpr
) -> tl.tensor:  # fmt: skip
    z = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    slope = inner
    if CAPPED:
        t = _tanh(z)
        slope = inner * outer * (1.0 - t * t)
        z = outer * t
    return z, slope


@triton.jit
def _fold(
    tile: tl.tensor, stride: tl.tensor, columns: tl.tensor, targets: tl.tensor, lse: tl.tensor, entropy: tl.tensor,
    picked: tl.tensor, largest: tl.tensor, outer: tl.tensor, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = tile + row * stride
    top = -float("inf")
    total = 0.0
    weighted = 0.0  # sum of exp(z - top) * (z - top)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.where(inside, _load(logits, column, inside, outer, CAPPED), -float("inf"))
        new_top = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(top == -float("inf"), 0.0, top - new_top)
        share = tl.where(top == -float("inf"), 0.0, tl.exp(top - new_top))
        d = z - new_top
        e = tl.exp(d)
        weighted = share * (weighted + shift * total) + tl.sum(e * tl.where(e > 0.0, d, 0.0), 0)
        total = share * total + tl.sum(e, 0)
        top = new_top
    tl.store(lse + row, top + tl.log(total))
    tl.store(entropy + row, tl.log(total) - weighted / total)
    tl.store(largest + row, tl.maximum(tl.load(largest + row), top))
    target = tl.load(targets + row)
    if (target >= 0) & (target < columns):
        tl.store(picked + row, _load(logits, target, True, outer, CAPPED))


@triton.jit
def _softmax_gradient(
    tile: tl.tensor, stride: tl.tensor, columns: tl.tensor, targets: tl.tensor, direction: tl.tensor, lse: tl.tensor,
    picked: tl.tensor, inner: tl.tensor, outer: tl.tensor, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = tile + row * stride
    target = tl.load(targets + row)
    if (target >= 0) & (target < columns):  # must come first: later this program overwrites its row
        tl.store(picked + row, _load(logits, target, True, outer, CAPPED))
    top = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.where(inside, _load(logits, column, inside, outer, CAPPED), -float("inf"))
        new_top = tl.maximum(top, tl.max(z, 0))
        total = total * tl.where(top == -float("inf"), 0.0, tl.exp(top - new_top)) + tl.sum(tl.exp(z - new_top), 0)
        top = new_top
    tl.store(lse + row, top + tl.log(total))
    g = tl.load(direction + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z, slope = _load_with_slope(logits, column, inside, inner, outer, CAPPED)
        gradient = (tl.where(column == target, g, 0.0) - g * (tl.exp(z - top) / total)) * slope
        tl.store(logits + column, gradient.to(tile.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(
    tile: tl.tensor, stride: tl.tensor, columns: tl.tensor, targets: tl.tensor, lse: tl.tensor, logprob: tl.tensor,
    entropy: tl.tensor, value: tl.tensor, inner: tl.tensor, outer: tl.tensor,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = tile + row * stride
    target = tl.load(targets + row)
    total = tl.load(lse + row)
    g = tl.load(logprob + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z, slope = _load_with_slope(logits, column, inside, inner, outer, CAPPED)
        log_p = z - total
        factor = -g
        if ENTROPY:
            factor = -(tl.load(entropy + row) * (log_p + tl.load(value + row)) + g)
        gradient = (tl.where(column == target, g, 0.0) + factor * tl.exp(log_p)) * slope
        tl.store(logits + column, gradient.to(tile.dtype.element_ty), mask=inside)


def fold(
    tile: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, picked: Tensor, largest: Tensor, outer: float | None
) -> None:
    """Compute values of the rows of a tile [t, v]. Overwrites lse and entropy [t], and picked [t] for targets inside
    the columns. largest [t] becomes the maximum of itself and the row's largest logit."""
    _fold[(len(tile),)](
        tile, tile.stride(0), tile.shape[1], targets, lse, entropy, picked, largest, outer or 1.0,
        CAPPED=outer is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def softmax_gradient(
    tile: Tensor, targets: Tensor, direction: Tensor, lse: Tensor, picked: Tensor, inner: float, outer: float | None
) -> None:
    """Overwrite a tile of complete rows [t, V] with its gradient for the upstream gradient `direction` [t] of the
    log-probabilities. Fills lse and picked as `fold` does."""
    _softmax_gradient[(len(tile),)](
        tile, tile.stride(0), tile.shape[1], targets, direction, lse, picked, inner, outer or 1.0,
        CAPPED=outer is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def gradient(
    tile: Tensor, targets: Tensor, lse: Tensor, logprob: Tensor, entropy: Tensor | None, value: Tensor | None,
    inner: float, outer: float | None,
) -> None:  # fmt: skip
    """Overwrite a tile [t, v] with its gradient. logprob, entropy: upstream gradients [t] of log-probabilities and
    entropies. lse, value: log-sum-exp and entropy [t] of the complete rows."""
    _gradient[(len(tile),)](
        tile, tile.stride(0), tile.shape[1], targets, lse, logprob, logprob if entropy is None else entropy,
        lse if value is None else value, inner, outer or 1.0,
        CAPPED=outer is not None, ENTROPY=entropy is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
