"""Attention of one new token against the keys of a cache.

Shapes: R rows, H query heads, K key heads (H a multiple of K), G = H / K, S slots of the cache, D head width, E value
width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.attention_call import Bounds, Call


def one_token(call: Call) -> Tensor:
    """Attention of one new token per row, [R, H, 1, E]. Row r attends to slots 0 .. call.bounds.past[r]. The last of
    these slots holds the key of the new token.

    The G query heads of a key head are computed as G queries of one head, so that keys need not be repeated.
    """
    batch, heads, _, width = call.query_BHTD.shape
    key_heads = call.key_BKTD.shape[1]
    query_RKGD = call.query_BHTD.reshape(batch, key_heads, heads // key_heads, width)
    seen_RS = _visible_slots(call.bounds, call.key_BKTD.shape[2], call.window)
    if call.plain:
        mask = None if seen_RS is None else seen_RS[:, None, None]
        out_RKGE = F.scaled_dot_product_attention(
            query_RKGD, call.key_BKTD, call.value_BKTE, attn_mask=mask, scale=call.scaling
        )
    else:
        out_RKGE = _explicit(call, query_RKGD, seen_RS)
    return out_RKGE.reshape(batch, heads, 1, -1)


def _visible_slots(bounds: Bounds, slots: int, window: int | None) -> Tensor | None:
    """[R, S] mask of the slots that each row sees, computed once for all layers with this window. None if every row
    sees every slot."""
    past_R = bounds.past
    assert past_R is not None
    if window is not None and window >= slots:
        window = None
    if window is None and bounds.even:
        return None
    if window not in bounds.cache:
        slot_S = torch.arange(slots, device=past_R.device)
        seen_RS = slot_S <= past_R[:, None]
        if window is not None:
            seen_RS &= slot_S > past_R[:, None] - window
        bounds.cache[window] = seen_RS
    mask: Tensor = bounds.cache[window]
    return mask


def _explicit(call: Call, query_RKGD: Tensor, seen_RS: Tensor | None) -> Tensor:
    """softmax(softcap(q k^T scale) + mask, sinks) v, [R, K, G, E]. The softmax is in fp32 or fp64."""
    scores_RKGS = query_RKGD @ call.key_BKTD.transpose(2, 3) * call.scaling
    if call.softcap is not None:
        scores_RKGS = torch.tanh(scores_RKGS / call.softcap) * call.softcap
    scores_RKGS = scores_RKGS.to(torch.promote_types(scores_RKGS.dtype, torch.float32))
    if seen_RS is not None:
        scores_RKGS = scores_RKGS.masked_fill(~seen_RS[:, None, None], float("-inf"))
    if call.sinks_H is None:
        weights_RKGS = scores_RKGS.softmax(-1)
    else:
        rows, key_heads, groups, _ = scores_RKGS.shape
        sinks = call.sinks_H.to(scores_RKGS.dtype).reshape(1, key_heads, groups, 1).expand(rows, -1, -1, -1)
        weights_RKGS = torch.cat([scores_RKGS, sinks], dim=-1).softmax(-1)[..., :-1]
    return weights_RKGS.to(call.value_BKTE.dtype) @ call.value_BKTE
