"""Attention within documents that several ranks of mesh.cp share.

Ranks of a Ulysses group exchange heads for tokens (Jacobs et al. 2023, arXiv:2309.14509): each rank computes all tokens
of the group for its part of the heads. Members of the ring have different tokens. One all-to-all sends each member the
keys and values that its queries see, and no others. This is similar to all-gather context parallelism (Llama 3,
arXiv:2407.21783, section 3.3.2). Each softmax is then local, so windows, sinks and soft-caps need no change. Documents
that one rank holds completely are in neither exchange.

n tokens of shared documents in this rank's row, S tokens of all ranks of its Ulysses group. A Ulysses group is one
member of the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from weft.ops.attention_call import Call, ContextRow
from weft.ops.communicator import Communicator, all_to_all

AttentionFunction = Callable[[Call], Tensor]


def attend_in_context(call: Call, context: ContextRow, run: AttentionFunction) -> Tensor:
    """[1, H, T, E]: attention of a packed row that begins with parts of shared documents. Collective over mesh.cp."""
    shared_tokens = context.tokens
    results = [_shared(_token_range(call, 0, shared_tokens), context, run)]
    if context.whole_lengths:
        bounds = context.unshared_bounds(call.query_BHTD.device)
        if call.bounds.last_seen is not None:
            bounds = replace(bounds, last_seen=call.bounds.last_seen[shared_tokens:] - shared_tokens)
        results.append(run(replace(_token_range(call, shared_tokens, None), bounds=bounds)))
    return results[0] if len(results) == 1 else torch.cat(results, 2)


def _token_range(call: Call, start: int, end: int | None) -> Call:
    query, key, value = (x[:, :, start:end] for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE))
    return replace(call, query_BHTD=query, key_BKTD=key, value_BKTE=value)


def _shared(call: Call, context: ContextRow, run: AttentionFunction) -> Tensor:
    axis = context.axis
    if axis.ulysses is None:
        return ring_attention(call, context, run)
    out = ring_attention(heads_for_tokens(call, context, axis.ulysses), context, run)
    # S tokens of this rank's heads -> n tokens of all heads, [1, H, n, E].
    size, counts = context.axis.ulysses_size, context.counts()
    tokens = counts[context.axis.rank % size]
    sent = out[0].transpose(0, 1).flatten(1).index_select(0, context.order(out.device)[1])
    received = all_to_all(sent, axis.ulysses, counts, [tokens] * size).unflatten(0, (size, tokens))
    return received.unflatten(2, (-1, out.shape[3])).transpose(1, 2).flatten(0, 1)[None]


def ring_attention(call: Call, context: ContextRow, run: AttentionFunction) -> Tensor:
    """Attention of this ring member's queries to local keys and to keys of other members. Collective over the ring."""
    key, value = call.key_BKTD, call.value_BKTE
    keys = context.keys(call.window, key.device)
    if context.axis.ring is not None:
        local = torch.cat([key, value], -1)[0].transpose(0, 1)  # [S, K, D + E]
        received = all_to_all(
            local.index_select(0, keys.sent), context.axis.ring, keys.sent_counts, keys.received_counts
        )
        gathered = torch.cat([local, received]).index_select(0, keys.run).transpose(0, 1)[None]
        key, value = gathered.split([key.shape[-1], value.shape[-1]], -1)
    if not call.query_BHTD.shape[2]:  # no queries here, but the result must have a graph: backward is collective
        groups = call.query_BHTD.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, 1) + 0 * (call.query_BHTD.sum() + key.sum())
    return run(replace(call, key_BKTD=key, value_BKTE=value, bounds=keys.bounds))


# ---------------------------------------------------------------- Ulysses


def repeats(key_heads: int, query_heads: int, ranks: int) -> int:
    """How often to repeat each key head before the exchange, so that all ranks get equally many key heads, and every
    rank gets the key heads of its query heads. ranks: size of the Ulysses group."""
    fewest = ranks // gcd(key_heads, ranks)
    return fewest if query_heads % (key_heads * fewest) == 0 else query_heads // key_heads


def heads_for_tokens(call: Call, context: ContextRow, ranks: Communicator) -> Call:
    """A call with n tokens of all heads -> a call with S tokens of this rank's heads. Collective over `ranks`."""
    size, rank = context.axis.ulysses_size, context.axis.rank % context.axis.ulysses_size
    query, key, value = call.query_BHTD, call.key_BKTD, call.value_BKTE
    repeat = repeats(key.shape[1], query.shape[1], size)
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    tokens, counts = query.shape[2], context.counts()
    sent = torch.cat([_by_rank(x[0], size) for x in (query, key, value)], -1).flatten(0, 1)
    received = all_to_all(sent, ranks, [tokens] * size, counts).index_select(0, context.order(sent.device)[0])
    widths = [x.shape[1] // size * x.shape[3] for x in (query, key, value)]
    query, key, value = (
        columns.unflatten(1, (-1, x.shape[3])).transpose(0, 1)[None]
        for columns, x in zip(received.split(widths, 1), (query, key, value), strict=True)
    )
    sinks = None if call.sinks_H is None else call.sinks_H.chunk(size)[rank]
    return replace(call, query_BHTD=query, key_BKTD=key, value_BKTE=value, sinks_H=sinks)


def _by_rank(x_HTD: Tensor, size: int) -> Tensor:
    """[H, T, D] -> [ranks, T, heads of a rank x D]."""
    return x_HTD.unflatten(0, (size, -1)).transpose(1, 2).flatten(2)


def gather_documents(x_1nH: Tensor, context: ContextRow) -> Tensor:
    """[1, n, H] -> [1, S, H]: every rank of the Ulysses group gets all tokens of the group, in document order. Backward
    sums the gradients over the ranks."""
    assert context.axis.ulysses is not None
    size, tokens = context.axis.ulysses_size, x_1nH.shape[1]
    sent = x_1nH[0].repeat(size, 1)
    received = all_to_all(sent, context.axis.ulysses, [tokens] * size, context.counts())
    return received.index_select(0, context.order(received.device)[0])[None]


def sum_to_tokens(out_1SH: Tensor, context: ContextRow) -> Tensor:
    """[1, S, H] -> [1, n, H]: the sum over the Ulysses group, at this rank's tokens."""
    assert context.axis.ulysses is not None
    size, counts = context.axis.ulysses_size, context.counts()
    tokens = counts[context.axis.rank % size]
    sent = out_1SH[0].index_select(0, context.order(out_1SH.device)[1])
    return all_to_all(sent, context.axis.ulysses, counts, [tokens] * size).unflatten(0, (size, tokens)).sum(0)[None]
