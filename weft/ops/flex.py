"""Flex attention over packed documents (CUDA, compiled): windows, soft-caps and sinks in one kernel.

B batch, H query heads, T tokens of a row, E value width, N blocks of 128 queries, M blocks of 128 keys. Token q sees
the keys first_T[q] .. last_T[q]: from the start of its document or window, whichever is later, to itself, or to the end
of its image. Both bounds never decrease, so the keys of a block of queries are one range of blocks, given by the
block's first and last query.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch._dynamo.config
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from weft.ops.attention_call import Call

BLOCK = 128  # a multiple of the tiles of all flex kernels
# Most graphs: one per kind of call (heads, widths, dtype, soft-cap, sinks, gradients) in a process; torch's limit is 8.
_GRAPHS = 64


def flex_documents(call: Call) -> Tensor:
    """[B, H, T, E]."""
    softcap = None if call.softcap is None else repr(call.softcap)
    return compiled()(
        call.query_BHTD, call.key_BKTD, call.value_BKTE, _mask(call), repr(call.scaling), softcap, call.sinks_H
    )


@cache
def compiled() -> Callable[..., Tensor]:
    """`attend`, compiled once for rows of every length. Too many graphs are an error, because torch would silently fall
    back to [T, T] scores."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    return torch.compile(attend, dynamic=True, fullgraph=True)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: str, softcap: str | None, sinks_H: Tensor | None
) -> Tensor:
    """Flex attention with a soft-cap and sinks. A sink is one more logit whose value is zero, so the result is
    out * sigmoid(logsumexp - sink).

    scale, softcap: as text, which is a constant of the graph; a float would be a variable, which flex does not accept.
    """
    cap = None
    if softcap is not None:
        limit = float(softcap)

        def cap(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return torch.tanh(score / limit) * limit

    options = {
        "score_mod": cap, "block_mask": mask, "scale": float(scale), "enable_gqa": query.shape[1] != key.shape[1],
        "kernel_options": {"BACKEND": "TRITON"},  # also for rows so short that another kernel would be chosen
    }  # fmt: skip
    if sinks_H is None:
        return flex_attention(query, key, value, **options)
    out, aux = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    sink_factor = torch.sigmoid(aux.lse - sinks_H.to(aux.lse.dtype)[None, :, None])
    return (out * sink_factor[..., None]).to(out.dtype)


def _mask(call: Call) -> BlockMask:
    """The block mask of this row for this window, made once per row."""
    bounds, window, length = call.bounds, call.window, call.query_BHTD.shape[2]
    if ("mask", window) not in bounds.cache:
        token_T = torch.arange(length, dtype=torch.int32, device=call.query_BHTD.device)
        first_T, last_T = torch.zeros_like(token_T), token_T
        if not bounds.padded:
            assert bounds.cu_seqlens is not None
            document_T = torch.searchsorted(bounds.cu_seqlens[1:], token_T, right=True)
            keys = bounds.cu_seqlens if bounds.cu_keys is None else bounds.cu_keys
            first_T = keys[document_T]
            last_T = token_T + (keys - bounds.cu_seqlens)[1:][document_T]  # queries are the last of a document's keys
        if window is not None:
            first_T = torch.maximum(first_T, last_T - (window - 1))
        if bounds.last_seen is not None:
            last_T = bounds.last_seen
        bounds.cache[("mask", window)] = block_mask(first_T, last_T, call.key_BKTD.shape[2])
    mask: BlockMask = bounds.cache[("mask", window)]
    return mask


def block_mask(first_T: Tensor, last_T: Tensor, keys: int) -> BlockMask:
    """The mask that torch's create_block_mask makes for this rule, but from [N, M] tables on the device instead of
    [T, keys]."""
    length, device = len(first_T), first_T.device
    query_N, key_M = (torch.arange(-(-n // BLOCK), dtype=torch.int32, device=device) * BLOCK for n in (length, keys))
    end_N = query_N + (BLOCK - 1)  # of the last block perhaps beyond the row: it then counts as partial
    inside_N = end_N.clamp(max=length - 1)
    seen_NM = (key_M + BLOCK > first_T[query_N][:, None]) & (key_M <= last_T[inside_N][:, None])
    whole_NM = (key_M >= first_T[inside_N][:, None]) & (key_M + (BLOCK - 1) <= last_T[query_N][:, None])
    whole_NM &= (end_N < length)[:, None]

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= last_T[q]) & (kv >= first_T[q])

    return BlockMask.from_kv_blocks(
        *_listed(seen_NM & ~whole_NM), *_listed(whole_NM), BLOCK, visible, seq_lengths=(length, keys)
    )


def _listed(table_NM: Tensor) -> tuple[Tensor, Tensor]:
    """([1, 1, N] number of key blocks of each query block, [1, 1, N, M] all key blocks, with those first), int32."""
    order = table_NM.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table_NM.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
