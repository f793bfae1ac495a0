"""The rows of one rank in a step: documents laid out for one forward, on the host while the device computes.

A loss weight passes through three functions here. `shift_labels` shifts labels and weights by one within each document,
before documents are joined. `build_row` lays the documents end to end, or pads them. `cut_row` keeps this rank's tokens
of a row whose documents mesh.cp splits. Labels are shifted before, so each label stays with the token that predicts it.

B batch, T tokens of the row, K tokens of its documents, M tokens of this rank, N predictions. Prediction i is made at
position selected_N[i] of targets_N[i], the next token of the same document; weights and arrays are the target's. If
documents share a prefix, a token of the row belongs to several documents. Each document has separate predictions, so
positions repeat. U predictions of the row are distinct.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.batch.assigned_images import assign_images
from weft.engine.batch.document import Document
from weft.engine.batch.media import joined
from weft.engine.batch.replay import RouteReplay
from weft.engine.step_plan.plan import StepPlan
from weft.launch.consistency import ReplicaChecksum
from weft.launch.simulated import is_simulated
from weft.models.embedding_noise import StepNoise
from weft.models.families.family import Layout
from weft.models.vision import Vision
from weft.ops.attention_call import Bounds, ContextRow
from weft.ops.communicator import CPAxis, FeatureExchange
from weft.ops.segments import Segments
from weft.ops.shared_documents import SharedDocuments
from weft.parallel.cp.split import Interval

# The padding token. Token 0 often has an embedding of zeros, at which a standard deviation has no gradient (gemma3n).
PADDING = 1


@dataclass(frozen=True)
class Repeats:
    """Groups equal predictions: the same token at the same position, by several documents. first_U: index of the first
    prediction of each group among the N predictions. distinct_N: index of each prediction in first_U."""

    first_U: Tensor
    distinct_N: Tensor

    @staticmethod
    def find(selected_N: Tensor, targets_N: Tensor) -> Repeats | None:
        """Group a row's predictions; None if all are distinct."""
        # One number for position and token: torch sorts pairs 20 times slower than numbers.
        vocabulary = int(targets_N.max()) + 1 if len(targets_N) else 0
        _, distinct_N = (selected_N * vocabulary + targets_N).unique(return_inverse=True)
        count = int(distinct_N.max()) + 1 if len(distinct_N) else 0
        if count == len(distinct_N):
            return None
        first_U = torch.full((count,), len(distinct_N)).scatter_reduce(
            0, distinct_N, torch.arange(len(distinct_N)), "amin"
        )
        return Repeats(first_U, distinct_N)

    def summed(self, values_N: Tensor) -> Tensor:
        """[U]: sums over equal predictions."""
        return values_N.new_zeros(len(self.first_U)).index_add(0, self.distinct_N, values_N)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Repeats:
        return Repeats(move(self.first_U), move(self.distinct_N))


@dataclass(frozen=True)
class Row:
    """Documents laid out for one forward of one rank."""

    documents: tuple[int, ...]  # their indices in the step, in order
    input_ids_BT: Tensor
    position_ids_BT: Tensor  # [3, B, T] if a document has three positions per token
    bounds: Bounds
    # Predictions: see the top of this file.
    selected_N: Tensor
    targets_N: Tensor
    weights_N: Tensor
    document_N: Tensor  # index in `documents`
    token_N: Tensor  # index of the target in its document
    arrays: dict[str, Tensor]  # of the documents, each [N]
    repeats: Repeats | None = field(default=None, kw_only=True)  # None: predictions are distinct
    # Tokens, over the flattened row.
    owner_M: Tensor | None  # index in `documents`, -1 for padding; None unless requested
    routes: Tensor | None  # [M, layers, k], -1 for none; None if no document has any
    real_tokens: int  # without padding
    shared: SharedDocuments | None = None  # documents of which other ranks hold parts
    media: Mapping[str, Tensor] | None = None  # forward arguments of images; None if no rank has images
    placeholder: bool = (
        False  # media hold a placeholder image of no document: this rank runs the tower because other ranks do
    )
    exchange: FeatureExchange | None = None  # media hold the images assigned to this rank (assigned_images.py)
    real_K: Tensor | None = None  # indices of tokens that are not padding; None if padding comes last
    noise_keys_BT: Tensor | None = None  # as in EmbeddingNoise.adding
    noise_sizes_BT: Tensor | None = None
    checksums: tuple[ReplicaChecksum, ...] = ()  # must equal those of other ranks

    def pinned(self) -> Row:
        """A copy in page-locked memory, for asynchronous copies to a device."""
        return self.moved(Tensor.pin_memory)

    def to(self, device: torch.device) -> Row:
        """The row on a device, by asynchronous copies; on the CPU, the row itself."""
        if device.type == "cpu":
            return self
        bounds = self.bounds
        if not bounds.padded:
            bounds = replace(
                Bounds.packed(bounds.lengths, device),
                firsts=self.bounds.firsts,
                context=self.bounds.context,
                segments=self.bounds.segments,
            )
        if self.bounds.last_seen is not None:
            bounds = replace(bounds, last_seen=self.bounds.last_seen.to(device, non_blocking=True))
        return replace(self.moved(lambda tensor: tensor.to(device, non_blocking=True)), bounds=bounds)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Row:
        tensors = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        arrays = {name: move(values) for name, values in self.arrays.items()}
        changed: dict[str, Any] = {**tensors, "arrays": arrays if self.documents else _no_arrays(tensors["weights_N"])}
        if self.media is not None:
            changed["media"] = {name: move(value) for name, value in self.media.items()}
        if self.exchange is not None:
            changed["exchange"] = self.exchange.moved(move)
        if self.repeats is not None:
            changed["repeats"] = self.repeats.moved(move)
        return replace(self, **changed, shared=None if self.shared is None else self.shared.moved(move))


def build_row(
    indices: Sequence[int],
    documents: Mapping[int, Document],
    *,
    read: Sequence[int],
    length: int,
    layout: Layout,
    every_token: bool,
    owners: bool = False,
    vision: Vision | None = None,
    images: bool = False,
    noise: StepNoise | None = None,
    segments: Segments | None = None,
) -> Row:
    """Lay out documents for one forward, on the host.

    read: number of tokens of each document that the forward reads: all, or all but the last. length: T with padding.
    every_token: predict all tokens, not only those with a weight. owners: fill owner_M. vision: the model's, if it
    accepts images. images: whether some rank's row of this micro-batch has images. noise: added to embeddings.
    segments: of the documents, without padding, if they share tokens. A row without documents holds padding, so that
    every rank runs the same collectives.
    """
    chosen = [documents[index] for index in indices]
    tokens_used = sum(read if segments is None else segments.lengths)
    token_index = _TokenIndex.of_documents(document_offsets(read, length, layout), read)
    if layout == "packed":
        tail = length - tokens_used
        assert tail >= 0, f"documents of {tokens_used} tokens do not fit a row of {length} tokens"
        lengths = (*(read if segments is None else segments.lengths), *([tail] if tail else []))
        shape, bounds = (1, length), Bounds.packed(lengths, torch.device("cpu"))
        if segments is not None:
            bounds.segments = segments if not tail else segments.padded(tail)
            token_index = replace(token_index, row_K=segments.document_tokens(torch.device("cpu")))
    else:
        shape = (max(1, len(chosen)), length)
        bounds = Bounds((length,) * shape[0], padded=True)
    if vision is not None and vision.both_ways and any(document.media for document in chosen):
        bounds.last_seen = _last_seen(chosen, vision, token_index, read, length)
    ids = torch.full((shape[0] * length,), PADDING)
    tokens_K = _joined([d.tokens[:count] for d, count in zip(chosen, read, strict=True)], torch.int64)
    ids[token_index.row_K] = tokens_K
    assert segments is None or torch.equal(ids[token_index.row_K], tokens_K), (
        "documents share a prefix in the plan, but their tokens differ"
    )
    owner_M = torch.full((ids.numel(),), -1)
    owner_M[token_index.row_K] = token_index.document_K
    media: dict[str, Any] = {}
    if images and vision is not None:  # a row without images runs the tower on the smallest possible one
        rows_T = token_index.row_K.split(list(read))
        numbers = with_images_of_their_own(chosen, vision, rows_T, shared=segments is not None)
        inputs = [dict(media.inputs) for media in (chosen[n].media for n in numbers) if media is not None]
        media = {"media": joined(inputs or [dict(vision.smallest)]), "placeholder": not inputs}
    return Row(
        documents=tuple(indices),
        input_ids_BT=ids.view(shape),
        position_ids_BT=build_positions(chosen, token_index, read, shape, layout),
        bounds=bounds,
        owner_M=owner_M if owners else None,
        routes=_routes(chosen, token_index, read, ids.numel()),
        real_tokens=tokens_used,
        real_K=None if layout == "packed" else token_index.row_K,
        **({} if noise is None else _noise(indices, chosen, token_index, shape, noise)),
        **media,
        **shift_labels(chosen, token_index, read, every_token, repeated=segments is not None),
    )


@dataclass(frozen=True)
class _TokenIndex:
    """For each of the K tokens of a row's documents, in order: the index of its document, its index in the document,
    and its index in the flattened row. Tensors instead of a loop, because there may be many short documents."""

    document_K: Tensor
    token_K: Tensor
    row_K: Tensor

    @staticmethod
    def of_documents(starts: Sequence[int], lengths: Sequence[int]) -> _TokenIndex:
        counts = torch.tensor(lengths, dtype=torch.int64)
        document = torch.arange(len(lengths)).repeat_interleave(counts)
        token = torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]
        return _TokenIndex(document, token, torch.tensor(starts, dtype=torch.int64)[document] + token)


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def _noise(
    indices: Sequence[int],
    documents: Sequence[Document],
    token_index: _TokenIndex,
    shape: tuple[int, int],
    noise: StepNoise,
) -> dict[str, Tensor]:
    """The noise of a row's tokens. It depends only on the lengths of whole documents, not on the other documents of the
    row."""
    keys, sizes = torch.zeros(shape).long().flatten(), torch.zeros(shape).flatten()
    if documents:
        lengths = torch.tensor([len(document) for document in documents], dtype=torch.float32)
        keys[token_index.row_K] = noise.keys(torch.tensor(indices)[token_index.document_K], token_index.token_K)
        sizes[token_index.row_K] = (noise.alpha / lengths.sqrt())[token_index.document_K]
    return {"noise_keys_BT": keys.view(shape), "noise_sizes_BT": sizes.view(shape)}


def _last_seen(
    documents: Sequence[Document], vision: Vision, token_index: _TokenIndex, read: Sequence[int], length: int
) -> Tensor:
    """Bounds.last_seen of a packed row."""
    last = torch.arange(length, dtype=torch.int32)
    for document, row_T in zip(documents, token_index.row_K.split(list(read)), strict=True):
        if document.media is not None:
            last[row_T] = row_T[vision.last_seen(document.tokens[: len(row_T)]).long()].int()
    return last


def with_images_of_their_own(
    documents: Sequence[Document], vision: Vision, rows_T: Sequence[Tensor], *, shared: bool
) -> list[int]:
    """Indices of the documents whose images are in a row, in the order of their placeholders. Of documents that share
    images, only the first is listed. rows_T: index in the row of each token that is read, by document. shared: whether
    documents share tokens."""
    by_position: dict[int, int] = {}
    for number, (document, row_T) in enumerate(zip(documents, rows_T, strict=True)):
        if document.media is not None:
            image_tokens = (
                vision.token_types(document.tokens[: len(row_T)]).nonzero().flatten() if shared else row_T[:0]
            )
            position = int(row_T[image_tokens[0]]) if len(image_tokens) else sum(map(len, rows_T)) + number
            by_position.setdefault(position, number)
    return [by_position[position] for position in sorted(by_position)]


def _routes(documents: Sequence[Document], token_index: _TokenIndex, read: Sequence[int], tokens: int) -> Tensor | None:
    shapes = [document.routes.shape[1:] for document in documents if document.routes is not None]
    if not shapes:
        return None
    routes = torch.full((tokens, *shapes[0]), -1, dtype=torch.int16)
    for row_T, document in zip(token_index.row_K.split(list(read)), documents, strict=True):
        if document.routes is not None:
            routes[row_T] = document.routes[: len(row_T)].to(torch.int16)
    return routes


def document_offsets(read: Sequence[int], length: int, layout: Layout) -> list[int]:
    """The offset of each document in the flattened row."""
    if layout == "padded":
        return [index * length for index in range(len(read))]
    return list(accumulate(read, initial=0))[:-1]


def build_positions(
    documents: Sequence[Document],
    token_index: _TokenIndex,
    read: Sequence[int],
    shape: tuple[int, int],
    layout: Layout,
) -> Tensor:
    """Positions that restart with every document; padding counts from 0 too."""
    if layout == "padded":
        positions = torch.arange(shape[1]).repeat(shape[0])
    else:
        # Padding gets no position beyond those of documents: some rotary tables depend on the row's largest position.
        highest, real_tokens = max([2, *read]), int(token_index.row_K.max()) + 1 if len(token_index.row_K) else 0
        positions = torch.cat(
            [torch.zeros(real_tokens, dtype=torch.int64), torch.arange(shape[1] - real_tokens) % highest]
        )
    positions[token_index.row_K] = token_index.token_K
    if any(document.positions is not None and document.positions.ndim == 2 for document in documents):
        positions = positions.repeat(3, 1)  # in time, height and width; equal for text
    for row_T, document in zip(token_index.row_K.split(list(read)), documents, strict=True):
        if document.positions is not None:
            positions[..., row_T] = document.positions[..., : len(row_T)]
    return positions.view(*positions.shape[:-1], *shape)


def shift_labels(
    documents: Sequence[Document], token_index: _TokenIndex, read: Sequence[int], every_token: bool, *, repeated: bool
) -> dict[str, Any]:
    """Shift labels within each document: position t predicts token t + 1, and the last position predicts nothing.

    token_index: of the tokens that a forward reads. repeated: whether documents share tokens.
    """
    counts = [len(document) for document in documents]
    targets = _TokenIndex.of_documents([0] * len(counts), counts)
    first_D = torch.tensor([0, *accumulate(read)], dtype=torch.int64)
    weights = _joined([d.weights for d in documents], torch.float32)
    predicted = targets.token_K > 0
    chosen = (predicted if every_token else predicted & (weights != 0)).nonzero().flatten()
    names = documents[0].arrays if documents else ()
    arrays = {name: torch.cat([d.arrays[name] for d in documents])[chosen] for name in names}
    document_N, token_N = targets.document_K[chosen], targets.token_K[chosen]
    selected_N = token_index.row_K[first_D[document_N] + token_N - 1]
    targets_N = _joined([d.tokens for d in documents], torch.int64)[chosen]
    return {
        "selected_N": selected_N,
        "targets_N": targets_N,
        "weights_N": weights[chosen],
        "document_N": document_N,
        "token_N": token_N,
        "arrays": arrays if documents else _no_arrays(weights),
        "repeats": Repeats.find(selected_N, targets_N) if repeated else None,
    }


def _no_arrays(like: Tensor) -> dict[str, Tensor]:
    """The arrays of a row without documents. Losses read arrays by name, and this rank does not know the names."""
    return defaultdict(lambda: torch.zeros(0, device=like.device))


# ---------------------------------------------------------------- rows of cut documents


def cut_row(row: Row, plan: StepPlan, micro_batch: int, rank: int, axis: CPAxis) -> Row:
    """This rank's part of a packed row of whole documents, which was built without padding."""
    pieces = plan.pieces[micro_batch][rank]
    shared = plan.shared_documents(micro_batch, rank)
    cut = [intervals for index, intervals in zip(row.documents, pieces, strict=True) if index in shared]
    reads = [plan.documents[index].read for index in row.documents]
    # Cut documents come first in a row; whole documents and the padding follow.
    ranges_of_row = [
        torch.arange(offset + start, offset + stop)
        for intervals, offset in zip(cut, accumulate(reads, initial=0), strict=False)
        for start, stop in intervals
    ]
    uncut = torch.arange(sum(reads[: len(cut)]), row.real_tokens)
    # [M]: for each of this rank's tokens, in the order of its row, the index in the row of whole documents.
    indices_M = torch.cat([*ranges_of_row, uncut])
    length = plan.row_length(micro_batch, rank)
    padding = length - len(indices_M)
    chosen_N, selected_N = local_predictions(row.selected_N, indices_M, row.real_tokens)
    intervals_here = [interval for intervals in cut for interval in intervals]
    tail = [padding] if padding else []
    whole_lengths = [*(row.bounds.segments or row.bounds).lengths[len(cut) :], *tail]
    lengths = [stop - start for start, stop in intervals_here] + whole_lengths
    bounds = Bounds.packed(tuple(lengths), torch.device("cpu"))
    before = [0] * len(whole_lengths)
    if row.bounds.segments is not None:
        before[: len(before) - len(tail)] = row.bounds.segments.before[len(cut) :]
    bounds.firsts = (*(start for start, _ in intervals_here), *before)
    if row.bounds.segments is not None:
        bounds.segments = row.bounds.segments.after(len(cut)).padded(padding).behind([len(i) for i in cut], lengths)
    if row.bounds.last_seen is not None:
        bounds.last_seen = local_last_seen(row.bounds.last_seen, indices_M, padding)
    if shared:
        slot = {document: n for n, document in enumerate(shared)}
        ranges = tuple(
            tuple((slot[d], *interval) for d, intervals in documents.items() if d in slot for interval in intervals)
            for documents in plan.ranges_by_rank(micro_batch, rank)
        )
        segments = bounds.segments
        whole_segments = None if segments is None else segments.after(len(intervals_here))
        bounds.context = ContextRow(axis, ranges, tuple(whole_lengths), whole_segments)
    routes = row.routes
    if routes is not None:
        routes = torch.cat([routes[indices_M], routes.new_full((padding, *routes.shape[1:]), -1)])
    highest = max([2, *lengths])
    return replace(
        row,
        input_ids_BT=_padded(row.input_ids_BT[:, indices_M], torch.full((padding,), PADDING)),
        position_ids_BT=_padded(row.position_ids_BT[..., indices_M], torch.arange(padding) % highest),
        bounds=bounds,
        selected_N=selected_N,
        targets_N=row.targets_N[chosen_N],
        weights_N=row.weights_N[chosen_N],
        document_N=row.document_N[chosen_N],
        token_N=row.token_N[chosen_N],
        arrays={name: values[chosen_N] for name, values in row.arrays.items()} if row.documents else row.arrays,
        owner_M=None if row.owner_M is None else torch.cat([row.owner_M[indices_M], torch.full((padding,), -1)]),
        routes=routes,
        real_tokens=len(indices_M),
        noise_keys_BT=None
        if row.noise_keys_BT is None
        else _padded(row.noise_keys_BT[:, indices_M], torch.zeros(padding).long()),
        noise_sizes_BT=None
        if row.noise_sizes_BT is None
        else _padded(row.noise_sizes_BT[:, indices_M], torch.zeros(padding)),
        shared=_shared_documents(row.documents, pieces, shared, axis) if shared else None,
        repeats=Repeats.find(selected_N, row.targets_N[chosen_N]) if row.repeats is not None else None,
    )


def local_last_seen(last_seen_T: Tensor, kept_M: Tensor, tail: int) -> Tensor:
    """Bounds.last_seen of this rank's tokens. Documents with images are never split here."""
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


def _shared_documents(
    documents: Sequence[int], pieces: Sequence[Sequence[Interval]], shared: Sequence[int], axis: CPAxis
) -> SharedDocuments:
    """The documents of which other ranks hold parts. The rank with a document's first token counts it."""
    shared_index = {document: n for n, document in enumerate(shared)}
    row_indices = torch.tensor([n for n, d in enumerate(documents) if d in shared_index], dtype=torch.int64)
    shared_indices = torch.tensor([shared_index[d] for d in documents if d in shared_index], dtype=torch.int64)
    counted_indices = torch.tensor([n for n, intervals in enumerate(pieces) if intervals[0][0] == 0], dtype=torch.int64)
    return SharedDocuments(row_indices, shared_indices, len(shared), counted_indices, axis.ranks)


# ---------------------------------------------------------------- documents that ranks share


def document_checksums(
    row: Row,
    plan: StepPlan,
    documents: Mapping[int, Document],
    micro_batch: int,
    rank: int,
    replica: tuple[int, int],
) -> tuple[ReplicaChecksum, ...]:
    """Checksums of the documents that a row shares with other ranks. row: with whole documents. rank: this rank's index
    among the ranks with different documents. replica: (its index among the ranks with the same documents, their
    number)."""
    checksums = []
    if replica[1] > 1:
        number = _crc([row.input_ids_BT, row.targets_N, row.weights_N, row.position_ids_BT, *row.arrays.values()])
        sources = ", ".join(documents[i].source or str(i) for i in row.documents[:8])
        name = f"micro-batch {micro_batch + 1} of data rank {rank}, documents {sources}"
        checksums.append(ReplicaChecksum(name, number, *replica))
    for index in plan.shared_documents(micro_batch, rank):
        if index in row.documents:
            document, ranks = documents[index], plan.ranks_with(micro_batch, rank, index)
            number = _crc([document.tokens, document.weights, *document.arrays.values()])
            checksums.append(
                ReplicaChecksum(f"document {document.source or index}", number, ranks.index(rank), len(ranks))
            )
    return tuple(checksums)


def _crc(tensors: Iterable[Tensor]) -> int:
    number = 0
    for tensor in () if is_simulated() else tensors:
        number = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), number)
    return number & 0xFFFFFF


# ---------------------------------------------------------------- the rows of a step


@dataclass(frozen=True)
class StepRows:
    """Rows by micro-batch, each built on access. sources: the documents' sources by micro-batch, for messages. noisy:
    whether noise is added to embeddings."""

    sources: list[list[str]]
    build: Callable[[int], Row]
    noisy: bool = False

    def __getitem__(self, micro_batch: int) -> Row:
        return self.build(micro_batch)

    def ahead(self) -> StepRows:
        """The same rows, built now. If building a row fails, access to the row raises the error."""
        futures: list[Future[Row]] = [Future() for _ in self.sources]
        for micro_batch, row in enumerate(futures):
            try:
                row.set_result(self.build(micro_batch))
            except Exception as error:
                row.set_exception(error)
        return replace(self, build=lambda micro_batch: futures[micro_batch].result())


@dataclass(frozen=True)
class RowBuilder:
    """Builds rows. rank: this rank's index among the ranks with different documents. replica: (its index among the
    ranks with the same documents, their number). context: the ranks that share documents, if any. owners: fill
    Row.owner_M. pinned: build rows in page-locked memory. vision, base: of the model; vision is None if it accepts no
    images."""

    rank: int
    replica: tuple[int, int]
    context: CPAxis | None
    layout: Layout
    owners: bool
    pinned: bool
    replay: RouteReplay
    vision: Vision | None
    base: nn.Module

    def rows(
        self,
        plan: StepPlan,
        documents: Mapping[int, Document],
        every_token: bool,
        routed: bool,
        noise: StepNoise | None = None,
    ) -> StepRows:
        """The rows of a plan. documents: at least this rank's, by index in the step. every_token, noise: see build_row.
        routed: keep and check the documents' routes."""
        sources = [[documents[i].source or str(i) for i in row] for row in plan.rows_of_rank(self.rank)]
        return StepRows(sources, partial(self._build, plan, documents, every_token, routed, noise), noise is not None)

    def _build(
        self,
        plan: StepPlan,
        documents: Mapping[int, Document],
        every_token: bool,
        routed: bool,
        noise: StepNoise | None,
        micro_batch: int,
    ) -> Row:
        indices = plan.rows[micro_batch][self.rank]
        for index in indices if routed else ():
            self.replay.check(documents[index])
        documents = {index: self._placed(documents[index]) for index in indices}
        read = [plan.documents[index].read for index in indices]
        segments = plan.segments(micro_batch, self.rank)
        tokens = sum(read if segments is None else segments.lengths)
        length = tokens if plan.pieces else plan.row_length(micro_batch, self.rank)
        row = build_row(
            indices, documents, read=read, length=length, layout=self.layout, every_token=every_token,
            owners=self.owners, vision=self.vision, images=plan.has_images(micro_batch),
            noise=noise, segments=segments,
        )  # fmt: skip
        row = replace(row, checksums=document_checksums(row, plan, documents, micro_batch, self.rank, self.replica))
        if plan.pieces:
            assert self.context is not None
            row = cut_row(row, plan, micro_batch, self.rank, self.context)
            if self.vision is not None and plan.shares_images(micro_batch, self.rank):
                if segments is not None:
                    rows_T = segments.document_tokens(torch.device("cpu")).split(read)
                    chosen = [documents[index] for index in indices]
                    indices = tuple(
                        indices[n] for n in with_images_of_their_own(chosen, self.vision, rows_T, shared=True)
                    )
                row = replace(
                    row,
                    **assign_images(indices, documents, plan, micro_batch, self.rank, self.context, self.vision),
                )
        row = row if routed else replace(row, routes=None)
        return row.pinned() if self.pinned else row

    def _placed(self, document: Document) -> Document:
        """The document with the positions that follow from its images."""
        if document.media is None:
            return document
        assert self.vision is not None, "the planner refuses images of other models"
        positions = self.vision.positions(self.base, document.tokens, document.media.inputs)
        return document if positions is None else replace(document, positions=positions)
