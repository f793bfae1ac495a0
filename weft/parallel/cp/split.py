"""Context parallelism in the step plan: which rank holds which tokens of the documents that are too long for one rank.

Shorter documents are not cut. A long one is cut into 2 n chunks for n members of the ring: member i holds chunks i and
2 n - 1 - i (zig-zag), so that causal attention costs every member the same. A member's tokens are spread evenly over
its Ulysses ranks. Plain integers in and out, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Interval = tuple[int, int]  # tokens of a document: the first, and one past the last


@dataclass(frozen=True, slots=True)
class CPGroup:
    """The ranks that share a row. capacity: most tokens of one rank. rank = ring member x ulysses + Ulysses rank."""

    ring: int
    ulysses: int
    capacity: int

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses


Assignment = list[dict[int, list[Interval]]]  # of each rank: document -> its tokens, rising


def assign(
    lengths: Sequence[int], costs: Sequence[int], group: CPGroup, rooms: Sequence[int] | None = None
) -> tuple[Assignment, list[int]]:
    """Distribute one row's documents over the ranks of its group: (tokens of each rank by document, documents without
    room). rooms: capacity that each document takes, in tokens, default its length; images make it more. A part of a
    document takes its proportion.

    Documents longer than a rank's capacity are cut, over as few members of the ring as can hold them. Others stay whole
    and go to the rank with the lowest cost and enough room; if that leaves documents out, the longest are placed first.
    """
    rooms = lengths if rooms is None else rooms
    long = sorted((d for d in range(len(lengths)) if rooms[d] > group.capacity), key=lambda d: (-rooms[d], d))
    cut, not_cut = _cut(lengths, rooms, costs, long, group)
    uncut = sorted(set(range(len(lengths))) - set(long))
    orders = [
        sorted(uncut, key=lambda d: (-costs[d], d)),
        sorted(uncut, key=lambda d: (-rooms[d], d)),
    ]
    candidates = [_deal_whole(lengths, rooms, costs, order, cut, group) for order in orders]
    placed, not_placed = min(candidates, key=lambda candidate: sum(lengths[d] for d in candidate[1]))
    return placed, sorted([*not_cut, *not_placed])


def _cut(
    lengths: Sequence[int], rooms: Sequence[int], costs: Sequence[int], long: list[int], group: CPGroup
) -> tuple[Assignment, list[int]]:
    """Cut the documents `long`: (tokens of each rank by document, documents without room)."""
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
    """Each document over its number of ring members, chosen by lowest cost so far."""
    placed: Assignment = [{} for _ in range(group.ranks)]
    spent = [0.0] * group.ring
    for document, count in members.items():
        chosen = sorted(sorted(range(group.ring), key=lambda m: (spent[m], m))[:count])
        for member, member_intervals in zip(chosen, zigzag(lengths[document], count), strict=True):
            spent[member] += costs[document] / count
            for index, intervals in enumerate(spread(member_intervals, group.ulysses)):
                if intervals:
                    placed[member * group.ulysses + index][document] = intervals
    return placed


def _deal_whole(
    lengths: Sequence[int],
    rooms: Sequence[int],
    costs: Sequence[int],
    order: Sequence[int],
    cut: Assignment,
    group: CPGroup,
) -> tuple[Assignment, list[int]]:
    placed, remaining, used = [dict(documents) for documents in cut], list[int](), _tokens_used(cut, lengths, rooms)
    spent = [sum(costs[d] * _count(intervals) / lengths[d] for d, intervals in documents.items()) for documents in cut]
    for document in order:
        ranks_with_room = [rank for rank in range(group.ranks) if used[rank] + rooms[document] <= group.capacity]
        if not ranks_with_room:
            remaining.append(document)
            continue
        rank = min(ranks_with_room, key=lambda r: (spent[r], r))
        placed[rank][document] = [(0, lengths[document])]
        used[rank] += rooms[document]
        spent[rank] += costs[document]
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
    """These tokens in even parts, in order: one part per rank."""
    total = _count(intervals)
    ends = [total * n // ranks for n in range(ranks + 1)]
    starts = list(accumulate((stop - start for start, stop in intervals), initial=0))
    parts: list[list[Interval]] = []
    for first, end in pairwise(ends):
        cut = [
            (start + max(first - offset, 0), start + min(end - offset, stop - start))
            for (start, stop), offset in zip(intervals, starts, strict=False)
            if max(first, offset) < min(end, offset + stop - start)
        ]
        parts.append(cut)
    return parts


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The intervals with adjacent ones joined and empty ones removed."""
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
    """One document, cut wherever a rank is full, or in even parts if images take room. Always possible."""
    part = group.capacity if room == length else -(-length // group.ranks)
    ends = [min(length, part * rank) for rank in range(group.ranks + 1)]
    return [{document: [interval]} if interval[0] < interval[1] else {} for interval in pairwise(ends)]
