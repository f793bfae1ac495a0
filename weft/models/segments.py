"""The division of a tensor over ranks: along one dimension, segment by segment, in complete items (heads, columns)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]  # first, how many


@dataclass(frozen=True)
class DimSegment:
    """`count` items of `width` elements each, consecutive along the divided dimension. heads: every rank gets the same
    number of items. repeat: if there are fewer items (heads of keys and values) than ranks, several ranks have the same
    item."""

    count: int
    width: int = 1
    heads: bool = False
    repeat: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.count * self.width


@dataclass(frozen=True)
class TPSpec:
    """The division of a parameter. dim: the dimension divided segment by segment; None: replicated on every rank."""

    dim: int | None = None
    segments: tuple[DimSegment, ...] = ()


def divide_segment(part: DimSegment, ranks: int) -> tuple[list[Range], int] | None:
    """(items of each rank, number of ranks with the same items); None if the segment does not divide."""
    if part.repeat and part.count < ranks and ranks % part.count == 0:
        return repeated_ranges(part.count, ranks), ranks // part.count
    if part.count % ranks == 0 or (not part.heads and part.count >= ranks):
        return even_ranges(part.count, ranks), 1
    return None


def rank_ranges(parts: Sequence[DimSegment], rank: int, ranks: int) -> list[Range]:
    """The ranges of elements of rank `rank`, segment by segment. The segments must divide."""
    ranges, offset = [], 0
    for part in parts:
        items = divide_segment(part, ranks)
        assert items is not None, (part, ranks)
        ranges += scaled_ranges([items[0][rank]], part.width, offset)
        offset += part.size
    return ranges


def even_ranges(count: int, ranks: int) -> list[Range]:
    """`count` items distributed over ranks in order, as evenly as possible: one range per rank."""
    ends = [count * (rank + 1) // ranks for rank in range(ranks)]
    return [(first, end - first) for first, end in zip([0, *ends], ends, strict=False)]


def repeated_ranges(count: int, ranks: int) -> list[Range]:
    """One item per rank, for fewer items than ranks: neighbouring ranks share an item."""
    return [(rank * count // ranks, 1) for rank in range(ranks)]


def scaled_ranges(ranges: Sequence[Range], width: int, offset: int) -> list[Range]:
    """Ranges in elements, from ranges in items of `width` elements that start at `offset`."""
    return [(offset + first * width, size * width) for first, size in ranges]
