"""The step plan: which documents go to which row of which micro-batch on which rank.

A pure function of the documents' metadata, so every rank makes the same plan and no rank waits for a collective that
another never starts. FSDP synchronises ranks at each micro-batch, so a step takes sum over micro-batches of the
slowest rank's row; rows of like cost are put side by side.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from weft.engine.document import DocumentMeta

Layout = Literal["packed", "apart"]
Shapes = Literal["free", "buckets", "fixed"]
Bins = list[list[int]]

SHORTEST_ROW = 2  # tokens of a row without documents: enough for every layer to run
BUCKETS_PER_OCTAVE = 8


@dataclass(frozen=True)
class Totals:
    """Sums over all documents of the step; weight and loss_tokens are those of predicted tokens, cost in FLOPs."""

    documents: int
    tokens: int
    weight: float
    loss_tokens: int
    cost: float


@dataclass(frozen=True)
class StepPlan:
    """rows[k][r]: indices of the documents in micro-batch k of data rank r; empty where a rank has only padding."""

    documents: tuple[DocumentMeta, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    budget: int
    multiple: int
    layout: Layout
    shapes: Shapes

    @property
    def micro_batches(self) -> int:
        return len(self.rows)

    @property
    def ranks(self) -> int:
        return len(self.rows[0])

    def of_rank(self, rank: int) -> list[tuple[int, ...]]:
        """The rows of one data rank, in the order of micro-batches."""
        return [row[rank] for row in self.rows]

    def row_length(self, micro_batch: int, rank: int) -> int:
        """Tokens of a row with its padding; of one batch entry where documents are apart."""
        lengths = [self.documents[i].length for i in self.rows[micro_batch][rank]]
        used = max([SHORTEST_ROW, sum(lengths) if self.layout == "packed" else max(lengths, default=0)])
        if self.shapes == "fixed" and self.layout == "packed":
            return self.budget
        if self.shapes != "free":
            used = _bucket(used, self.multiple)
        ceiling = self.budget if self.layout == "packed" else self.budget // max(1, len(lengths))
        return max(_rounded(used, 1), min(_rounded(used, self.multiple), max(ceiling, used)))

    @cached_property
    def totals(self) -> Totals:
        return Totals(
            len(self.documents),
            sum(d.length for d in self.documents),
            sum(d.weight for d in self.documents),
            sum(d.loss_tokens for d in self.documents),
            sum(d.cost for d in self.documents),
        )

    @property
    def fill(self) -> float:
        """Real tokens over the budget of all rows."""
        return self.totals.tokens / (self.micro_batches * self.ranks * self.budget)

    @property
    def utilisation(self) -> float:
        """Mean over max FLOPs of the ranks, micro-batch by micro-batch: the share of time that ranks do not wait."""
        cost = _costs(self.documents)
        return sum(cost) / max(
            self.ranks * _time([list(row) for micro in self.rows for row in micro], cost, self.ranks), 1e-30
        )

    def fingerprint(self) -> str:
        """A short hash of the whole plan, for ranks to compare."""
        return hashlib.sha256(repr((self.rows, self.budget, self.documents)).encode()).hexdigest()[:16]


def plan_step(
    documents: Sequence[DocumentMeta],
    *,
    ranks: int,
    budget: int,
    multiple: int = 1,
    layout: Layout = "packed",
    shapes: Shapes = "free",
) -> StepPlan:
    """Partition documents into m x ranks rows of at most `budget` tokens, m the smallest found for which all fit.

    Rows are balanced by DocumentMeta.cost (by length where no cost is known), and each micro-batch has rows of like
    cost. A row that is apart holds documents x longest tokens. Raises ValueError for a document over the budget.
    """
    if not documents:
        raise ValueError("a step needs at least one document")
    for index, document in enumerate(documents):
        if document.length > budget:
            raise ValueError(
                f"document {index} has {document.length} tokens, more than step.max_tokens_per_device={budget}: raise "
                "that, or set data.max_length with data.long_documents=truncate or drop."
            )
    lengths, cost = [d.length for d in documents], _costs(documents)
    capacity = budget - budget % multiple or budget
    deal = _deal_packed if layout == "packed" else _deal_apart
    bins = deal(lengths, cost, ranks, capacity)
    rows = _side_by_side(bins, cost, ranks)
    return StepPlan(tuple(documents), rows, budget, multiple, layout, shapes)


def _costs(documents: Sequence[DocumentMeta]) -> list[float]:
    if any(d.cost for d in documents):
        return [d.cost for d in documents]
    return [float(d.length) for d in documents]


def _deal_packed(lengths: list[int], cost: list[float], ranks: int, capacity: int) -> Bins:
    """The fewest micro-batches for which one of three ways of packing fits, and of those that fit the quickest."""
    by_cost = sorted(range(len(lengths)), key=lambda i: (-cost[i], -lengths[i], i))
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    micro_batches = max(1, -(-sum(lengths) // (capacity * ranks)))
    while True:
        count = micro_batches * ranks
        found = [
            _least_loaded(by_cost, lengths, cost, count, capacity),
            _least_loaded(by_length, lengths, [float(n) for n in lengths], count, capacity),
        ]
        fitting = [bins for bins in found if bins is not None]
        if not fitting:
            tight = _best_fit(by_length, lengths, count, capacity)
            fitting = [] if tight is None else [tight]
        if fitting:
            return min(fitting, key=lambda bins: _time(bins, cost, ranks))
        micro_batches += 1


def _least_loaded(order: list[int], lengths: list[int], load: list[float], count: int, capacity: int) -> Bins | None:
    """Longest processing time first (Graham 1969): each document to the least loaded row that has room."""
    bins: Bins = [[] for _ in range(count)]
    room = [capacity] * count
    heap = [(0.0, place) for place in range(count)]
    for index in order:
        full = []
        while heap and room[heap[0][1]] < lengths[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        loaded, place = heapq.heappop(heap)
        bins[place].append(index)
        room[place] -= lengths[index]
        heapq.heappush(heap, (loaded + load[index], place))
        for item in full:
            heapq.heappush(heap, item)
    return bins


def _best_fit(order: list[int], lengths: list[int], count: int, capacity: int) -> Bins | None:
    """Each document, longest first, to the row where it leaves the least room."""
    bins: Bins = [[] for _ in range(count)]
    room = [capacity] * count
    for index in order:
        fitting = [place for place in range(count) if room[place] >= lengths[index]]
        if not fitting:
            return None
        place = min(fitting, key=lambda p: (room[p], p))
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def _deal_apart(lengths: list[int], cost: list[float], ranks: int, capacity: int) -> Bins:
    """Like lengths together; the lowest ceiling on a row's padded cost that needs no more micro-batches."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def rows_under(ceiling: float) -> Bins:
        bins: Bins = []
        for index in order:
            longest = bins[-1][0] if bins else index
            count = len(bins[-1]) + 1 if bins else 0
            if bins and count * lengths[longest] <= capacity and count * cost[longest] <= ceiling:
                bins[-1].append(index)
            else:
                bins.append([index])
        return bins

    fewest = -(-len(rows_under(float("inf"))) // ranks) * ranks
    low, high = 0.0, max(cost) * len(cost)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(rows_under(middle)) <= fewest else (middle, high)
    bins = rows_under(high)
    return bins + [[] for _ in range(fewest - len(bins))]


def _side_by_side(bins: Bins, cost: list[float], ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows sorted by cost and dealt to micro-batches in that order, so that the ranks of each have like cost."""
    ordered = sorted(bins, key=_row_cost(cost), reverse=True)
    return tuple(
        tuple(tuple(sorted(row)) for row in ordered[start : start + ranks]) for start in range(0, len(ordered), ranks)
    )


def _row_cost(cost: list[float]) -> Callable[[list[int]], tuple[float, list[int]]]:
    return lambda row: (sum(cost[i] for i in row), [-i for i in sorted(row)])


def _time(bins: Bins, cost: list[float], ranks: int) -> float:
    """Sum over micro-batches of the slowest rank's cost, with rows side by side."""
    costs = sorted((sum(cost[i] for i in row) for row in bins), reverse=True)
    return sum(costs[::ranks])


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _bucket(length: int, multiple: int) -> int:
    """The next of eight sizes per power of two."""
    step = max(1, (1 << (length - 1).bit_length()) // (2 * BUCKETS_PER_OCTAVE))
    return _rounded(_rounded(length, step), multiple)
