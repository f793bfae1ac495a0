"""Attention over the trees of a packed row (ops/segments.py) on CPU, without a copy of the keys that siblings share.

The queries of a segment see its own keys, causally, and all keys of the segments of its path. Turned round: the keys of
a segment are seen by its own queries and, all of them, by the queries of its subtree, which lie behind it in the row,
side by side. So each segment needs two calls of torch's flash attention. Results over parts of the keys add up by their
log-sum-exp of scores; the kernel's backward takes the sums over all parts (Dao 2023, arXiv:2307.08691, section 3.1).

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
    """Whether attend_trees serves this call of segments: on CPU, without a window, soft-cap, sinks, or images that look
    ahead, with values as wide as keys, and with segments in depth-first order."""
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
            part, sums = _forward(*(_sequences(x, span, count) for x in (q, k, v)), 0.0, True, scale=scale)
            out[:, :, span], lse[:, :, span] = _joined(part), _joined(sums)
        for keys, queries in _subtrees(segments):
            part, sums = _forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, False, scale=scale)
            total = torch.logaddexp(lse[:, :, queries], sums)
            share = (lse[:, :, queries] - total).exp_()[..., None]
            out[:, :, queries] = (out[:, :, queries] * share + part * (sums - total).exp_()[..., None]).to(out.dtype)
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
            parts = (_sequences(x, span, count) for x in (grad, q, k, v, out, lse))
            gradients = _backward(*parts, 0.0, True, scale=ctx.scale)
            for total, gradient in zip((grad_q, grad_k, grad_v), gradients, strict=True):
                total[:, :, span] = _joined(gradient)
        for keys, queries in _subtrees(ctx.segments):
            inputs = (grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], out[:, :, queries])
            gradients = _backward(*inputs, lse[:, :, queries], 0.0, False, scale=ctx.scale)
            for total, span, gradient in zip((grad_q, grad_k, grad_v), (queries, keys, keys), gradients, strict=True):
                total[:, :, span] += gradient
        return grad_q, grad_k, grad_v, None, None


def _own_spans(segments: Segments) -> Iterator[tuple[slice, int]]:
    """(tokens of neighbouring segments of one length, their number)."""
    start = 0
    for length, same in groupby(segments.lengths):
        count = len(list(same))
        yield slice(start, start + count * length), count
        start += count * length


def _subtrees(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """(tokens of a segment, tokens of all segments below it), for each segment with children."""
    ends = [start + length for start, length in zip(segments.starts, segments.lengths, strict=True)]
    last = list(ends)
    for segment in reversed(range(len(ends))):
        parent = segments.parents[segment]
        if parent != ROOT:
            last[parent] = max(last[parent], last[segment])
    for start, end, below in zip(segments.starts, ends, last, strict=True):
        if below > end:
            yield slice(start, end), slice(end, below)


def _sequences(x: Tensor, span: slice, count: int) -> Tensor:
    """[count, H, length, ...] of tokens [1, H, T, ...]."""
    return x[0, :, span].unflatten(1, (count, -1)).transpose(0, 1)


def _joined(x: Tensor) -> Tensor:
    """[1, H, count x length, ...] of [count, H, length, ...]."""
    return x.transpose(0, 1).flatten(1, 2)[None]
