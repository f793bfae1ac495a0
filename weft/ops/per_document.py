"""Attention of each document by itself. Shapes are those of attention_call.py."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.attention_call import Call


def per_document(call: Call) -> Tensor:
    """Attention document by document: the reference in fp32, and the fastest on CPU.

    Neighbours of equal length are one batch; rows have many, because their documents are sorted (plan_step).
    """
    if call.bounds.padded:
        return _one(call, call.query_BHTD, call.key_BKTD, call.value_BKTE)
    runs = [(length, len(list(same))) for length, same in groupby(call.bounds.lengths)]
    tokens = [length * count for length, count in runs]
    split = [x.split(tokens, dim=2) for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE)]
    found = []
    for (_, count), parts in zip(runs, zip(*split, strict=True), strict=True):
        out = _one(call, *(part[0].unflatten(1, (count, -1)).transpose(0, 1) for part in parts))
        found.append(out.transpose(1, 2).flatten(0, 1))
    return (found[0] if len(found) == 1 else torch.cat(found))[None].transpose(1, 2)


def _one(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if call.plain and not call.windowed(q.shape[2]):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=call.scaling)
    return _explicit(call, q, k, v)


def _explicit(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(softcap(q k^T scale) + mask, sinks) v, written out; the softmax in at least fp32."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    scores = q @ k.transpose(2, 3) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = distance < 0
    if call.window is not None:
        hidden = hidden | (distance >= call.window)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(hidden, float("-inf"))
    if call.sinks_H is not None:
        sinks = call.sinks_H.to(scores.dtype).reshape(1, -1, 1, 1).expand(q.shape[0], -1, length, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v
