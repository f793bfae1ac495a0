"""Placeholders for kernels in estimates and simulations. They compute nothing, but allocate, save and return the same
tensors as the real kernels. Only kernels for which torch has no such function are here. Shapes: see attention_call.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.ops.attention_call import Call
from weft.ops.recompute import reuse_in_recompute


def shapes_of_flash(call: Call) -> Tensor:
    """[B, H, T, E] without values, with the memory layout of varlen attention's result, [B, T, H, E]."""
    out: Tensor = _Flash.apply(call.query_BHTD, call.key_BKTD, call.value_BKTE)
    return out


class _Flash(torch.autograd.Function):
    """Saves the inputs, the output and the logsumexp of each query.

    Backward allocates what flash attention 2 does: the gradient of queries in fp32, and gradients of keys and values
    for every query head, before they are summed over the query heads of a key head.
    """

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor) -> Tensor:
        batch, heads, tokens, _ = query_BHTD.shape

        def compute() -> tuple[Tensor, Tensor]:
            out = query_BHTD.new_empty(batch, tokens, heads, value_BKTE.shape[3]).transpose(1, 2)
            return out, query_BHTD.new_empty(batch, heads, tokens, dtype=torch.float32)

        out, sums = reuse_in_recompute(compute, "attention")
        ctx.save_for_backward(query_BHTD, key_BKTD, value_BKTE, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad_BHTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, sums = ctx.saved_tensors
        groups = query.shape[1] // key.shape[1]
        wide = torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums)
        per_query_head = [
            x.new_empty(x.shape[0], groups * x.shape[1], *x.shape[2:]) for x in (key, value) if groups > 1
        ]
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del wide, per_query_head
        return gradients


class GroupedProducts(TorchDispatchMode):
    """A mode in which grouped matmuls (tokens x weights of their experts) return shapes for any dtype. torch supports
    only bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        a, b, ends = args[0], args[1], args[2] if len(args) > 2 else (kwargs or {})["offs"]
        # Either the rows of each expert x its matrix, or the gradient of each matrix, a sum over the expert's rows.
        shape = (a.shape[0], b.shape[2]) if b.ndim == 3 else (len(ends), a.shape[0], b.shape[1])
        return a.new_empty(shape)


def shapes_of_norm(x: Tensor, weight: Tensor) -> Tensor:
    """torch's fused RMSNorm, which meta tensors and simulations do not support, as passes over as many bytes. It saves
    the same tensors, but for one number per row."""
    out: Tensor = _Norm.apply(x, weight)
    return out


class _Norm(torch.autograd.Function):
    """Forward reads one row and writes one. Backward reads two rows and writes one; the weight's gradient costs two
    more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        upstream.clone()
        return x + upstream, torch.empty_like(weight)
