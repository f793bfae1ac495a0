"""The step plan: it assigns documents to ranks and micro-batches.

A pure function of the documents' metadata, so that all ranks compute the same plan without communication. A step's
documents are partitioned into m x ranks rows; micro-batch k of rank r is row (k, r). Documents that are longer than a
row may be split over the rows of one micro-batch (parallel/cp/split.py). FSDP synchronises the ranks in every
micro-batch, so the time of a step is the sum over k of the maximum over r of the cost of row (k, r). The plan keeps
that low. Documents that share a prefix are assigned together if that lowers the time (step_plan/trees.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple

from weft.config.schema import StepConfig
from weft.engine.batch.document import (
    Costs,
    Document,
    DocumentMeta,
    MeasuredDocuments,
    document_metadata,
    have_videos,
    omitted_tokens,
)
from weft.engine.batch.media import ImageRoom
from weft.engine.build import BuiltModel
from weft.engine.step_plan.packing import pack, pack_padded
from weft.engine.step_plan.trees import PlanItem, depth_first, items_of, segments_of, tree_cost, tree_tokens
from weft.errors import UserError
from weft.models.facts import position_limit, rope_is_dynamic
from weft.models.families.family import Layout
from weft.models.flops import document_flops, tower_flops
from weft.ops.attention import ADAPTERS
from weft.ops.communicator import CPAxis
from weft.ops.segments import Segments
from weft.parallel.cp.split import CPGroup, Interval, assign

Shapes = Literal["free", "buckets", "fixed"]
Pieces = tuple[tuple[tuple[tuple[Interval, ...], ...], ...], ...]  # [micro-batch][rank][document of the row]

# `buckets`: number of row lengths per octave; a length is rounded up by at most 1/8.
_BUCKETS_PER_OCTAVE = 8
# No row is shorter: models treat a single token as a decoding step.
_SHORTEST_ROW = 2
# Costs become integers of this many bits, so that sums over 2**30 documents fit 63 bits.
_COST_BITS = 32
# Trees must save at least this share of a step's tokens, because attention by segments is slightly slower.
_LEAST_SAVING = 0.05
# A plan this close to the shortest possible time is not improved by splitting trees.
_EVEN = 1.02


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all documents of a step."""

    documents: int
    tokens: int
    weight: float
    loss_tokens: int
    cost: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """rows[k][r]: indices of the documents of rank r in micro-batch k; may be empty.

    lengths[k][r]: T of that row with padding; with layout `padded`, of each document in it. costs[k][r]: estimated
    FLOPs, with padding where `padded`, in the unit of DocumentMeta.cost (tokens, if no document has a cost).
    pieces[k][r]: for each document of the row, its tokens there; empty if the step splits no document. group: shape of
    the groups of consecutive ranks that may share documents.
    """

    documents: tuple[DocumentMeta, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    costs: tuple[tuple[float, ...], ...]
    budget: int
    layout: Layout
    pieces: Pieces = ()
    group: CPGroup | None = None

    @property
    def micro_batches(self) -> int:
        return len(self.rows)

    @property
    def ranks(self) -> int:
        return len(self.rows[0])

    def rows_of_rank(self, rank: int) -> list[tuple[int, ...]]:
        """The rows of one rank, by micro-batch."""
        return [micro_batch[rank] for micro_batch in self.rows]

    def has_images(self, micro_batch: int) -> bool:
        """Whether every rank runs the vision tower in this micro-batch: if any rank has images in it. In the last
        micro-batch, the tower runs if any micro-batch of the step has images, because gradients may be reduced
        there."""
        last = micro_batch == self.micro_batches - 1
        rows = self.rows if last else (self.rows[micro_batch],)
        return any(self.documents[index].patches for ranks in rows for row in ranks for index in row)

    def row_length(self, micro_batch: int, rank: int) -> int:
        """T of a row, with padding."""
        return self.lengths[micro_batch][rank]

    def shared_documents(self, micro_batch: int, rank: int) -> list[int]:
        """Documents of which several ranks of this rank's group hold parts, ascending. Not all of them need be in this
        row."""
        if not self.pieces:
            return []
        ranks_of: dict[int, int] = {}
        for neighbour in self._neighbours(rank):
            for document in self.rows[micro_batch][neighbour]:
                ranks_of[document] = ranks_of.get(document, 0) + 1
        return sorted(document for document, ranks in ranks_of.items() if ranks > 1)

    def rows_of_uncut(self) -> dict[int, tuple[int, int]]:
        """Document -> (micro-batch, rank) of its row, for each document that is complete in one row."""
        rows: dict[int, tuple[int, int]] = {}
        for micro_batch, ranks in enumerate(self.rows):
            for rank, row in enumerate(ranks):
                cut = set(self.shared_documents(micro_batch, rank))
                rows |= {document: (micro_batch, rank) for document in row if document not in cut}
        return rows

    def shares_images(self, micro_batch: int, rank: int) -> bool:
        """Whether any rank of this rank's group shares a document with images."""
        return any(self.documents[document].patches for document in self.shared_documents(micro_batch, rank))

    def ranks_with(self, micro_batch: int, rank: int, document: int) -> list[int]:
        """The ranks of this rank's group that have a document of this micro-batch, or parts of it."""
        return [n for n in self._neighbours(rank) if document in self.rows[micro_batch][n]]

    def ranges_by_rank(self, micro_batch: int, rank: int) -> list[dict[int, tuple[Interval, ...]]]:
        """For each rank of this rank's group: document -> its tokens there, in the order of the row."""
        return [
            dict(zip(self.rows[micro_batch][n], self.pieces[micro_batch][n], strict=True))
            for n in self._neighbours(rank)
        ]

    def _neighbours(self, rank: int) -> range:
        size = self.group.ranks if self.group is not None else 1
        return range(rank // size * size, rank // size * size + size)

    @property
    def tokens_read(self) -> int:
        """Tokens that forwards read of each document, including shared tokens; see tokens_forwarded."""
        return sum(d.read for d in self.documents)

    @property
    def totals(self) -> Totals:
        return Totals(
            documents=len(self.documents),
            tokens=sum(d.length for d in self.documents),
            weight=math.fsum(d.weight for d in self.documents),
            loss_tokens=sum(d.loss_tokens for d in self.documents),
            cost=math.fsum(d.cost for d in self.documents),
        )

    def segments(self, micro_batch: int, rank: int) -> Segments | None:
        """The segments of a row of whole documents, without padding; None if its documents share no tokens. Split
        documents come first, and share none."""
        row = self.rows[micro_batch][rank]
        documents = [self.documents[index] for index in row]
        if not any(document.path for document in documents):
            return None
        cut = set(self.shared_documents(micro_batch, rank))
        return segments_of(documents, [n for n, index in enumerate(row) if index in cut])

    def row_tokens(self, micro_batch: int, rank: int) -> int:
        """Tokens that a forward of a row reads, without padding."""
        row = self.rows[micro_batch][rank]
        if not self.pieces:
            return tree_tokens(self.documents, row)
        return _Contents.of_row(dict(zip(row, self.pieces[micro_batch][rank], strict=True)), self.documents).tokens

    @property
    def tokens_forwarded(self) -> int:
        """Tokens that forwards of all rows read, without padding: fewer than the documents' tokens if documents share
        prefixes."""
        if not any(document.path for document in self.documents):
            return sum(document.read for document in self.documents)
        return sum(self.row_tokens(k, r) for k in range(self.micro_batches) for r in range(self.ranks))

    @property
    def flops(self) -> float:
        """Estimated FLOPs of the step, without padding, in the unit of DocumentMeta.cost; shared prefixes count
        once."""
        if not any(document.path for document in self.documents):
            return self.totals.cost
        return math.fsum(cost for micro_batch in self.costs for cost in micro_batch)

    @property
    def fill(self) -> float:
        """Tokens read / token budget, over all rows."""
        return self.tokens_forwarded / (self.micro_batches * self.ranks * self.budget)

    @property
    def time(self) -> float:
        """Estimated time of the step, in the unit of the costs: the sum over micro-batches of the largest row cost."""
        return math.fsum(max(micro_batch) for micro_batch in self.costs)

    @property
    def utilisation(self) -> float:
        """Mean / max FLOPs over ranks: the share of the time in which a rank computes."""
        return math.fsum(cost for micro_batch in self.costs for cost in micro_batch) / (self.ranks * self.time)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ between different plans. Cheap enough for every step.

        In every process of a Python version, numbers and tuples of numbers have the same hash; None, strings and NaN do
        not.
        """
        groups = (-1 if d.group is None else d.group for d in self.documents)
        made_of = tuple(
            (
                d.length,
                d.omitted,
                -1.0 if math.isnan(d.weight) else d.weight,
                d.loss_tokens,
                d.cost,
                d.patches,
                group,
                d.path,
            )
            for d, group in zip(self.documents, groups, strict=True)
        )
        parts = (made_of, self.rows, self.lengths, self.budget, self.layout == "packed", self.pieces)
        return f"{hash(parts) & (2**64 - 1):016x}"


def plan_step(
    documents: Sequence[DocumentMeta],
    *,
    ranks: int,
    budget: int,
    multiple: int = 1,
    layout: Layout = "packed",
    shapes: Shapes = "free",
    alone_above: int | None = None,
    ring: int = 1,
    ulysses: int = 1,
    cuts: bool = True,
    cuts_images: bool = False,
) -> StepPlan:
    """Assign a step's documents to m x ranks rows, with the smallest m for which every row fits the budget.

    ranks: number of ranks with different documents, or parts of documents. budget: the most tokens of a row, with
    padding. multiple: row lengths are multiples of it. layout: `packed` lays documents end to end; `padded` pads them
    to the row's longest (count x longest <= budget, similar lengths together). shapes: row lengths are `free`, rounded
    up to one of a few (`buckets`), or the budget (`fixed`). alone_above: longer documents get a separate packed row.
    ring, ulysses: ring x ulysses consecutive ranks share documents that are longer than a row (packed only). cuts:
    whether a larger mesh may split documents of this model, for messages. cuts_images: whether documents with images
    may be split too. Raises UserError if a document fits neither one row nor the rows of a group.
    """
    sizes = _RowSizes(budget, multiple, shapes)
    group = CPGroup(ring, ulysses, sizes.capacity) if layout == "packed" else CPGroup(1, 1, sizes.capacity)
    _check(documents, sizes, layout, group.ranks, cuts and layout == "packed", cuts_images)
    if layout == "padded":
        return _plan_padded(documents, ranks, sizes, budget)
    dealing = _Dealing(tuple(documents), ranks, sizes, group, budget, alone_above)
    if any(document.path for document in documents):
        return dealing.with_trees()
    return dealing.plan(1)


def _plan_padded(documents: Sequence[DocumentMeta], ranks: int, sizes: _RowSizes, budget: int) -> StepPlan:
    costs = _costs(documents)
    widths = [sizes.padded(d.read) for d in documents]
    padded = pack_padded(widths, _weighed(costs), ranks=ranks, capacity=sizes.capacity)
    dealt = _deal_to_ranks([sorted(row, key=lambda i: (-documents[i].read, i)) for row in padded], ranks)
    return StepPlan(
        documents=tuple(documents),
        rows=dealt,
        lengths=tuple(tuple(sizes.padded(max([documents[i].read for i in row] or [0])) for row in k) for k in dealt),
        costs=tuple(tuple(len(row) * max([costs[i] for i in row], default=0.0) for row in k) for k in dealt),
        budget=budget,
        layout="padded",
    )


def _costs(documents: Sequence[DocumentMeta]) -> list[float]:
    """The cost of each document; its tokens if none has a cost."""
    costs = [d.cost for d in documents]
    return costs if any(costs) else [float(d.read) for d in documents]


def _weighed(costs: Sequence[float]) -> list[int]:
    """Costs as integers."""
    scale = 2.0**_COST_BITS / max(costs)
    return [round(cost * scale) for cost in costs]


@dataclass(frozen=True)
class _Dealing:
    """Assigns packed documents to rows; see plan_step."""

    documents: tuple[DocumentMeta, ...]
    ranks: int
    sizes: _RowSizes
    group: CPGroup
    budget: int
    alone_above: int | None

    def with_trees(self) -> StepPlan:
        """The best plan among plans with whole trees and with trees in 2, 4, ... parts; a plan without trees if they
        save too little. A tree in one row needs the fewest tokens, but other ranks may have to wait."""
        trees = Counter(document.path[0].digest for document in self.documents if document.path)
        best, parts = self.plan(1), 2
        shortest = math.fsum(cost for micro_batch in best.costs for cost in micro_batch) / self.ranks
        while best.time > _EVEN * shortest and parts < 2 * max(trees.values()):
            finer = self.plan(parts)
            if finer.time < best.time:
                best = finer
            parts *= 2
        reads = sum(document.read for document in self.documents)
        if best.tokens_forwarded <= (1.0 - _LEAST_SAVING) * reads:
            return best
        unshared = tuple(replace(document, path=()) for document in self.documents)
        return replace(self, documents=unshared).plan(1)

    def plan(self, parts: int) -> StepPlan:
        """The plan with every tree in at least so many parts, as far as its documents allow."""
        documents, costs, capacity = self.documents, _costs(self.documents), self.sizes.capacity
        items = items_of(documents, costs, range(len(documents)), capacity, parts)
        weighed = _weighed([item.cost for item in items])
        if any(item.room > capacity for item in items):
            return self._plan_cut(items, costs, weighed)
        # Documents of equal length are neighbours, so that attention may compute them together.
        rows = self._packed(range(len(items)), items, weighed, self.ranks, capacity)
        dealt = tuple(tuple(tuple(self._ordered(row, items)) for row in k) for k in rows)
        return StepPlan(
            documents=documents,
            rows=dealt,
            lengths=tuple(tuple(self.sizes.padded(tree_tokens(documents, row)) for row in k) for k in dealt),
            costs=tuple(tuple(tree_cost(documents, costs, row) for row in k) for k in dealt),
            budget=self.budget,
            layout="packed",
        )

    def _plan_cut(self, items: Sequence[PlanItem], costs: Sequence[float], weighed: Sequence[int]) -> StepPlan:
        """A plan with documents that are longer than a row: plans rows of whole groups, then splits each over the
        group's ranks. Items without room there are assigned to all ranks as usual."""
        group, capacity = self.group, self.sizes.capacity
        rows: list[list[_Row]] = []
        remaining = list(range(len(items)))
        while any(items[n].room > capacity for n in remaining):
            packed = self._packed(remaining, items, weighed, self.ranks // group.ranks, capacity * group.ranks)
            remaining = []
            for micro_batch in packed:
                dealt = [_over_ranks(row, items, weighed, group) for row in micro_batch]
                rows.append([part for placed, _ in dealt for part in placed])
                remaining += [n for _, unplaced in dealt for n in unplaced]
        for micro_batch in self._packed(remaining, items, weighed, self.ranks, capacity) if remaining else ():
            rows.append([{n: ((0, items[n].read),) for n in row} for row in micro_batch])
        pieces = [[self._pieces(row, items) for row in k] for k in rows]
        contents = [[_Contents.of_row(row, self.documents) for row in k] for k in pieces]
        return StepPlan(
            documents=self.documents,
            rows=tuple(tuple(tuple(row) for row in k) for k in pieces),
            lengths=tuple(tuple(self.sizes.padded(row.tokens) for row in k) for k in contents),
            costs=tuple(tuple(row.cost(costs) for row in k) for k in contents),
            budget=self.budget,
            layout="packed",
            pieces=tuple(tuple(tuple(row.values()) for row in k) for k in pieces),
            group=group,
        )

    def _pieces(self, row: _Row, items: Sequence[PlanItem]) -> _Row:
        """Converts a row's `item -> tokens` to `document -> tokens`. Only items of one document are split."""
        cut = {
            items[n].documents[0]: intervals
            for n, intervals in row.items()
            if sum(stop - start for start, stop in intervals) < items[n].read
        }
        uncut = self._ordered([n for n in row if items[n].documents[0] not in cut], items)
        return cut | {i: ((0, self.documents[i].read),) for i in uncut}

    def _ordered(self, row: Sequence[int], items: Sequence[PlanItem]) -> list[int]:
        """The documents of some items, in the order of their row."""
        return depth_first(self.documents, [i for n in row for i in items[n].documents])

    def _packed(
        self, chosen: Sequence[int], items: Sequence[PlanItem], weighed: Sequence[int], ranks: int, capacity: int
    ) -> list[list[list[int]]]:
        """[k][r]: rows of this capacity with some of the items, the longest first."""
        limit = capacity if self.alone_above is None else self.alone_above
        rooms = [items[n].room if items[n].longest <= limit else capacity for n in chosen]
        rows = pack(rooms, [weighed[n] for n in chosen], ranks=ranks, capacity=capacity)
        by_length = [sorted((chosen[n] for n in row), key=lambda n: (-items[n].longest, items[n])) for row in rows]
        return [[list(row) for row in k] for k in _deal_to_ranks(by_length, ranks)]


_Row = dict[int, tuple[Interval, ...]]  # document -> its tokens there


class _Contents(NamedTuple):
    """The content of a row with parts of documents. documents: of the step. uncut: the complete documents of the row.
    cut: the row's tokens of split documents."""

    documents: Sequence[DocumentMeta]
    uncut: list[int]
    cut: dict[int, int]

    @classmethod
    def of_row(cls, row: _Row, documents: Sequence[DocumentMeta]) -> _Contents:
        counts = {index: sum(stop - start for start, stop in intervals) for index, intervals in row.items()}
        cut = {index: count for index, count in counts.items() if count < documents[index].read}
        return cls(documents, [index for index in row if index not in cut], cut)

    @property
    def tokens(self) -> int:
        """Tokens that a forward of the row reads."""
        return sum(self.cut.values()) + tree_tokens(self.documents, self.uncut)

    def cost(self, costs: Sequence[float]) -> float:
        """costs: of all documents."""
        parts = [costs[index] * count / self.documents[index].read for index, count in self.cut.items()]
        return math.fsum([*parts, tree_cost(self.documents, costs, self.uncut)])


def _over_ranks(
    row: Sequence[int], items: Sequence[PlanItem], weighed: Sequence[int], group: CPGroup
) -> tuple[list[_Row], list[int]]:
    """(row of each rank; items for which there was no room). In a row, split documents come first, ascending, then
    complete documents by length."""
    rooms = [items[n].room for n in row]
    placed, remaining = assign([items[n].read for n in row], [weighed[n] for n in row], group, rooms)
    order = sorted(
        range(len(row)), key=lambda n: (rooms[n] <= group.capacity, row[n] if rooms[n] > group.capacity else n)
    )
    return [{row[n]: tuple(part[n]) for n in order if n in part} for part in placed], [row[n] for n in remaining]


def _check(
    documents: Sequence[DocumentMeta], sizes: _RowSizes, layout: Layout, ranks: int, cuts: bool, cuts_images: bool
) -> None:
    if not documents:
        raise UserError("a step needs at least one document, got none")
    if layout == "padded" and sizes.shapes == "fixed":
        raise UserError(
            "step.padding=fixed would put every document into a separate row, because documents of this model "
            "cannot share a row. Set step.padding=buckets"
        )
    for index, document in enumerate(documents):
        if document.length < 1:
            raise UserError(f"document {index} of the step has no tokens: remove it")
        over_ranks = ranks if cuts_images else 1
        if document.patches and document.room > sizes.capacity * over_ranks:
            needed = -(-document.room // (sizes.multiple * over_ranks)) * sizes.multiple
            suffix = f" on each of {ranks} ranks of mesh.cp" if over_ranks > 1 else ", and it is not split"
            raise UserError(
                f"document {index} of the step has {document.read} tokens, and its images need as much memory as "
                f"{document.tower_tokens} more, but a row holds {sizes.capacity}{suffix}. Set "
                f"step.max_tokens_per_device={needed} or more, or make images smaller with data.image_pixels"
            )
        if document.read > sizes.capacity * ranks:
            needed = -(-document.read // (sizes.multiple * ranks)) * sizes.multiple
            over = f" on each of {ranks} ranks of mesh.cp" if ranks > 1 else ""
            wider = ", a larger mesh.cp" if cuts else ""
            never = "" if cuts else ", and documents of this model are never split"
            raise UserError(
                f"document {index} of the step has {document.read} tokens, but a row holds {sizes.capacity}{over}"
                f"{never}: set step.max_tokens_per_device={needed} or more{wider}, or data.long_documents to truncate "
                "or drop"
            )


def _deal_to_ranks(rows: list[list[int]], ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[k][r] from rows sorted by falling cost. The order of ranks is reversed in every second micro-batch, so that no
    rank always has the most expensive row: if gradients are reduced only once a step, ranks do not wait for each other
    in between."""
    micro_batches = []
    for k, start in enumerate(range(0, len(rows), ranks)):
        dealt = [tuple(row) for row in rows[start : start + ranks]]
        micro_batches.append(tuple(dealt if k % 2 == 0 else reversed(dealt)))
    return tuple(micro_batches)


class _RowSizes:
    """Row lengths that step.padding allows."""

    def __init__(self, budget: int, multiple: int, shapes: Shapes) -> None:
        self.multiple, self.shapes = multiple, shapes
        self.capacity = budget // multiple * multiple
        if self.capacity < _SHORTEST_ROW:
            needed = -(-_SHORTEST_ROW // multiple) * multiple
            raise UserError(
                f"step.max_tokens_per_device gives rows of {budget} tokens, but they must be multiples of {multiple} "
                f"and hold {_SHORTEST_ROW} or more: set it so that a row holds at least {needed}"
            )

    def padded(self, tokens: int) -> int:
        """The padded length of a row, or of a `padded` document, with this many tokens."""
        if self.shapes == "fixed":
            return self.capacity
        tokens = max(tokens, _SHORTEST_ROW)
        if self.shapes == "buckets":
            step = max(1, 2 ** ((tokens - 1).bit_length() - 1) // _BUCKETS_PER_OCTAVE)
            tokens = -(-tokens // step) * step
        return min(self.capacity, -(-tokens // self.multiple) * self.multiple)


def _reason_apart(step: StepConfig, built: BuiltModel) -> str:
    """Why documents of this model with a common prefix are forwarded separately; empty if they can share it."""
    if step.share_prefixes == "off":
        return "step.share_prefixes is off"
    if built.layout == "padded" or not built.uses_bounds:
        return "this family's documents are padded, or it uses its own attention code"
    if built.module.facts.model_type in ADAPTERS:
        return "attention of this family depends on where a document's chunks begin"
    return ""


class StepPlanner:
    """Plans the steps of one model on one mesh; available as `engine.planner`."""

    def __init__(
        self,
        step: StepConfig,
        ranks: tuple[int, int],
        built: BuiltModel,
        context: CPAxis | None,
        multiple: int,
        *,
        has_cp: bool,
        end_marked: bool = False,
        apart: str = "",
    ) -> None:
        """ranks: (this rank's index among ranks with different documents, their number). context: the ranks that share
        documents, if any. multiple: row lengths are multiples of it. end_marked: see ScoreSpec. apart: the reason why
        documents of this run cannot share prefixes; empty if they can."""
        self.step, self.layout, self.context, self.multiple = step, built.layout, context, multiple
        self._rank, self._ranks = ranks
        self._cuts = context is not None if has_cp else built.cuts_documents
        text = built.config.get_text_config()
        self._end_marked = end_marked
        self._every_token_counts = bool(built.balance)  # the balancing loss of experts counts all tokens
        self._no_images, self._no_videos = built.support.images, built.support.videos
        self._cuts_images = context is not None and built.vision is not None and built.vision.has_grids
        room = step.max_tokens_per_device // multiple * multiple * self._image_ranks
        self.image_room = ImageRoom(room, built.flops.tower_memory, self._no_images, self._image_ranks)
        self._position_limit, self._dynamic = position_limit(text), rope_is_dynamic(text)
        self.apart = apart or _reason_apart(step, built)
        ids = () if built.vision is None else (built.vision.image, built.vision.video)
        self._placeholders = tuple(token for token in ids if token is not None)
        # Cached by length, and by patches and pairs, because a step has many equal ones.
        self.costs = Costs(
            self._omitted, cache(partial(document_flops, built.flops)), cache(partial(tower_flops, built.flops))
        )

    def metadata(self, documents: Collection[Document]) -> list[DocumentMeta]:
        """The metadata of each document, with its cost in this model; measured documents are not built."""
        result = document_metadata(documents, self.costs, None if self.apart else self.shares, self._placeholders)
        if self._no_images and any(meta.patches for meta in result):
            raise UserError(f"this model cannot be trained on images: {self._no_images}.")
        if self._no_videos and have_videos(documents):
            raise UserError(f"this model cannot be trained on videos: {self._no_videos}.")
        return result

    def shares(self, length: int) -> bool:
        """Whether a document of this length may share its prefix: not if its length selects its rotary table."""
        return self._position_limit is None or length - self._omitted(length) <= self._position_limit

    def check_images(self, documents: Sequence[Document]) -> None:
        """Raises UserError, with the document, if this model, or its rows, cannot hold the images of one."""
        if not isinstance(documents, MeasuredDocuments):
            return
        columns = documents.measures()
        if self._no_videos and not self._no_images and columns.videos.any():
            source = documents.source(int(columns.videos.argmax()))
            raise UserError(f"{source}: this model cannot be trained on videos: {self._no_videos}.")
        for index in columns.patches.nonzero()[0].tolist():
            self.check_image(documents.source(index), int(columns.length[index]), int(columns.patches[index]))

    def check_image(self, source: str, length: int, patches: int) -> None:
        """Check one document that is not built yet. source: names it in messages. patches: as in Media."""
        if self._no_images:
            raise UserError(f"{source}: this model cannot be trained on images: {self._no_images}.")
        extra, per_rank = self.image_room.in_tokens(patches), self.multiple * self._image_ranks
        if length - self._omitted(length) + extra > self.image_room.tokens:
            raise UserError(
                f"{source}: has {length} tokens, and its images ({patches} patches) need as much memory as {extra} "
                f"tokens. {self._fits}. Set it to {-(-(length + extra) // per_rank) * self.multiple} or more, or make "
                "images smaller with data.image_pixels."
            )

    @property
    def _image_ranks(self) -> int:
        """The number of ranks over which a document with images may be split."""
        return self.context.size if self.context is not None and self._cuts_images else 1

    @property
    def _fits(self) -> str:
        if self._image_ranks > 1:
            return f"A document must fit step.max_tokens_per_device on each of {self._image_ranks} ranks of mesh.cp"
        return "A document with images of this model is not split, and must fit step.max_tokens_per_device"

    def _omitted(self, length: int) -> int:
        """See DocumentMeta. If a document's length selects its rotary table, the whole document is read."""
        limit = self._position_limit
        counts = self._every_token_counts or (limit is not None and length > limit)
        return omitted_tokens(length, read_all=counts and not self._end_marked)

    def plan(self, metadata: Sequence[DocumentMeta], budget: int) -> StepPlan:
        """See Engine.plan; `budget` is rounded up to the multiple."""
        context, budget = self.context, -(-budget // self.multiple) * self.multiple
        return plan_step(
            metadata,
            ranks=self._ranks,
            budget=budget,
            multiple=self.multiple,
            layout=self.layout,
            shapes=self.step.padding,
            alone_above=self._alone_above(metadata, budget),
            ring=1 if context is None else context.ring_size,
            ulysses=1 if context is None else context.ulysses_size,
            cuts=self._cuts,
            cuts_images=self._cuts_images,
        )

    def _alone_above(self, metadata: Sequence[DocumentMeta], budget: int) -> int | None:
        """The length above which a document needs a separate row and rotary table. Raises UserError for longer
        documents that would be split, or whose table keeps state."""
        limit = self._position_limit
        longest = max((meta.read for meta in metadata), default=0)
        if limit is not None and self.context is not None and longest > max(limit, budget):
            raise UserError(
                f"mesh.cp: a document of {longest} tokens would be split, but this model's rotary table beyond {limit} "
                f"tokens depends on the whole document: set step.max_tokens_per_device={longest}, or data.max_length="
                f"{limit} with data.long_documents=truncate or drop."
            )
        if limit is not None and self._dynamic and max(meta.read for meta in metadata) > limit:
            raise UserError(
                f"rope_type dynamic keeps a state from call to call beyond {limit} tokens, so longer documents have "
                f"no unique result. Set data.max_length={limit} with data.long_documents=truncate or drop."
            )
        return limit

    def local_documents(self, plan: StepPlan) -> list[int]:
        """Indices, in the step, of this rank's documents, ascending."""
        return sorted(index for row in plan.rows_of_rank(self._rank) for index in row)
