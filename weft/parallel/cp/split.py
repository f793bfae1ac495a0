"""Context parallelism in the step plan: splits documents that are too long for one rank.

Shorter documents are not split. A long document is split into 2 n chunks for n members of the ring. Member i has chunks
i and 2 n - 1 - i (zig-zag), so causal attention costs every member the same. A member's tokens are spread evenly over
its Ulysses ranks. The functions map integers to integers, with equal results on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Interval = tuple[int, int]  # tokens of a document: index of the first token, index after the last token


@dataclass(frozen=True, slots=True)
class CPGroup:
    """The ranks that share a row: ring x ulysses. capacity: most tokens of one rank. The index of a rank is ring member
    x ulysses + Ulysses rank."""

    ring: int
    ulysses: int
    capacity: int

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses


Assignment = list[dict[int, list[Interval]]]  # for each rank: index of a document -> its tokens here, ascending


def assign(
    lengths: Sequence[int], costs: Sequence[int], group: CPGroup, rooms: Sequence[int] | None = None
) -> tuple[Assignment, list[int]]:
    """Assign one row's documents to the ranks of its group. Returns (tokens of each rank by document, documents that do
    not fit).

    rooms: the capacity that each document needs, in tokens. By default its length; images need more. A part of a
    document needs the proportional capacity.

    A document that needs more than a rank's capacity is split over as few members of the ring as possible. Other
    documents go to the rank with the lowest cost and enough capacity, the costliest first. If the longest first leaves
    fewer tokens unassigned, that order is used.
    """
    rooms = lengths if rooms is None else rooms
    long = sorted((d for d in range(len(lengths)) if rooms[d] > group.capacity), key=lambda d: (-rooms[d], d))
    split, not_split = _split(lengths, rooms, costs, long, group)
    short = sorted(set(range(len(lengths))) - set(long))
    orders = [
        sorted(short, key=lambda d: (-costs[d], d)),
        sorted(short, key=lambda d: (-rooms[d], d)),
    ]
    candidates = [_assign_short(lengths, rooms, costs, order, split, group) for order in orders]
    placed, not_placed = min(candidates, key=lambda candidate: sum(lengths[d] for d in candidate[1]))
    return placed, sorted([*not_split, *not_placed])


def _split(
    lengths: Sequence[int], rooms: Sequence[int], costs: Sequence[int], long: list[int], group: CPGroup
) -> tuple[Assignment, list[int]]:
    """Split the documents `long`: (tokens of each rank by document, documents that do not fit)."""
    members = {d: min(group.ring, -(-rooms[d] // (group.capacity * group.ulysses))) for d in long}
    while long:
        placed = _spread_over_ranks(lengths, costs, members, group)
        if max(_tokens_used(placed, lengths, rooms)) <= group.capacity:
            return placed, [d for d in long if d not in members]
        narrow = [d for d in members if members[d] < group.ring]
        if narrow:
            members[narrow[0]] += 1
        elif len(members) > 1:
            members.popitem()
        else:
            only = next(iter(members))
            return _end_to_end(only, lengths[only], rooms[only], group), [d for d in long if d not in members]
    return [{} for _ in range(group.ranks)], []


def _spread_over_ranks(
    lengths: Sequence[int], costs: Sequence[int], members: dict[int, int], group: CPGroup
) -> Assignment:
    """Split each document over the ring members with the lowest cost so far. members: document -> number of ring
    members."""
    placed: Assignment = [{} for _ in range(group.ranks)]
    loads = [0.0] * group.ring
    for document, count in members.items():
        chosen = sorted(sorted(range(group.ring), key=lambda m: (loads[m], m))[:count])
        for member, member_intervals in zip(chosen, zigzag(lengths[document], count), strict=True):
            loads[member] += costs[document] / count
            for index, intervals in enumerate(spread(member_intervals, group.ulysses)):
                if intervals:
                    placed[member * group.ulysses + index][document] = intervals
    return placed


def _assign_short(
    lengths: Sequence[int],
    rooms: Sequence[int],
    costs: Sequence[int],
    order: Sequence[int],
    split: Assignment,
    group: CPGroup,
) -> tuple[Assignment, list[int]]:
    """Assign complete documents, in this order, to ranks that already have parts of `split` documents."""
    placed, remaining, used = [dict(documents) for documents in split], list[int](), _tokens_used(split, lengths, rooms)
    loads = [sum(costs[d] * _count(parts) / lengths[d] for d, parts in documents.items()) for documents in split]
    for document in order:
        ranks_with_room = [rank for rank in range(group.ranks) if used[rank] + rooms[document] <= group.capacity]
        if not ranks_with_room:
            remaining.append(document)
            continue
        rank = min(ranks_with_room, key=lambda r: (loads[r], r))
        placed[rank][document] = [(0, lengths[document])]
        used[rank] += rooms[document]
        loads[rank] += costs[document]
    return placed, remaining


def _tokens_used(placed: Assignment, lengths: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Capacity used on each rank, in tokens."""
    return [sum(-(-_count(intervals) * rooms[d] // lengths[d]) for d, intervals in rank.items()) for rank in placed]


def zigzag(length: int, members: int) -> list[list[Interval]]:
    """The token intervals of each member of the ring."""
    chunks = 2 * members
    ends = [length * n // chunks for n in range(chunks + 1)]
    return [
        merged([(ends[n], ends[n + 1]), (ends[chunks - 1 - n], ends[chunks - n])] if members > 1 else [(0, length)])
        for n in range(members)
    ]


def spread(intervals: Sequence[Interval], ranks: int) -> list[list[Interval]]:
    """Split these tokens evenly, in order: the intervals of each rank."""
    total = _count(intervals)
    ends = [total * n // ranks for n in range(ranks + 1)]
    starts = list(accumulate((stop - start for start, stop in intervals), initial=0))
    return [
        [
            (start + max(first - offset, 0), start + min(end - offset, stop - start))
            for (start, stop), offset in zip(intervals, starts, strict=False)
            if max(first, offset) < min(end, offset + stop - start)
        ]
        for first, end in pairwise(ends)
    ]


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The intervals, sorted. Adjacent intervals are joined, empty intervals removed."""
    out: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out


def _count(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _end_to_end(document: int, length: int, room: int, group: CPGroup) -> Assignment:
    """Split one document so that each rank is full before the next rank gets tokens. If images need capacity, split it
    evenly. This always fits."""
    tokens = group.capacity if room == length else -(-length // group.ranks)
    ends = [min(length, tokens * rank) for rank in range(group.ranks + 1)]
    return [{document: [interval]} if interval[0] < interval[1] else {} for interval in pairwise(ends)]
