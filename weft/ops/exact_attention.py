"""Attention in which the result of a token bitwise depends on its document only. It does not depend on neighbours, or
on whether earlier keys come from the same forward or from a cache.

B sequences with T query tokens and S keys each; key s belongs to token s. H query heads, K key heads, G = H / K, D head
width, E value width, N = B K, M >= G T rows. s keys of a block.

Keys are added in blocks of 64 to sums that start at zero. A hidden key adds exactly zero, so the number of hidden keys
does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.ops.attention_call import Bounds, Call
from weft.ops.exact import padded, row_multiple
from weft.ops.per_document import per_document

_KEYS = 64  # keys of a block
_QUERIES = 256  # query tokens of a sequence that are computed together
_SCORES = 2**23  # most scores (B H T S) of one computation


def attend_exactly(call: Call) -> Tensor:
    """Attention of a call, [B, H, T, E]. The backward is that of per_document."""
    if call.bounds.past is not None:
        return _attend(call, call.query_BHTD, call.key_BKTD, call.value_BKTE, call.bounds.past[:, None])
    out: Tensor = _Documents.apply(call.query_BHTD, call.key_BKTD, call.value_BKTE, call.sinks_H, call)
    return out


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.arguments = {"bounds": call.bounds, "scaling": call.scaling, "window": call.window, "softcap": call.softcap}
        return _padded(call) if call.bounds.padded else _packed(call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad = ctx.needs_input_grad[:4]
        with torch.enable_grad():
            inputs = [
                x if x is None else x.detach().requires_grad_(needs)
                for x, needs in zip(ctx.saved_tensors, needs_grad, strict=True)
            ]
            query, key, value, sinks = inputs
            out = per_document(Call(query, key, value, sinks_H=sinks, **ctx.arguments))
        differentiated = [x for x, needs in zip(inputs, needs_grad, strict=True) if needs]
        gradients = iter(torch.autograd.grad(out, differentiated, grad))
        return *(next(gradients) if needs else None for needs in needs_grad), None


def _padded(call: Call) -> Tensor:
    """Attention of sequences that are right-padded in a batch."""
    slices = _sequence_slices(*call.query_BHTD.shape[:3])
    tensors = (call.query_BHTD, call.key_BKTD, call.value_BKTE)
    return torch.cat([_causal(call, *(x[sequences] for x in tensors)) for sequences in slices])


def _packed(call: Call) -> Tensor:
    """Attention of sequences end to end in one batch entry. Sequences with equal numbers of blocks run together."""
    query_THD, key_TKD, value_TKE = (x[0].transpose(0, 1) for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE))
    out_THE = value_TKE.new_empty(*query_THD.shape[:2], value_TKE.shape[-1])
    for group in _document_indices(call.bounds, query_THD.device):
        for sequences in _sequence_slices(len(group.query_BT), query_THD.shape[1], group.key_BS.shape[1]):
            index, real = group.query_BT[sequences], group.real_BT[sequences]
            query = query_THD[index].transpose(1, 2)
            key, value = (x[group.key_BS[sequences]].transpose(1, 2) for x in (key_TKD, value_TKE))
            earlier_keys = None if group.earlier_keys_B is None else group.earlier_keys_B[sequences]
            out_THE[index[real]] = _causal(call, query, key, value, earlier_keys).transpose(1, 2)[real]
    return out_THE.transpose(0, 1)[None]


@dataclass(frozen=True)
class _SequenceGroup:
    """Sequences padded to one length. query_BT, key_BS: index in the row of each query token and of each key. real_BT:
    whether a token is not padding. earlier_keys_B: number of keys before the first query token; None if 0 for all."""

    query_BT: Tensor
    real_BT: Tensor
    key_BS: Tensor
    earlier_keys_B: Tensor | None


def _document_indices(bounds: Bounds, device: torch.device) -> list[_SequenceGroup]:
    """The groups of a row's documents, computed once per row."""
    if "exact" not in bounds.cache:
        key_lengths = bounds.key_lengths or bounds.lengths
        starts, key_starts = (accumulate(lengths, initial=0) for lengths in (bounds.lengths, key_lengths))
        by_blocks: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for spans in zip(starts, bounds.lengths, key_starts, key_lengths, strict=False):
            by_blocks.setdefault((-(-spans[3] // _KEYS), -(-spans[1] // _KEYS)), []).append(spans)
        bounds.cache["exact"] = [_group_indices(group, device) for group in by_blocks.values()]
    groups: list[_SequenceGroup] = bounds.cache["exact"]
    return groups


def _group_indices(sequences: list[tuple[int, int, int, int]], device: torch.device) -> _SequenceGroup:
    """The padded indices of a group. sequences: (first token, number of tokens, first key, number of keys) of each, as
    indices in the row."""
    start_B1, length_B1, key_start_B1, keys_B1 = torch.tensor(sequences, device=device).T[..., None]
    token_T, key_S = (torch.arange(int(x.max()), device=device) for x in (length_B1, keys_B1))
    equal = all(tokens == keys for _, tokens, _, keys in sequences)
    return _SequenceGroup(
        start_B1 + token_T.minimum(length_B1 - 1),
        token_T < length_B1,
        key_start_B1 + key_S.minimum(keys_B1 - 1),
        None if equal else (keys_B1 - length_B1)[:, 0],
    )


def _sequence_slices(sequences: int, heads: int, length: int) -> Iterator[slice]:
    """Slices of the sequences. Each has at most about _SCORES scores. length: number of keys of a sequence."""
    step = max(1, _SCORES // (heads * min(length, _QUERIES) * length))
    return (slice(start, start + step) for start in range(0, sequences, step))


def _causal(
    call: Call, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor, earlier_keys_B: Tensor | None = None
) -> Tensor:
    """Causal attention, [B, H, T, E]. earlier_keys_B: number of keys before each sequence's first query token; None if
    0."""
    length, device = query_BHTD.shape[2], query_BHTD.device
    most_earlier = 0 if earlier_keys_B is None else int(earlier_keys_B.max())
    out = []
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        position_BT = torch.arange(start, end, device=device)[None]
        if earlier_keys_B is not None:
            position_BT = position_BT + earlier_keys_B[:, None]
        keys, values = key_BKTD[:, :, : most_earlier + end], value_BKTE[:, :, : most_earlier + end]
        out.append(_attend(call, query_BHTD[:, :, start:end], keys, values, position_BT))
    return torch.cat(out, 2)


def _attend(call: Call, query_BHTD: Tensor, key_BKSD: Tensor, value_BKSE: Tensor, position_BT: Tensor) -> Tensor:
    """softmax(softcap(q k^T scaling), sinks) v, computed in fp32: [B, H, T, E] in the dtype of the values. position_BT:
    positions of the query tokens in their sequences, or [1, T] if they are equal for all sequences."""
    (batch, heads, queries, _), key_heads = query_BHTD.shape, key_BKSD.shape[1]
    grouped = (batch, key_heads, heads // key_heads, queries)  # shape of the rows before the padding
    rows = heads // key_heads * queries
    query_NMD = padded(query_BHTD.float().reshape(batch * key_heads, rows, -1), 1, row_multiple())
    blocks = []
    for start in range(0, key_BKSD.shape[2], _KEYS):
        scores_NMs = torch.bmm(query_NMD, _block(key_BKSD, start).transpose(1, 2)).mul_(call.scaling)
        if call.softcap is not None:
            scores_NMs = torch.tanh(scores_NMs / call.softcap) * call.softcap
        hidden_BTs = _hidden(call, position_BT, start)
        scores_NMs[:, :rows].view(*grouped, _KEYS).masked_fill_(hidden_BTs[:, None, None], float("-inf"))
        blocks.append(scores_NMs)
    largest_NM1 = torch.stack([block.amax(-1, keepdim=True) for block in blocks]).amax(0)
    sinks = None if call.sinks_H is None else call.sinks_H.float().view(1, key_heads, -1, 1, 1)
    if sinks is not None:
        row_max = largest_NM1[:, :rows].view(*grouped, 1)
        row_max.copy_(row_max.maximum(sinks))
    largest_NM1.clamp_(min=torch.finfo(torch.float32).min)  # padding sees no key: -inf - -inf would be NaN
    total_NM1 = torch.zeros_like(largest_NM1)
    out_NME = query_NMD.new_zeros(*query_NMD.shape[:2], value_BKSE.shape[-1])
    for number, scores_NMs in enumerate(blocks):
        weights_NMs = scores_NMs.sub_(largest_NM1).exp_()
        total_NM1 += weights_NMs.sum(-1, keepdim=True)
        out_NME.baddbmm_(weights_NMs, _block(value_BKSE, number * _KEYS))
    if sinks is not None:
        total_NM1[:, :rows].view(*grouped, 1).add_((sinks - largest_NM1[:, :rows].view(*grouped, 1)).exp())
    out_NME /= total_NM1.clamp_(min=1.0)  # the total of a row that sees a key is at least 1; of padding it is 0
    return out_NME[:, :rows].reshape(batch, heads, queries, -1).to(value_BKSE.dtype)


def _block(x_BKSD: Tensor, start: int) -> Tensor:
    """[N, 64, D]: the block of keys or values from `start` on, in fp32, with zeros after the last key."""
    block = padded(x_BKSD[:, :, start : start + _KEYS].float(), 2, _KEYS)
    return block.reshape(-1, *block.shape[2:])


def _hidden(call: Call, position_BT: Tensor, start: int) -> Tensor:
    """[B, T, 64]: whether each of the keys from `start` on is later than the query token, or outside its window."""
    distance_BTs = position_BT[..., None] - torch.arange(start, start + _KEYS, device=position_BT.device)
    hidden = distance_BTs < 0
    return hidden if call.window is None else hidden | (distance_BTs >= call.window)
