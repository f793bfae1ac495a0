"""Attention in which a token's result depends on its own document alone, to the last bit: neither on neighbours nor on
whether earlier keys come from the same forward or from a cache.

B sequences, with T query tokens and S keys each, key s belonging to token s; H query heads, K key heads, G = H / K, D
head width, E value width, N = B K, M >= G T rows. Keys are added in blocks of 64 to sums that start at zero. A hidden
key, or a whole hidden block, adds an exact zero, so the number of hidden keys does not matter.
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

_KEYS = 64  # per block
_QUERIES = 256  # query tokens of a sequence that are computed at once
_SCORES = 2**23  # limit on B H T S of one computation


def attend_exactly(call: Call) -> Tensor:
    """Attention, [B, H, T, E]. Backward is per_document's."""
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
    """Sequences right-padded in a batch."""
    parts = _sequence_slices(*call.query_BHTD.shape[:3])
    tensors = (call.query_BHTD, call.key_BKTD, call.value_BKTE)
    return torch.cat([_causal(call, *(x[part] for x in tensors)) for part in parts])


def _packed(call: Call) -> Tensor:
    """Sequences end to end in one batch entry; sequences with equally many blocks of keys run together."""
    query_THD, key_TKD, value_TKE = (x[0].transpose(0, 1) for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE))
    out_THE = value_TKE.new_empty(*query_THD.shape[:2], value_TKE.shape[-1])
    for group in _document_indices(call.bounds, query_THD.device):
        for part in _sequence_slices(len(group.query_BT), query_THD.shape[1], group.key_BS.shape[1]):
            index, real = group.query_BT[part], group.real_BT[part]
            query = query_THD[index].transpose(1, 2)
            key, value = (x[group.key_BS[part]].transpose(1, 2) for x in (key_TKD, value_TKE))
            before = None if group.before_B is None else group.before_B[part]
            out_THE[index[real]] = _causal(call, query, key, value, before).transpose(1, 2)[real]
    return out_THE.transpose(0, 1)[None]


@dataclass(frozen=True)
class _SequenceGroup:
    """Sequences padded to one length. query_BT, key_BS: index of each token in the row, and of each key. real_BT: which
    tokens are no padding. before_B: keys before the first token; None: 0 everywhere."""

    query_BT: Tensor
    real_BT: Tensor
    key_BS: Tensor
    before_B: Tensor | None


def _document_indices(bounds: Bounds, device: torch.device) -> list[_SequenceGroup]:
    """The groups of a row, made once."""
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
    """sequences: (first token, tokens, first key, keys) of each, in the row."""
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
    """Slices of the sequences, each small enough for _SCORES."""
    step = max(1, _SCORES // (heads * min(length, _QUERIES) * length))
    return (slice(start, start + step) for start in range(0, sequences, step))


def _causal(
    call: Call, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor, before_B: Tensor | None = None
) -> Tensor:
    """Causal attention of all tokens of whole sequences, or of those after the first before_B keys."""
    length, device = query_BHTD.shape[2], query_BHTD.device
    most_before = 0 if before_B is None else int(before_B.max())
    out = []
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        position_BT = torch.arange(start, end, device=device)[None]
        if before_B is not None:
            position_BT = position_BT + before_B[:, None]
        keys, values = key_BKTD[:, :, : most_before + end], value_BKTE[:, :, : most_before + end]
        out.append(_attend(call, query_BHTD[:, :, start:end], keys, values, position_BT))
    return torch.cat(out, 2)


def _attend(call: Call, query_BHTD: Tensor, key_BKSD: Tensor, value_BKSE: Tensor, position_BT: Tensor) -> Tensor:
    """softmax(softcap(q k^T scaling), sinks) v, in fp32. position_BT: positions of the query tokens in their sequences;
    with B = 1 the same for all sequences."""
    (batch, heads, queries, _), kinds = query_BHTD.shape, key_BKSD.shape[1]
    grouped = (batch, kinds, heads // kinds, queries)  # shape of the first rows
    rows = heads // kinds * queries
    query_NMD = padded(query_BHTD.float().reshape(batch * kinds, rows, -1), 1, row_multiple())
    blocks = []
    for start in range(0, key_BKSD.shape[2], _KEYS):
        scores_NMs = torch.bmm(query_NMD, _block(key_BKSD, start).transpose(1, 2)).mul_(call.scaling)
        if call.softcap is not None:
            scores_NMs = torch.tanh(scores_NMs / call.softcap) * call.softcap
        hidden_BTs = _hidden(call, position_BT, start)
        scores_NMs[:, :rows].view(*grouped, _KEYS).masked_fill_(hidden_BTs[:, None, None], float("-inf"))
        blocks.append(scores_NMs)
    largest_NM1 = torch.stack([block.amax(-1, keepdim=True) for block in blocks]).amax(0)
    sinks = None if call.sinks_H is None else call.sinks_H.float().view(1, kinds, -1, 1, 1)
    if sinks is not None:
        row_max = largest_NM1[:, :rows].view(*grouped, 1)
        row_max.copy_(row_max.maximum(sinks))
    largest_NM1.clamp_(min=torch.finfo(torch.float32).min)  # for padding, which sees nothing
    total_NM1 = torch.zeros_like(largest_NM1)
    out_NME = query_NMD.new_zeros(*query_NMD.shape[:2], value_BKSE.shape[-1])
    for number, scores_NMs in enumerate(blocks):
        weights_NMs = scores_NMs.sub_(largest_NM1).exp_()
        total_NM1 += weights_NMs.sum(-1, keepdim=True)
        out_NME.baddbmm_(weights_NMs, _block(value_BKSE, number * _KEYS))
    if sinks is not None:
        total_NM1[:, :rows].view(*grouped, 1).add_((sinks - largest_NM1[:, :rows].view(*grouped, 1)).exp())
    out_NME /= total_NM1.clamp_(min=1.0)  # rows that see a key have a total of 1 or more
    return out_NME[:, :rows].reshape(batch, heads, queries, -1).to(value_BKSE.dtype)


def _block(x_BKSD: Tensor, start: int) -> Tensor:
    """[N, 64, D]: keys or values from `start` on, in fp32, with zeros after the last."""
    block = padded(x_BKSD[:, :, start : start + _KEYS].float(), 2, _KEYS)
    return block.reshape(-1, *block.shape[2:])


def _hidden(call: Call, position_BT: Tensor, start: int) -> Tensor:
    """[B, T, 64]: which of the keys from `start` on are later than the token, or outside its window."""
    distance_BTs = position_BT[..., None] - torch.arange(start, start + _KEYS, device=position_BT.device)
    hidden = distance_BTs < 0
    return hidden if call.window is None else hidden | (distance_BTs >= call.window)
