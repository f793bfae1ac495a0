"""Attention of each document separately. Shapes: see attention_call.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.ops.attention_call import Call

# The most queries of a block, for documents with more keys than queries. It limits the memory for scores. A document
# with fewer queries is split into two blocks, so that the short documents of checks run the same code as long
# documents.
_QUERIES = 512


def per_document(call: Call) -> Tensor:
    """Attention of each document separately, [B, H, T, E]: the reference in fp32, and the fastest kernel on CPU.

    Neighbouring documents of equal length run as one batch. plan_step sorts the documents of a row, so rows have many.
    """
    if call.bounds.last_seen is not None:
        return _with_images(call, call.bounds.last_seen)
    if call.bounds.padded:
        return _single(call, call.query_BHTD, call.key_BKTD, call.value_BKTE)
    if call.bounds.key_lengths is not None:
        return _later_parts(call, call.bounds.lengths, call.bounds.key_lengths)
    runs = [(length, len(list(equal))) for length, equal in groupby(call.bounds.lengths)]
    tokens = [length * count for length, count in runs]
    split = [x.split(tokens, dim=2) for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE)]
    results = []
    for (_, count), tensors in zip(runs, zip(*split, strict=True), strict=True):
        out = _single(call, *(x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in tensors))
        results.append(out.transpose(1, 2).flatten(0, 1))
    return (results[0] if len(results) == 1 else torch.cat(results))[None].transpose(1, 2)


def _later_parts(call: Call, lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> Tensor:
    """Attention of documents with more keys than queries. The queries are a document's last tokens. Neighbours of equal
    lengths run as one batch."""
    runs = [(sizes, len(list(equal))) for sizes, equal in groupby(zip(lengths, key_lengths, strict=True))]
    query = call.query_BHTD.split([queries * count for (queries, _), count in runs], 2)
    key, value = (x.split([keys * count for (_, keys), count in runs], 2) for x in (call.key_BKTD, call.value_BKTE))
    results = []
    for (sizes, count), tensors in zip(runs, zip(query, key, value, strict=True), strict=True):
        q, k, v = (x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in tensors)
        out = _single(call, q, k, v) if sizes[0] == sizes[1] else _InBlocks.apply(q, k, v, call.sinks_H, call)
        results.append(out.transpose(1, 2).flatten(0, 1))
    return (results[0] if len(results) == 1 else torch.cat(results))[None].transpose(1, 2)


def _with_images(call: Call, last_T: Tensor) -> Tensor:
    """Attention of documents with images, one document at a time. last_T: index of the last token that each token sees;
    tokens of an image see later tokens of the image."""
    lengths = list(call.bounds.lengths)
    key_lengths = list(call.bounds.key_lengths or lengths)
    tensors = ((call.query_BHTD, lengths), (call.key_BKTD, key_lengths), (call.value_BKTE, key_lengths))
    documents = zip(*(x.split(sizes, 2) for x, sizes in tensors), strict=True)
    starts = accumulate(key_lengths, initial=0)
    lasts = [last - start for last, start in zip(last_T.split(lengths), starts, strict=False)]
    results = [_explicit(call, q, k, v, call.sinks_H, last) for (q, k, v), last in zip(documents, lasts, strict=True)]
    return torch.cat(results, 2)


def _single(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if call.plain and not call.windowed(q.shape[2]):
        k, v = _repeated(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=call.scaling)
    return _explicit(call, q, k, v, call.sinks_H)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    return (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)) if groups > 1 else (k, v)


def _hidden(call: Call, queries: int, keys: int, device: torch.device, last: Tensor | None = None) -> Tensor:
    """[queries, keys] bool: whether a query does not see a key. The queries are the last tokens. last: [queries] index
    of the last token that each query sees; None: itself."""
    index = torch.arange(keys, device=device)
    query_index = index[keys - queries :, None]
    # Compares broadcast indices: a table of distances would take 8 bytes per element instead of 1.
    hidden = index > (query_index if last is None else last[:, None])
    return hidden if call.window is None else hidden | (index <= query_index - call.window)


def _explicit(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, last: Tensor | None = None
) -> Tensor:
    """softmax(softcap(q k^T scale) + mask, sinks) v, [B, H, T, E]. The softmax is in fp32 or fp64."""
    k, v = _repeated(q, k, v)
    length = q.shape[2]
    scores = q @ k.transpose(2, 3) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(_hidden(call, length, k.shape[2], q.device, last), float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).reshape(1, -1, 1, 1).expand(q.shape[0], -1, length, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v


class _InBlocks(torch.autograd.Function):
    """Attention whose queries are the last tokens, computed in blocks of queries. Backward computes each block again.
    So memory grows with the number of keys, not with queries x keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, call: Call) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks_H)
        ctx.call = call
        spans = block_spans(call, q.shape[2], k.shape[2])
        return torch.cat(
            [_block(call, q[:, :, queries], k[:, :, keys], v[:, :, keys], sinks_H) for queries, keys in spans], 2
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H = ctx.saved_tensors
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        sinks_sum = None if sinks_H is None else torch.zeros_like(sinks_H)
        for queries, keys in block_spans(ctx.call, q.shape[2], k.shape[2]):
            inputs = [x.detach().requires_grad_() for x in (q[:, :, queries], k[:, :, keys], v[:, :, keys])]
            sinks = [] if sinks_H is None else [sinks_H.detach().requires_grad_()]
            with torch.enable_grad():
                out = _block(ctx.call, *inputs, *(sinks or [None]))
            gradients = torch.autograd.grad(out, [*inputs, *sinks], grad[:, :, queries])
            for total, gradient, span in zip(sums, gradients, (queries, keys, keys), strict=False):
                total[:, :, span] += gradient
            if sinks_sum is not None:
                sinks_sum += gradients[-1]
        return *sums, sinks_sum, None


def block_spans(call: Call, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """(slice of queries, slice of the keys that they see) of each block."""
    earlier_keys, size = keys - queries, min(_QUERIES, -(-queries // 2))
    for start in range(0, queries, size):
        end = min(start + size, queries)
        first_key = 0 if call.window is None else max(0, earlier_keys + start - call.window + 1)
        yield slice(start, end), slice(first_key, earlier_keys + end)


def _block(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None) -> Tensor:
    if not call.plain:
        return _explicit(call, q, k, v, sinks_H)
    visible = ~_hidden(call, q.shape[2], k.shape[2], q.device)
    return F.scaled_dot_product_attention(q, *_repeated(q, k, v), attn_mask=visible, scale=call.scaling)
