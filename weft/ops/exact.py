"""Arithmetic in which a token's result does not depend on what else is computed, to the last bit.

A trainer computes whole documents and a sampler one token at a time: the same sums, but not always in the same order.
Measured on CPU in fp32 (docs/explanation/exact.md), three things depend on the shape: matrix products with fewer
than 16 rows per thread, pointwise functions, whose last few elements run scalar code, and attention. `Exact` pads
the first two to shapes in which results do not change; `attend_exactly` replaces the third.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ROWS = 16  # products of fewer rows run other code: of fewer than 4 on some CPUs, than 16 on others
_ELEMENTS = 32  # of one step of vector code; a remainder runs scalar code
_MOST_SPLITS = 8  # up to so many threads, each thread's share of a tensor has no remainder


def row_multiple() -> int:
    """The multiple to which rows are padded, so that every thread has enough of them."""
    return _ROWS * torch.get_num_threads()


def padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """x with zeros appended along `dim`, up to a multiple."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, missing])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear. x: [..., K]. weight: [N, K]."""
    rows = x.reshape(-1, x.shape[-1])
    out = F.linear(padded(rows, 0, row_multiple()), weight, bias)
    return out[: len(rows)].view(*x.shape[:-1], len(weight))


def _matmul(x: Tensor, weight: Tensor, **extra: Any) -> Tensor:
    """torch.matmul, where the second factor is one matrix [K, N]."""
    if weight.ndim != 2 or x.ndim < 2 or extra:
        return torch.matmul(x, weight, **extra)
    return linear(x, weight.t())


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, **extra: Any) -> Tensor:
    """torch.addmm, as transformers' Conv1D calls it."""
    if extra:
        return torch.addmm(bias, x, weight, **extra)
    return torch.addmm(bias, padded(x, 0, row_multiple()), weight)[: len(x)]


def _pointwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, **extra: Any) -> Tensor:
        splits = math.lcm(*range(1, min(torch.get_num_threads(), _MOST_SPLITS) + 1))
        flat = x.reshape(-1)
        return function(padded(flat, 0, _ELEMENTS * splits), *args, **extra)[: len(flat)].view(x.shape)

    return run


_INSTEAD: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    **{f: _pointwise(f) for f in (F.silu, F.gelu, F.softplus, torch.sigmoid, torch.Tensor.sigmoid)},
}


class Exact(TorchFunctionMode):
    """A mode that replaces linear layers and pointwise functions with the functions of this file. If it is also active
    in backward, recomputed layers equal the forward's; gradients are torch's own."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def numerics(exact: bool) -> AbstractContextManager[object]:
    """A context with exact arithmetic inside, or with torch's."""
    return Exact() if exact else nullcontext()


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """([N] log softmax(logits / temperature) of each target, [N, V] of all tokens), as the sampler computes them."""
    if temperature != 1:
        logits_NV = logits_NV / temperature
    logprobs_NV = logits_NV.log_softmax(-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0], logprobs_NV
