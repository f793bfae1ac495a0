"""Context parallelism in the step plan: which rank of a group has which tokens of the documents that are too long for
one.

A document that fits on one rank is not cut. One that is cut goes to `n` members of the ring, in 2 n chunks of which
member i has chunks i and 2 n - 1 - i (zig-zag: causal attention costs each the same), and each member's tokens are
spread evenly over its ranks of Ulysses. Plain integers in and out, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Interval = tuple[int, int]  # tokens of a document: the first, and one behind the last

_MOST_TRIES = 24


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share a row. capacity: the most tokens of one. Rank = member of the ring x ulysses + place."""

    ring: int
    ulysses: int
    capacity: int

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses


Placed = list[dict[int, list[Interval]]]  # of each rank: document -> its tokens, rising


def place(lengths: Sequence[int], costs: Sequence[int], group: Group) -> Placed:
    """Deal the documents of one row, together at most ranks x capacity tokens, to the ranks of its group.

    Each document goes to the cheapest rank that has room, those that are cut first. Where that leaves one without room,
    more are cut, over more of the ring, and at last all are laid end to end and cut wherever a rank is full.
    """
    by_length = sorted(range(len(lengths)), key=lambda d: (-lengths[d], d))
    members = {d: _fewest(lengths[d], group) for d in by_length if lengths[d] > group.capacity}
    for _ in range(_MOST_TRIES):
        placed = _try(lengths, costs, members, group)
        if placed is not None:
            return placed
        narrow = [d for d in members if members[d] < group.ring]
        whole = [d for d in by_length if d not in members]
        if narrow:
            members[narrow[0]] += 1
        elif whole:
            members[whole[0]] = min(2, group.ring)
        else:
            break
    return _end_to_end(lengths, group)


def _fewest(length: int, group: Group) -> int:
    return min(group.ring, -(-length // (group.capacity * group.ulysses)))


def _try(lengths: Sequence[int], costs: Sequence[int], members: dict[int, int], group: Group) -> Placed | None:
    placed: Placed = [{} for _ in range(group.ranks)]
    tokens, spent = [0] * group.ranks, [0.0] * group.ranks
    for document in sorted(members, key=lambda d: (-lengths[d], d)):
        dearness = [max(spent[m * group.ulysses : (m + 1) * group.ulysses]) for m in range(group.ring)]
        chosen = sorted(sorted(range(group.ring), key=lambda m: (dearness[m], m))[: members[document]])
        for member, own in zip(chosen, zigzag(lengths[document], len(chosen)), strict=True):
            for place, intervals in enumerate(spread(own, group.ulysses)):
                rank, count = member * group.ulysses + place, _count(intervals)
                if count:
                    placed[rank][document] = intervals
                tokens[rank] += count
                spent[rank] += costs[document] * count / lengths[document]
    if max(tokens) > group.capacity:
        return None
    for document in sorted(set(range(len(lengths))) - members.keys(), key=lambda d: (-costs[d], d)):
        fitting = [r for r in range(group.ranks) if tokens[r] + lengths[document] <= group.capacity]
        if not fitting:
            return None
        rank = min(fitting, key=lambda r: (spent[r], r))
        placed[rank][document] = [(0, lengths[document])]
        tokens[rank] += lengths[document]
        spent[rank] += costs[document]
    return placed


def zigzag(length: int, members: int) -> list[list[Interval]]:
    """The tokens of each member of the ring."""
    chunks = 2 * members
    ends = [length * n // chunks for n in range(chunks + 1)]
    return [
        merged([(ends[n], ends[n + 1]), (ends[chunks - 1 - n], ends[chunks - n])] if members > 1 else [(0, length)])
        for n in range(members)
    ]


def spread(intervals: Sequence[Interval], ranks: int) -> list[list[Interval]]:
    """Even parts of these tokens, in their order."""
    total = _count(intervals)
    ends = [total * n // ranks for n in range(ranks + 1)]
    starts = list(accumulate((stop - start for start, stop in intervals), initial=0))
    parts: list[list[Interval]] = []
    for first, end in pairwise(ends):
        cut = [
            (start + max(first - at, 0), start + min(end - at, stop - start))
            for (start, stop), at in zip(intervals, starts, strict=False)
            if max(first, at) < min(end, at + stop - start)
        ]
        parts.append(cut)
    return parts


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Rising intervals, those that touch joined, those without tokens left out."""
    out: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out


def _count(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _end_to_end(lengths: Sequence[int], group: Group) -> Placed:
    placed: Placed = [{} for _ in range(group.ranks)]
    rank, room = 0, group.capacity
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                rank, room = rank + 1, group.capacity
            taken = min(room, length - start)
            placed[rank][document] = [(start, start + taken)]
            start, room = start + taken, room - taken
    return placed
