"""Arithmetic in which the result of a token is bitwise independent of the other tokens of a call.

A trainer computes full documents, a sampler one token at a time. They compute the same sums, but not always in the same
order. On CPU in fp32 the results of three operations depend on the shape (measured in docs/explanation/exact.md):
matmuls with fewer than 16 rows per thread; pointwise functions, whose last few elements run scalar code; and attention.
`Exact` pads inputs of the first two to shapes in which results do not change. `attend_exactly` replaces attention.
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

_ROWS = 16  # matmuls with fewer rows than this run different code; on some CPUs the limit is 4, on others 16
_ELEMENTS = 32  # elements of one step of vector code; a remainder runs scalar code
_MOST_SPLITS = 8  # with up to this many threads, no thread's part of a padded tensor has a remainder


def row_multiple() -> int:
    """The multiple to which the number of rows is padded, so that every thread has at least _ROWS rows."""
    return _ROWS * torch.get_num_threads()


def padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """x with zeros appended along `dim`, up to the next multiple of `multiple`."""
    zeros = -x.shape[dim] % multiple
    if not zeros:
        return x
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, zeros])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with padded rows, [..., N]. x: [..., K]. weight: [N, K]. bias: [N] or None."""
    rows = x.reshape(-1, x.shape[-1])
    out = F.linear(padded(rows, 0, row_multiple()), weight, bias)
    return out[: len(rows)].view(*x.shape[:-1], len(weight))


def _matmul(x: Tensor, weight: Tensor, **extra: Any) -> Tensor:
    """torch.matmul; with padded rows if the second factor is one matrix [K, N]."""
    if weight.ndim != 2 or x.ndim < 2 or extra:
        return torch.matmul(x, weight, **extra)
    return linear(x, weight.t())


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, **extra: Any) -> Tensor:
    """torch.addmm with padded rows, for calls like the one in transformers' Conv1D."""
    if extra:
        return torch.addmm(bias, x, weight, **extra)
    return torch.addmm(bias, padded(x, 0, row_multiple()), weight)[: len(x)]


def _pointwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, **extra: Any) -> Tensor:
        splits = math.lcm(*range(1, min(torch.get_num_threads(), _MOST_SPLITS) + 1))
        flat = x.reshape(-1)
        return function(padded(flat, 0, _ELEMENTS * splits), *args, **extra)[: len(flat)].view(x.shape)

    return run


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    **{f: _pointwise(f) for f in (F.silu, F.gelu, F.softplus, torch.sigmoid, torch.Tensor.sigmoid)},
}


class Exact(TorchFunctionMode):
    """A mode that replaces linear layers and pointwise functions with the functions of this file.

    It must also be active in backward, so that recomputed layers equal those of the forward. Gradients are torch's.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def numerics(exact: bool) -> AbstractContextManager[object]:
    """The mode Exact if `exact`, else a context without effect."""
    return Exact() if exact else nullcontext()


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """([N] log softmax(logits / temperature) of each target, [N, V] of all tokens), with the operations of the
    sampler."""
    if temperature != 1:
        logits_NV = logits_NV / temperature
    logprobs_NV = logits_NV.log_softmax(-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0], logprobs_NV
