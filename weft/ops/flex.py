"""Flex attention over packed documents (CUDA, compiled): windows, soft-caps and sinks in one kernel.

B batch, H query heads, T tokens of a row, E value width, N blocks of 128 queries, M blocks of 128 keys.

Token q sees the keys first_T[q] .. last_T[q]. The first key is the start of its document or of its window, whichever is
later. The last key is the token itself, or the end of its image. Both bounds never decrease along the row, so a block
of queries sees one range of key blocks. The bounds of the block's first and last query define this range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch._dynamo.config
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from weft.ops.attention_call import Call

BLOCK = 128  # a multiple of the tile sizes of all flex kernels
# Most compiled graphs in a process. A graph is compiled for each combination of heads, widths, dtype, soft-cap, sinks
# and gradients; torch's default limit is 8.
_GRAPHS = 64


def flex_documents(call: Call) -> Tensor:
    """Attention of a call, [B, H, T, E]."""
    softcap = None if call.softcap is None else repr(call.softcap)
    return compiled()(
        call.query_BHTD, call.key_BKTD, call.value_BKTE, _mask(call), repr(call.scaling), softcap, call.sinks_H
    )


@cache
def compiled() -> Callable[..., Tensor]:
    """`attend`, compiled for rows of any length. With fullgraph=True, exceeding the limit of graphs is an error.
    Without it torch would silently compute [T, T] scores."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    return torch.compile(attend, dynamic=True, fullgraph=True)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: str, softcap: str | None, sinks_H: Tensor | None
) -> Tensor:
    """Flex attention with a soft-cap and sinks, [B, H, T, E].

    A sink is an additional logit with a zero value vector, so the result is out * sigmoid(logsumexp - sink). scale,
    softcap: as text, because strings are constants of a compiled graph. A float would become a variable of the graph,
    and flex_attention does not accept variables there.
    """
    cap = None
    if softcap is not None:
        limit = float(softcap)

        def cap(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return torch.tanh(score / limit) * limit

    options = {
        "score_mod": cap, "block_mask": mask, "scale": float(scale), "enable_gqa": query.shape[1] != key.shape[1],
        "kernel_options": {"BACKEND": "TRITON"},  # otherwise torch selects another kernel for short rows
    }  # fmt: skip
    if sinks_H is None:
        return flex_attention(query, key, value, **options)
    out, aux = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    sink_factor = torch.sigmoid(aux.lse - sinks_H.to(aux.lse.dtype)[None, :, None])
    return (out * sink_factor[..., None]).to(out.dtype)


def _mask(call: Call) -> BlockMask:
    """The block mask of this row for this window, computed once per row."""
    bounds, window, length = call.bounds, call.window, call.query_BHTD.shape[2]
    if ("mask", window) not in bounds.cache:
        token_T = torch.arange(length, dtype=torch.int32, device=call.query_BHTD.device)
        first_T, last_T = torch.zeros_like(token_T), token_T
        if not bounds.padded:
            assert bounds.cu_seqlens is not None
            document_T = torch.searchsorted(bounds.cu_seqlens[1:], token_T, right=True)
            keys = bounds.cu_seqlens if bounds.cu_keys is None else bounds.cu_keys
            first_T = keys[document_T]
            last_T = token_T + (keys - bounds.cu_seqlens)[1:][document_T]  # queries are the last tokens of a document
        if window is not None:
            first_T = torch.maximum(first_T, last_T - (window - 1))
        if bounds.last_seen is not None:
            last_T = bounds.last_seen
        bounds.cache[("mask", window)] = block_mask(first_T, last_T, call.key_BKTD.shape[2])
    mask: BlockMask = bounds.cache[("mask", window)]
    return mask


def block_mask(first_T: Tensor, last_T: Tensor, keys: int) -> BlockMask:
    """The mask in which token q sees the keys first_T[q] .. last_T[q]. keys: number of keys.

    Equal to torch's create_block_mask for this rule, which would compute a [T, keys] table. This computes [N, M]
    tables."""
    length, device = len(first_T), first_T.device
    query_N, key_M = (torch.arange(-(-n // BLOCK), dtype=torch.int32, device=device) * BLOCK for n in (length, keys))
    end_N = query_N + (BLOCK - 1)  # last query of each block; may be beyond the row, and the block is then partial
    inside_N = end_N.clamp(max=length - 1)
    visible_NM = (key_M + BLOCK > first_T[query_N][:, None]) & (key_M <= last_T[inside_N][:, None])
    full_NM = (key_M >= first_T[inside_N][:, None]) & (key_M + (BLOCK - 1) <= last_T[query_N][:, None])
    full_NM &= (end_N < length)[:, None]

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= last_T[q]) & (kv >= first_T[q])

    return BlockMask.from_kv_blocks(
        *_listed(visible_NM & ~full_NM), *_listed(full_NM), BLOCK, visible, seq_lengths=(length, keys)
    )


def _listed(table_NM: Tensor) -> tuple[Tensor, Tensor]:
    """The format of BlockMask, int32: ([1, 1, N] number of key blocks of each query block, [1, 1, N, M] indices of all
    key blocks, starting with these)."""
    order = table_NM.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table_NM.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
