"""This rank's tokens of a row whose documents mesh.cp cuts. Labels are shifted before the cut, so that they are cut
with the tokens. M tokens of this rank, N predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.engine.batch.row import PADDING, Row
from weft.engine.step_plan.plan import StepPlan
from weft.ops.attention_call import Bounds
from weft.ops.communicator import CPAxis
from weft.ops.context import ContextRow
from weft.ops.shared_documents import SharedDocuments
from weft.parallel.cp.split import Interval


def cut_row(row: Row, plan: StepPlan, micro_batch: int, rank: int, axis: CPAxis) -> Row:
    """This rank's part of a packed row of whole documents, which was built without padding."""
    pieces = plan.pieces[micro_batch][rank]
    read = [plan.documents[index].read for index in row.documents]
    kept_M = _kept(pieces, read)
    length = plan.row_length(micro_batch, rank)
    tail = length - len(kept_M)
    chosen_N, selected_N = local_predictions(row.selected_N, kept_M, sum(read))
    lengths = [stop - start for intervals in pieces for start, stop in intervals] + ([tail] if tail else [])
    firsts = [start for intervals in pieces for start, _ in intervals] + ([0] if tail else [])
    bounds = Bounds.packed(tuple(lengths), torch.device("cpu"))
    bounds.firsts = tuple(firsts)
    if row.bounds.last_seen is not None:
        bounds.last_seen = local_last_seen(row.bounds.last_seen, kept_M, tail)
    shared = plan.shared_documents(micro_batch, rank)
    if shared:
        ranges_by_rank = plan.ranges_by_rank(micro_batch, rank)
        bounds.context = ContextRow(axis, _held(ranges_by_rank, shared), _whole(row.documents, pieces, shared, tail))
    highest = max([2, *lengths])
    return replace(
        row,
        input_ids_BT=_padded(row.input_ids_BT[:, kept_M], torch.full((tail,), PADDING)),
        position_ids_BT=_padded(row.position_ids_BT[..., kept_M], torch.arange(tail) % highest),
        bounds=bounds,
        selected_N=selected_N,
        targets_N=row.targets_N[chosen_N],
        weights_N=row.weights_N[chosen_N],
        document_N=row.document_N[chosen_N],
        token_N=row.token_N[chosen_N],
        arrays={name: values[chosen_N] for name, values in row.arrays.items()} if row.documents else row.arrays,
        owner_M=None if row.owner_M is None else torch.cat([row.owner_M[kept_M], torch.full((tail,), -1)]),
        routes=None if row.routes is None else _padded_routes(row.routes[kept_M], tail),
        real_tokens=len(kept_M),
        noise_keys_BT=None
        if row.noise_keys_BT is None
        else _padded(row.noise_keys_BT[:, kept_M], torch.zeros(tail).long()),
        noise_sizes_BT=None
        if row.noise_sizes_BT is None
        else _padded(row.noise_sizes_BT[:, kept_M], torch.zeros(tail)),
        shared=_shared_documents(row.documents, pieces, shared, axis) if shared else None,
    )


def _kept(pieces: Sequence[Sequence[Interval]], read: Sequence[int]) -> Tensor:
    """[M]: index, in the row of whole documents, of each of this rank's tokens, in the order of its row."""
    parts, offset = [], 0
    for intervals, length in zip(pieces, read, strict=True):
        parts += [torch.arange(offset + start, offset + stop) for start, stop in intervals]
        offset += length
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def local_last_seen(last_seen_T: Tensor, kept_M: Tensor, tail: int) -> Tensor:
    """Bounds.last_seen of this rank's tokens. Documents with images are whole here."""
    index_T = torch.zeros(len(last_seen_T), dtype=torch.int32)
    index_T[kept_M] = torch.arange(len(kept_M), dtype=torch.int32)
    padding = torch.arange(len(kept_M), len(kept_M) + tail, dtype=torch.int32)
    return torch.cat([index_T[last_seen_T[kept_M].long()], padding])


def local_predictions(selected_N: Tensor, kept_M: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(indices of the predictions made on this rank; their positions in this rank's row)."""
    index_T = torch.full((tokens,), -1)
    index_T[kept_M] = torch.arange(len(kept_M))
    local_N = index_T[selected_N]
    return (local_N >= 0).nonzero().flatten(), local_N[local_N >= 0]


def _padded(values: Tensor, tail: Tensor) -> Tensor:
    return torch.cat([values, tail.expand(*values.shape[:-1], -1)], -1)


def _padded_routes(routes: Tensor, tail: int) -> Tensor:
    return torch.cat([routes, routes.new_full((tail, *routes.shape[1:]), -1)])


def _held(
    by_rank: Sequence[Mapping[int, Sequence[Interval]]], shared: Sequence[int]
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    number = {document: n for n, document in enumerate(shared)}
    return tuple(
        tuple((number[d], *interval) for d, intervals in rank.items() if d in number for interval in intervals)
        for rank in by_rank
    )


def _whole(
    documents: Sequence[int], pieces: Sequence[Sequence[Interval]], shared: Sequence[int], tail: int
) -> tuple[int, ...]:
    """Lengths of the documents, and of the padding, that follow the shared ones."""
    lengths = [intervals[0][1] for d, intervals in zip(documents, pieces, strict=True) if d not in shared]
    return (*lengths, *([tail] if tail else []))


def _shared_documents(
    documents: Sequence[int], pieces: Sequence[Sequence[Interval]], shared: Sequence[int], axis: CPAxis
) -> SharedDocuments:
    """The documents that other ranks have parts of. The rank with a document's first token counts it."""
    number = {document: n for n, document in enumerate(shared)}
    places = torch.tensor([n for n, d in enumerate(documents) if d in number], dtype=torch.int64)
    slots = torch.tensor([number[d] for d in documents if d in number], dtype=torch.int64)
    counted = torch.tensor([n for n, intervals in enumerate(pieces) if intervals[0][0] == 0], dtype=torch.int64)
    return SharedDocuments(places, slots, len(shared), counted, axis.ranks)
