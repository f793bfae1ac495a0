"""Assigns documents to rows: the search of the step plan. It reads plain integers and returns lists of document
indices.

Costs are integers, so that sums do not depend on their order, and every rank computes the same rows on any machine. n
rows form micro-batches of `ranks` rows each; the time of a plan is the sum, over micro-batches, of the largest cost of
a row. For given rows, this time is smallest if micro-batches are formed from the rows sorted by cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Refinement stops here: smaller gains are below the error of a FLOPs estimate.
_GOOD_ENOUGH = 0.99
# The most documents to give and to receive in one try; the most tries.
_MOST_GIVEN, _MOST_TAKEN, _MOST_TRIES = 24, 256, 100


def pack(tokens: Sequence[int], costs: Sequence[int], *, ranks: int, capacity: int) -> list[list[int]]:
    """m x ranks rows of at most `capacity` tokens, sorted by falling cost; m is the smallest that this search finds.

    tokens, costs: one per document; no document may exceed the capacity. Returns document indices; rows may be empty.
    """
    count = -(-sum(tokens) // (capacity * ranks))
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], -tokens[i], i))
    by_length = sorted(range(len(costs)), key=lambda i: (-tokens[i], -costs[i], i))
    while True:
        rows = _deal_to_cheapest(by_cost, tokens, costs, count * ranks, capacity)
        rows = rows or _deal_to_fullest(by_length, tokens, count * ranks, capacity)
        if rows is not None:
            return _Refinement(rows, tokens, costs, ranks, capacity).run()
        count += 1  # this loop ends: with one row per document, all fit


def pack_padded(widths: Sequence[int], costs: Sequence[int], *, ranks: int, capacity: int) -> list[list[int]]:
    """m x ranks rows of similar documents with count x largest width <= capacity; m is the smallest possible.

    A row costs count x its most expensive document, because all documents are padded to the longest. Rows are runs of
    the documents sorted by width. Among all such partitions, the largest row cost is smallest.
    """
    order = sorted(range(len(widths)), key=lambda i: (-widths[i], -costs[i], i))
    wide = [widths[i] for i in order]
    # The largest cost of a document and all narrower documents, so that the first of a run has the run's largest cost.
    dear = list(accumulate((costs[i] for i in reversed(order)), max))[::-1]
    fewest = len(_cut(wide, dear, capacity, limit=len(order) * max(dear)))
    n = -(-fewest // ranks) * ranks
    low, high = max(dear), len(order) * max(dear)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(wide, dear, capacity, middle)) <= n:
            high = middle
        else:
            low = middle + 1
    cuts = _cut(wide, dear, capacity, low)
    rows = [sorted(order[start:stop]) for start, stop in cuts]
    cost_of = {start: (stop - start) * dear[start] for start, stop in cuts}
    ordered = sorted(range(len(rows)), key=lambda r: (-cost_of[cuts[r][0]], r))
    return [rows[r] for r in ordered] + [[] for _ in range(n - len(rows))]


def _cut(widths: Sequence[int], costs: Sequence[int], capacity: int, limit: int) -> list[tuple[int, int]]:
    """The fewest runs (start, stop) of falling widths and costs, none above the capacity or the cost limit."""
    runs, start = [], 0
    while start < len(widths):
        count = min(capacity // widths[start], limit // max(1, costs[start]), len(widths) - start)
        runs.append((start, start + count))
        start += count
    return runs


def _deal_to_cheapest(
    order: Sequence[int], tokens: Sequence[int], costs: Sequence[int], n: int, capacity: int
) -> list[list[int]] | None:
    """Longest processing time first (Graham 1969): each document to the row that costs least so far and has room."""
    rows: list[list[int]] = [[] for _ in range(n)]
    room = [capacity] * n
    heap = [(0, row) for row in range(n)]
    parked: list[tuple[int, int, int]] = []  # rows without room for the last documents, the roomiest first
    for index in order:
        while parked and -parked[0][0] >= tokens[index]:
            _, cost, row = heapq.heappop(parked)
            heapq.heappush(heap, (cost, row))
        while heap and room[heap[0][1]] < tokens[index]:
            cost, row = heapq.heappop(heap)
            heapq.heappush(parked, (-room[row], cost, row))
        if not heap:
            return None
        cost, row = heap[0]
        rows[row].append(index)
        room[row] -= tokens[index]
        heapq.heapreplace(heap, (cost + costs[index], row))
    return rows


def _deal_to_fullest(order: Sequence[int], tokens: Sequence[int], n: int, capacity: int) -> list[list[int]] | None:
    """Best fit decreasing: each document to the row with the least room that still holds it. Packs tightest."""
    rows: list[list[int]] = [[] for _ in range(n)]
    room = np.full(n, capacity, dtype=np.int64)
    for index in order:
        remaining = room - tokens[index]
        row = int(np.where(remaining >= 0, remaining, capacity + 1).argmin())
        if remaining[row] < 0:
            return None
        rows[row].append(index)
        room[row] = remaining[row]
    return rows


class _Refinement:
    """Local search: exchanges documents between a micro-batch's most expensive row and any other while the time
    decreases."""

    def __init__(
        self, rows: list[list[int]], tokens: Sequence[int], costs: Sequence[int], ranks: int, capacity: int
    ) -> None:
        self.ranks, self.capacity = ranks, capacity
        # The last entry, without tokens and cost, represents giving a document without receiving one.
        self.tokens = np.array([*tokens, 0], dtype=np.int64)
        self.costs = np.array([*costs, 0], dtype=np.int64)
        self.row_of = np.zeros(len(costs), dtype=np.int64)
        for row, indices in enumerate(rows):
            self.row_of[indices] = row
        self.row_costs, self.row_tokens = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        np.add.at(self.row_costs, self.row_of, self.costs[:-1])
        np.add.at(self.row_tokens, self.row_of, self.tokens[:-1])
        self.bound = max(sum(costs) / ranks, max(costs))

    def run(self) -> list[list[int]]:
        self._sort()
        tries = _MOST_TRIES if self.ranks > 1 else 0
        batch = failures = 0
        while tries > 0 and failures < len(self._leaders()):
            if self.bound >= _GOOD_ENOUGH * int(self._leaders().sum()):
                break
            tries -= 1
            if self._improve(batch):
                failures = 0
                self._sort()
            else:
                failures += 1
                batch = (batch + 1) % len(self._leaders())
        rows: list[list[int]] = [[] for _ in self.row_costs]
        for index, row in enumerate(self.row_of.tolist()):
            rows[row].append(index)
        return rows

    def _leaders(self) -> Ints:
        """Cost of each micro-batch: the cost of its most expensive row."""
        return self.row_costs[:: self.ranks]

    def _sort(self) -> None:
        """Numbers the rows by falling cost."""
        order = np.argsort(-self.row_costs, kind="stable")
        self.row_costs, self.row_tokens = self.row_costs[order], self.row_tokens[order]
        self.row_of = np.argsort(order, kind="stable")[self.row_of]

    def _improve(self, batch: int) -> bool:
        """Makes the best exchange that lowers the cost of this micro-batch's most expensive row, if an exchange lowers
        the time."""
        leader = batch * self.ranks
        giving = _thin(np.flatnonzero(self.row_of == leader), _MOST_GIVEN)
        taking = _thin(np.flatnonzero(self.row_of != leader), _MOST_TAKEN)
        if not len(giving):
            return False
        rows = np.arange(len(self.row_costs), dtype=np.int64)
        rows = _thin(rows[rows != leader], _MOST_TAKEN)
        row = np.concatenate([self.row_of[taking], rows])
        taking = np.concatenate([taking, np.full(len(rows), -1, dtype=np.int64)])
        shift = self.costs[giving][:, None] - self.costs[taking]
        moved = self.tokens[giving][:, None] - self.tokens[taking]
        fits = (moved <= self.capacity - self.row_tokens[row]) & (moved >= self.row_tokens[leader] - self.capacity)
        gain = np.where(fits & (shift > 0), self._gain(leader, shift, row), 0)
        best = int(gain.max())
        if best <= 0:
            return False
        # Among exchanges with the largest gain, the exchange that moves most cost away from the most expensive row.
        index = int(np.where(gain == best, shift, 0).argmax())
        give, take = divmod(index, len(taking))
        self._exchange(leader, int(row[take]), int(giving[give]), int(taking[take]))
        return True

    def _gain(self, leader: int, shift: Ints, row: Ints) -> Ints:
        """[given, received]: the decrease of the time if `shift` of cost moves from the most expensive row to `row`."""
        costs, ranks = self.row_costs, self.ranks
        fall = np.minimum(shift, costs[leader] - costs[leader + 1])
        # A row of the same micro-batch may rise to just below the leader; a row of another micro-batch may rise to that
        # one's leader.
        same_micro_batch = row // ranks == leader // ranks
        ceiling = np.where(same_micro_batch, costs[leader], costs[(row // ranks) * ranks])
        rise = shift - (ceiling - costs[row])
        return np.where(same_micro_batch, np.minimum(fall, -rise), fall - np.maximum(rise, 0))

    def _exchange(self, leader: int, row: int, give: int, take: int) -> None:
        for index, source, target in ((give, leader, row), (take, row, leader)):
            if index >= 0:
                self.row_of[index] = target
            for sums, values in ((self.row_costs, self.costs), (self.row_tokens, self.tokens)):
                sums[source] -= values[index]
                sums[target] += values[index]


def _thin(items: Ints, limit: int) -> Ints:
    """At most `limit` of the items, evenly spread."""
    return items if len(items) <= limit else items[:: -(-len(items) // limit)]
