"""Flex attention over packed documents (CUDA, compiled): windows, soft-caps and sinks in one kernel.

B batch, H query heads, T tokens of a row, E value width, N blocks of 128 tokens. Token q sees the keys first_T[q] .. q,
from the start of its document or its window, whichever is later. first_T never falls, so the keys of a block of queries
are one range of blocks, given by the block's first and last query.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch._dynamo.config
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from weft.ops.attention_call import Call

BLOCK = 128  # what the tiles of all of flex's kernels divide
# Kinds of calls (heads, widths, dtype, soft-cap, sinks, with gradients or without) in a process; torch's limit is 8.
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
    """A sink is one more logit whose value is zero: out * sigmoid(logsumexp - sink).

    scale, softcap: text, which is a constant of the graph; a float would be a variable, which flex does not accept.
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
    out, more = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    seen = torch.sigmoid(more.lse - sinks_H.to(more.lse.dtype)[None, :, None])
    return (out * seen[..., None]).to(out.dtype)


def _mask(call: Call) -> BlockMask:
    """The block mask of this row for this window, made once per row."""
    bounds, window, length = call.bounds, call.window, call.query_BHTD.shape[2]
    if ("mask", window) not in bounds.cache:
        token_T = torch.arange(length, dtype=torch.int32, device=call.query_BHTD.device)
        first_T = torch.zeros_like(token_T)
        if not bounds.padded:
            assert bounds.cu_seqlens is not None
            first_T = bounds.cu_seqlens[torch.searchsorted(bounds.cu_seqlens[1:], token_T, right=True)]
        if window is not None:
            first_T = torch.maximum(first_T, token_T - (window - 1))
        bounds.cache[("mask", window)] = block_mask(first_T)
    found: BlockMask = bounds.cache[("mask", window)]
    return found


def block_mask(first_T: Tensor) -> BlockMask:
    """The mask of torch's create_block_mask for this rule, from [N, N] tables on the device, without [T, T]."""
    length = len(first_T)
    block_N = torch.arange(-(-length // BLOCK), dtype=torch.int32, device=first_T.device)
    last_N = block_N * BLOCK + (BLOCK - 1)  # queries; of the last block perhaps beyond the row, where none is whole
    seen_NN = (block_N >= first_T[block_N * BLOCK][:, None] // BLOCK) & (block_N <= block_N[:, None])
    whole_NN = (block_N * BLOCK >= first_T[last_N.clamp(max=length - 1)][:, None]) & (block_N < block_N[:, None])
    whole_NN &= (last_N < length)[:, None]

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (kv >= first_T[q])

    return BlockMask.from_kv_blocks(
        *_listed(seen_NN & ~whole_NN), *_listed(whole_NN), BLOCK, visible, seq_lengths=(length, length)
    )


def _listed(table_NN: Tensor) -> tuple[Tensor, Tensor]:
    """([1, 1, N] how many key blocks each query block has, [1, 1, N, N] which, these first), int32."""
    order = table_NN.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table_NN.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
