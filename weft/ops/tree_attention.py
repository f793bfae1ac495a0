"""Attention over the trees of a packed row (ops/segments.py) on CPU, without copies of the keys that siblings share.

The queries of a segment see the keys of the segment, causally, and all keys of its ancestors. Equivalently, the keys of
a segment are seen by its own queries, causally, and by all queries of its descendants. The descendants are contiguous
in the row, directly after the segment. So each segment needs two calls of torch's flash attention. Results over parts
of the keys are combined with their log-sum-exp of scores, and the kernel's backward uses the log-sum-exp over all keys
(Dao 2023, arXiv:2307.08691, section 3.1).

Shapes: see attention_call.py; B is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.ops.attention_call import Call
from weft.ops.segments import ROOT, Segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def suits_trees(call: Call) -> bool:
    """Whether attend_trees supports this call. It must be on CPU, without window, soft-cap, sinks, or image tokens that
    see later tokens. Values must be as wide as keys, and segments in depth-first order."""
    return (
        call.query_BHTD.device.type == "cpu"
        and (call.bounds.segments is None or call.bounds.segments.depth_first)
        and call.plain
        and call.window is None
        and call.bounds.last_seen is None
        and call.query_BHTD.shape[-1] == call.value_BKTE.shape[-1]
    )


def attend_trees(call: Call) -> Tensor:
    """[B, H, T, E]: attention of all queries of a row of trees."""
    assert call.bounds.segments is not None
    groups = call.query_BHTD.shape[1] // call.key_BKTD.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (call.key_BKTD, call.value_BKTE))
    out: Tensor = _AttendTrees.apply(call.query_BHTD, key, value, call.bounds.segments, call.scaling)
    return out


class _AttendTrees(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for span, count in _own_spans(segments):
            result, sums = _forward(*(_sequences(x, span, count) for x in (q, k, v)), 0.0, True, scale=scale)
            out[:, :, span], lse[:, :, span] = _as_row(result), _as_row(sums)
        for keys, queries in _subtrees(segments):
            result, sums = _forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, False, scale=scale)
            total = torch.logaddexp(lse[:, :, queries], sums)
            share = (lse[:, :, queries] - total).exp_()[..., None]
            out[:, :, queries] = (out[:, :, queries] * share + result * (sums - total).exp_()[..., None]).to(out.dtype)
            lse[:, :, queries] = total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for span, count in _own_spans(ctx.segments):
            inputs = [_sequences(x, span, count) for x in (grad, q, k, v, out, lse)]
            gradients = _backward(*inputs, 0.0, True, scale=ctx.scale)
            for total, gradient in zip((grad_q, grad_k, grad_v), gradients, strict=True):
                total[:, :, span] = _as_row(gradient)
        for keys, queries in _subtrees(ctx.segments):
            inputs = [grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], out[:, :, queries]]
            gradients = _backward(*inputs, lse[:, :, queries], 0.0, False, scale=ctx.scale)
            for total, span, gradient in zip((grad_q, grad_k, grad_v), (queries, keys, keys), gradients, strict=True):
                total[:, :, span] += gradient
        return grad_q, grad_k, grad_v, None, None


def _own_spans(segments: Segments) -> Iterator[tuple[slice, int]]:
    """(tokens of neighbouring segments of equal length, number of these segments)."""
    start = 0
    for length, equal in groupby(segments.lengths):
        count = len(list(equal))
        yield slice(start, start + count * length), count
        start += count * length


def _subtrees(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """(tokens of a segment, tokens of all its descendants), for each segment with children."""
    ends = [start + length for start, length in zip(segments.starts, segments.lengths, strict=True)]
    subtree_ends = list(ends)
    for segment in reversed(range(len(ends))):
        parent = segments.parents[segment]
        if parent != ROOT:
            subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[segment])
    for start, end, subtree_end in zip(segments.starts, ends, subtree_ends, strict=True):
        if subtree_end > end:
            yield slice(start, end), slice(end, subtree_end)


def _sequences(x: Tensor, span: slice, count: int) -> Tensor:
    """[1, H, T, ...] -> [count, H, length, ...]: the tokens of `span`, as `count` sequences."""
    return x[0, :, span].unflatten(1, (count, -1)).transpose(0, 1)


def _as_row(x: Tensor) -> Tensor:
    """[count, H, length, ...] -> [1, H, count x length, ...]."""
    return x.transpose(0, 1).flatten(1, 2)[None]
