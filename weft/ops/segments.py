"""The segments of a packed row in which documents share prefixes.

A segment is a run of tokens that is forwarded once. A document is the path from a root to its last segment. In a
document, the tokens of a segment follow the tokens of its parent. In the row, segments are in depth-first order, so a
parent comes before its children. Padding is a segment of no document. T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

ROOT = -1  # the parent of a segment without parent


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a row. lengths: number of tokens of each, in the order of the row. parents: index of each
    segment's parent, or ROOT. last_segments: for each document of the row, the index of its last segment. cache:
    tensors by device."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    last_segments: tuple[int, ...]
    cache: dict[Any, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.parents), (self.lengths, self.parents)
        assert all(ROOT <= parent < index for index, parent in enumerate(self.parents)), self.parents

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index in the row of each segment's first token."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def before(self) -> tuple[int, ...]:
        """For each segment, the number of tokens on its path before it: its position in its documents."""
        counts: list[int] = []
        for parent in self.parents:
            counts.append(0 if parent == ROOT else counts[parent] + self.lengths[parent])
        return tuple(counts)

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """For each segment, the number of tokens of its path and itself: the keys that its last token sees without a
        window."""
        return tuple(before + length for before, length in zip(self.before, self.lengths, strict=True))

    @cached_property
    def depth_first(self) -> bool:
        """Whether every segment comes directly after its parent or after a descendant of its parent."""
        path: list[int] = []
        for segment, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            if parent != ROOT and not path:
                return False
            path.append(segment)
        return True

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each document."""
        return tuple(self.key_lengths[segment] for segment in self.last_segments)

    @cached_property
    def multiplicities(self) -> tuple[int, ...]:
        """For each segment, the number of documents that contain it."""
        counts = [0] * len(self.lengths)
        for segment in self.last_segments:
            counts[segment] += 1
        for segment in reversed(range(len(counts))):
            if self.parents[segment] != ROOT:
                counts[self.parents[segment]] += counts[segment]
        return tuple(counts)

    def path(self, segment: int) -> tuple[int, ...]:
        """The ancestors of this segment, from the root down."""
        ancestors: list[int] = []
        while (segment := self.parents[segment]) != ROOT:
            ancestors.append(segment)
        return tuple(reversed(ancestors))

    def tokens_of(self, segments: Sequence[int]) -> Tensor:
        """[tokens] index in the row of each token of these segments, in the given order."""
        return torch.cat([torch.arange(self.starts[n], self.starts[n] + self.lengths[n]) for n in segments])

    def path_tokens(self, segment: int) -> Tensor:
        """[tokens] index in the row of each token of a segment's path and of the segment."""
        return self.tokens_of((*self.path(segment), segment))

    def key_tokens(self, device: torch.device) -> Tensor:
        """[sum of key_lengths] index in the row of the keys of each segment, segment by segment."""
        return self._cached("keys", device, lambda: self._paths_tokens(range(len(self.lengths))))

    def document_tokens(self, device: torch.device) -> Tensor:
        """[sum of document_lengths] index in the row of each document's tokens, document by document."""
        return self._cached("documents", device, lambda: self._paths_tokens(self.last_segments))

    def multiplicity_T(self, device: torch.device) -> Tensor:
        """[T] int64: the number of documents that contain each token; 0 for padding."""
        return self._cached("multiplicity", device, lambda: self._repeated(torch.tensor(self.multiplicities)))

    def holders_DS(self, device: torch.device) -> Tensor:
        """[documents, segments] fp32: 1 if the document contains the segment, else 0."""

        def make() -> Tensor:
            holders_DS = torch.zeros(len(self.last_segments), len(self.lengths))
            for document, segment in enumerate(self.last_segments):
                holders_DS[document, [*self.path(segment), segment]] = 1.0
            return holders_DS

        return self._cached("holders", device, make)

    def segment_T(self, device: torch.device) -> Tensor:
        """[T] int64: index of each token's segment."""
        return self._cached("segment", device, lambda: self._repeated(torch.arange(len(self.lengths))))

    def key_shift_T(self, device: torch.device) -> Tensor:
        """[T] int32: the index of each token in key_tokens, among the keys of its segment, minus its index in the
        row."""

        def make() -> Tensor:
            firsts = accumulate(self.key_lengths, initial=0)
            shifts = [a + before - b for a, before, b in zip(firsts, self.before, self.starts, strict=False)]
            return self._repeated(torch.tensor(shifts, dtype=torch.int32))

        return self._cached("shift", device, make)

    def after(self, first: int) -> Segments:
        """The segments from `first` on, as a separate row. No path may start before `first`."""
        documents = tuple(segment - first for segment in self.last_segments if segment >= first)
        parents = tuple(ROOT if parent == ROOT else parent - first for parent in self.parents[first:])
        return Segments(self.lengths[first:], parents, documents)

    def padded(self, tokens: int) -> Segments:
        """These segments and a segment of padding with `tokens` tokens. Unchanged for 0 tokens."""
        if not tokens:
            return self
        return Segments((*self.lengths, tokens), (*self.parents, ROOT), self.last_segments)

    def behind(self, pieces: Sequence[int], lengths: Sequence[int]) -> Segments:
        """These segments after other documents, which share no prefixes. The row has one or more pieces of each.

        pieces: number of pieces of each such document. The pieces become a path. lengths: of all segments of the new
        row.
        """
        parents, documents = list[int](), list[int]()
        for count in pieces:
            parents += [ROOT, *range(len(parents), len(parents) + count - 1)]
            documents.append(len(parents) - 1)
        first = len(parents)
        parents += [ROOT if parent == ROOT else parent + first for parent in self.parents]
        return Segments(tuple(lengths), tuple(parents), (*documents, *(last + first for last in self.last_segments)))

    def _cached(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        if (name, device) not in self.cache:
            self.cache[name, device] = on_device(make(), device)
        return self.cache[name, device]

    def _repeated(self, values: Tensor) -> Tensor:
        """[T]: the value of each token's segment."""
        return values.repeat_interleave(torch.tensor(self.lengths), output_size=sum(self.lengths))

    def _paths_tokens(self, segments: Sequence[int]) -> Tensor:
        paths = [self.path_tokens(segment) for segment in segments]
        return torch.cat(paths) if paths else torch.zeros(0, dtype=torch.int64)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on the device, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
