"""Flex attention over packed documents (CUDA): windows, soft-caps and sinks in one compiled kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.ops.attention import Call


@lru_cache(maxsize=1)
def _compiled() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=True), create_block_mask


def flex_documents(call: Call) -> Tensor:
    """[B, H, T, E]. A sink is one more logit whose value is zero: out * sigmoid(logsumexp - sink)."""
    attention, _ = _compiled()

    def cap(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        assert call.softcap is not None
        return torch.tanh(score / call.softcap) * call.softcap

    query, key, value = call.query_BHTD, call.key_BKTD, call.value_BKTE
    out, lse = attention(
        query, key, value,
        score_mod=None if call.softcap is None else cap, block_mask=_mask(call), scale=call.scaling,
        enable_gqa=query.shape[1] != key.shape[1], return_lse=True,
    )  # fmt: skip
    if call.sinks_H is not None:
        out = out * torch.sigmoid(lse - call.sinks_H.to(lse.dtype)[None, :, None])[..., None].to(out.dtype)
    return out


def _mask(call: Call) -> Any:
    """The block mask of this row for this window, made once per row."""
    bounds, window, length = call.bounds, call.window, call.query_BHTD.shape[2]
    if ("mask", window) not in bounds.cache:
        device = call.query_BHTD.device
        if bounds.apart:
            document = torch.zeros(length, dtype=torch.int32, device=device)
        else:
            assert bounds.cu_seqlens is not None
            document = torch.searchsorted(bounds.cu_seqlens[1:], torch.arange(length, device=device), right=True)

        def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            same = (document[q] == document[kv]) & (q >= kv)
            return same if window is None else same & (q - kv < window)

        _, create = _compiled()
        bounds.cache[("mask", window)] = create(visible, None, None, length, length, device=device)
    return bounds.cache[("mask", window)]
