"""Dealing documents to rows: the search behind the step plan. Plain integers in, lists of document indices out.

Costs are integers, so that sums do not depend on their order and every rank finds the same rows, whatever machine
it runs on. n rows are dealt as micro-batches of `ranks` rows each; the time of a plan is the sum over micro-batches
of the largest cost in it, which, given the rows, is least when rows are sorted by cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Ints = NDArray[np.int64]

# Refinement stops here: the rest is below what an estimate of FLOPs can tell.
_GOOD_ENOUGH = 0.99
# It looks at up to so many exchanges at a time, and makes up to so many.
_MOST_GIVEN, _MOST_TAKEN, _MOST_EXCHANGES = 64, 1024, 128


def pack(tokens: Sequence[int], costs: Sequence[int], *, ranks: int, capacity: int) -> list[list[int]]:
    """m x ranks rows of at most `capacity` tokens, sorted by falling cost; m the smallest that this search finds.

    tokens, costs: of each document; no document may exceed the capacity. Rows may be empty.
    """
    count = -(-sum(tokens) // (capacity * ranks))
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], -tokens[i], i))
    by_length = sorted(range(len(costs)), key=lambda i: (-tokens[i], -costs[i], i))
    while True:
        rows = _deal_to_cheapest(by_cost, tokens, costs, count * ranks, capacity)
        rows = rows or _deal_to_fullest(by_length, tokens, count * ranks, capacity)
        if rows is not None:
            return _Refinement(rows, tokens, costs, ranks, capacity).run()
        count += 1


def _deal_to_cheapest(
    order: Sequence[int], tokens: Sequence[int], costs: Sequence[int], n: int, capacity: int
) -> list[list[int]] | None:
    """Longest processing time first (Graham 1969): each document to the row that costs least so far and has room."""
    rows: list[list[int]] = [[] for _ in range(n)]
    room = [capacity] * n
    heap = [(0, row) for row in range(n)]
    for index in order:
        full = []
        while heap and room[heap[0][1]] < tokens[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, row = heap[0]
        rows[row].append(index)
        room[row] -= tokens[index]
        heapq.heapreplace(heap, (cost + costs[index], row))
        for entry in full:
            if room[entry[1]]:
                heapq.heappush(heap, entry)
    return rows


def _deal_to_fullest(order: Sequence[int], tokens: Sequence[int], n: int, capacity: int) -> list[list[int]] | None:
    """Best fit decreasing: each document to the row with the least room that still holds it. Packs tightest."""
    rows: list[list[int]] = [[] for _ in range(n)]
    room = np.full(n, capacity, dtype=np.int64)
    for index in order:
        left = room - tokens[index]
        row = int(np.where(left >= 0, left, capacity + 1).argmin())
        if left[row] < 0:
            return None
        rows[row].append(index)
        room[row] = left[row]
    return rows


class _Refinement:
    """Local search: exchanges documents between a micro-batch's dearest row and any other while the time falls."""

    def __init__(
        self, rows: list[list[int]], tokens: Sequence[int], costs: Sequence[int], ranks: int, capacity: int
    ) -> None:
        self.rows, self.ranks, self.capacity = rows, ranks, capacity
        # One document of nothing stands for giving without taking.
        self.tokens = np.array([*tokens, 0], dtype=np.int64)
        self.costs = np.array([*costs, 0], dtype=np.int64)
        self.total = sum(costs)
        self.largest = max(costs)

    def run(self) -> list[list[int]]:
        for _ in range(_MOST_EXCHANGES):
            self._sort()
            leaders = self.row_costs[:: self.ranks]
            bound = max(self.total / self.ranks, self.largest)
            if self.ranks == 1 or bound >= _GOOD_ENOUGH * int(leaders.sum()):
                break
            if not any(self._improve(batch) for batch in range(len(leaders))):
                break
        self._sort()
        return self.rows

    def _sort(self) -> None:
        cost_of = [sum(int(self.costs[i]) for i in row) for row in self.rows]
        order = sorted(range(len(self.rows)), key=lambda r: (-cost_of[r], self.rows[r][:1]))
        self.rows = [self.rows[r] for r in order]
        self.row_costs: Ints = np.array([cost_of[r] for r in order], dtype=np.int64)
        self.row_tokens: Ints = np.array([int(self.tokens[row].sum()) for row in self.rows], dtype=np.int64)

    def _improve(self, batch: int) -> bool:
        """Makes the best exchange that lowers the cost of this micro-batch's dearest row, if one lowers the time."""
        leader = batch * self.ranks
        given = np.array(_thin(self.rows[leader], _MOST_GIVEN), dtype=np.int64)
        others = [(i, r) for r, row in enumerate(self.rows) if r != leader for i in row]
        others = _thin(others, _MOST_TAKEN) + [(-1, r) for r in range(len(self.rows)) if r != leader]
        if not len(given) or not others:
            return False
        taken, row = np.array(others, dtype=np.int64).T
        shift = self.costs[given][:, None] - self.costs[taken][None, :]
        gain = self._gain(leader, shift, row)
        moved = self.tokens[given][:, None] - self.tokens[taken][None, :]
        fits = (self.row_tokens[row] + moved <= self.capacity) & (self.row_tokens[leader] - moved <= self.capacity)
        gain[~fits] = 0
        best = int(gain.max())
        if best <= 0:
            return False
        # Of those that gain the most, the one that takes most from the dearest row.
        place = int(np.where(gain == best, shift, -1).argmax())
        give, take = divmod(place, len(taken))
        self._exchange(leader, int(row[take]), int(given[give]), int(taken[take]))
        return True

    def _gain(self, leader: int, shift: Ints, row: Ints) -> Ints:
        """[given, taken] by how much the time falls when `shift` of cost goes from the leader to `row`."""
        costs, ranks = self.row_costs, self.ranks
        second = costs[leader + 1]
        lowered = np.maximum(costs[leader] - shift, second)
        raised = costs[row] + shift
        leaders = costs[(row // ranks) * ranks]
        same = row // ranks == leader // ranks
        within = costs[leader] - np.maximum(lowered, raised)
        across = (costs[leader] - lowered) - np.maximum(raised - leaders, 0)
        return np.where(shift > 0, np.where(same, within, across), 0)

    def _exchange(self, leader: int, row: int, give: int, take: int) -> None:
        self.rows[leader].remove(give)
        self.rows[row].append(give)
        if take >= 0:
            self.rows[row].remove(take)
            self.rows[leader].append(take)


def _thin(items: list[T], most: int) -> list[T]:
    """At most `most` of them, evenly spread."""
    return items if len(items) <= most else items[:: -(-len(items) // most)]
