"""An attention call: tensors, and the bounds of the documents in them.

Shapes: B batch, T tokens of a row, H query heads, K key heads (H a multiple of K), D head width, E value width.
A row is packed (B = 1, documents end to end) or padded (documents right-padded, one per batch entry). Bounds are passed
as the forward argument `doc_bounds`. HuggingFace's mask is ignored, because it is wrong for some families.

For documents that ranks of mesh.cp share: n tokens in this rank's row, S tokens of all ranks of its Ulysses group. A
Ulysses group is one member of the ring. The number of a token combines its document and its position in the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ops.communicator import CPAxis
from weft.ops.segments import Segments

BOUNDS_ARGUMENT = "doc_bounds"


@dataclass(eq=False)
class Bounds:
    """The bounds of a row's documents.

    lengths: number of tokens of each document, or of each segment (padding included) if `segments` is set.
    padded: one document per batch entry, right-padded, instead of end to end.
    cu_seqlens: [documents + 1] int32 cumulative lengths on the row's device; None on CPU.
    firsts: position in its document of each document's first token in this row; None means 0 for all.
    key_lengths, cu_keys: lengths and cu_seqlens of the keys, if documents have more keys than queries. The queries are
    then the last tokens of their document.
    last_seen: [T] int32 for a packed row: index of the last token that each token sees. Tokens of an image see later
    tokens of the image. None: every token sees up to itself.
    context: the documents of the row that ranks of mesh.cp share.
    cache: values that kernels compute once per row.
    past: in generation, [B] number of tokens before each entry's new token. Keys and values come from a cache.
    even: whether all elements of `past` are equal.
    segments: the segments of a row in which documents share prefixes. None: no document shares tokens.
    """

    lengths: tuple[int, ...]
    padded: bool = False
    cu_seqlens: Tensor | None = None
    firsts: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    cu_keys: Tensor | None = None
    last_seen: Tensor | None = None
    context: ContextRow | None = None
    cache: dict[Any, Any] = field(default_factory=dict)
    past: Tensor | None = None
    even: bool = False
    segments: Segments | None = None

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def longest_keys(self) -> int:
        return self.longest if self.key_lengths is None else max(self.key_lengths)

    def by_paths(self, device: torch.device) -> Bounds:
        """Bounds that pair the queries of each segment with the keys of its path, computed once per row. In the result,
        last_seen is an index in the gathered keys."""
        if ("paths", device) not in self.cache:
            assert self.segments is not None
            bounds = Bounds.packed(self.lengths, device, self.segments.key_lengths)
            if self.last_seen is not None:
                bounds.last_seen = self.last_seen + self.segments.key_shift_T(device)
            self.cache["paths", device] = bounds
        paths: Bounds = self.cache["paths", device]
        return paths

    @staticmethod
    def packed(lengths: tuple[int, ...], device: torch.device, key_lengths: tuple[int, ...] | None = None) -> Bounds:
        """Bounds of a packed row. Cumulative lengths are copied to accelerators only; CPU kernels do not read them."""
        keys = None if key_lengths is None else _cumulative(key_lengths, device)
        return Bounds(lengths, cu_seqlens=_cumulative(lengths, device), key_lengths=key_lengths, cu_keys=keys)


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.pin_memory().to(device, non_blocking=True)


# ---------------------------------------------------------------- documents that ranks of mesh.cp share

TokenRange = tuple[int, int, int]  # document, position of the first token, position after the last token
Numbers = NDArray[np.int64]

_DOCUMENT = 32  # bits of a token's number that hold its position; the document is in the bits above


@dataclass(frozen=True)
class _Keys:
    """The exchange of one row in the ring, for one window. sent: indices, among this member's S tokens, of the tokens
    to send, member by member. run: indices, among local and then received tokens, of the keys that queries see. bounds:
    the bounds of attention over these keys."""

    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    run: Tensor
    bounds: Bounds


@dataclass(frozen=True, eq=False)
class ContextRow:
    """The documents of one row that ranks of mesh.cp share.

    ranges_by_rank: for each rank, the token ranges at the start of its row, ascending. whole_lengths: lengths of the
    unshared documents and of the padding, which follow on this rank; with whole_segments, the lengths of segments.
    whole_segments: segments of the unshared documents, if these share prefixes.
    """

    axis: CPAxis
    ranges_by_rank: tuple[tuple[TokenRange, ...], ...]
    whole_lengths: tuple[int, ...]
    whole_segments: Segments | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges_by_rank[self.axis.rank])

    @property
    def member(self) -> int:
        return self.axis.rank // self.axis.ulysses_size

    def counts(self) -> list[int]:
        """Number of tokens of shared documents on each rank of this Ulysses group."""
        return [len(numbers) for numbers in self._group(self.member)]

    def order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[S] indices that sort the group's tokens (rank by rank) by number, and the inverse."""
        if "order" not in self.cache:
            order = np.argsort(np.concatenate(self._group(self.member)), kind="stable")
            self.cache["order"] = _on(order, device), _on(np.argsort(order, kind="stable"), device)
        permutations: tuple[Tensor, Tensor] = self.cache["order"]
        return permutations

    def keys(self, window: int | None, device: torch.device) -> _Keys:
        """The exchange for calls with this window, computed once per row."""
        if ("keys", window) not in self.cache:
            self.cache["keys", window] = self.build_keys(window, device)
        exchange: _Keys = self.cache["keys", window]
        return exchange

    def unshared_bounds(self, device: torch.device) -> Bounds:
        """The bounds of the unshared documents."""
        if "rest" not in self.cache:
            self.cache["rest"] = replace(Bounds.packed(self.whole_lengths, device), segments=self.whole_segments)
        bounds: Bounds = self.cache["rest"]
        return bounds

    def shared_bounds(self, device: torch.device) -> Bounds:
        """The bounds of the shared documents over the S tokens, sorted by `order`. With a ring, a member has only part
        of a document."""
        if "documents" not in self.cache:
            numbers = np.sort(np.concatenate(self._group(self.member)))
            lengths = tuple(stop - start for _, start, stop in _runs(numbers))
            self.cache["documents"] = Bounds.packed(lengths, device)
        bounds: Bounds = self.cache["documents"]
        return bounds

    def _group(self, member: int) -> list[Numbers]:
        size = self.axis.ulysses_size
        return [_numbers(ranges) for ranges in self.ranges_by_rank[member * size : (member + 1) * size]]

    def build_keys(self, window: int | None, device: torch.device) -> _Keys:
        members = [np.sort(np.concatenate(self._group(m))) for m in range(self.axis.ring_size)]
        visible = [visible_keys(_runs(numbers), window) for numbers in members]
        needed = [np.setdiff1d(_numbers(runs), local) for runs, local in zip(visible, members, strict=True)]
        local, local_needed = members[self.member], needed[self.member]
        sent = [np.flatnonzero(np.isin(local, numbers, assume_unique=True)) for numbers in needed]
        received = [np.intersect1d(numbers, local_needed, assume_unique=True) for numbers in members]
        available = np.concatenate([local, *received])
        order = np.argsort(available)
        run = order[np.searchsorted(available, _numbers(visible[self.member]), sorter=order)]
        lengths, keys = (tuple(stop - start for _, start, stop in r) for r in (_runs(local), visible[self.member]))
        return _Keys(
            _on(np.concatenate(sent), device), [len(x) for x in sent], [len(x) for x in received], _on(run, device),
            Bounds.packed(lengths, device, keys),
        )  # fmt: skip


def _numbers(ranges: Sequence[TokenRange]) -> Numbers:
    parts = [np.arange(start, stop, dtype=np.int64) + (d << _DOCUMENT) for d, start, stop in ranges]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _runs(numbers: Numbers) -> list[TokenRange]:
    """Ascending token numbers as ranges, as few as possible."""
    if not len(numbers):
        return []
    ends = np.flatnonzero(np.diff(numbers) != 1)
    firsts, lasts = numbers[[0, *(ends + 1)]], numbers[[*ends, -1]]
    position_mask = (1 << _DOCUMENT) - 1
    return [
        (int(first) >> _DOCUMENT, int(first) & position_mask, (int(last) & position_mask) + 1)
        for first, last in zip(firsts, lasts, strict=True)
    ]


def visible_keys(runs: Sequence[TokenRange], window: int | None) -> list[TokenRange]:
    """For each range of queries, the range of keys that they see."""
    return [(d, 0 if window is None else max(0, start - window + 1), stop) for d, start, stop in runs]


def _on(indices: Numbers, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(indices)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


# ---------------------------------------------------------------- calls


@dataclass(frozen=True, order=True)
class Traits:
    """The features, besides causality, that a kernel needs for a call. width: head width of queries and keys."""

    width: int
    value_width: int
    grouped: bool = False  # fewer key heads than query heads
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    images: bool = False  # tokens of an image see later tokens of the image

    @property
    def names(self) -> list[str]:
        return [name for name in ("window", "softcap", "sinks", "images") if getattr(self, name)]

    def __str__(self) -> str:
        widths = f"{self.width}" if self.value_width == self.width else f"{self.width}/{self.value_width}"
        return ", ".join([f"heads {widths} wide", *(["grouped"] if self.grouped else []), *self.names])


@dataclass(frozen=True)
class Call:
    """One attention call: tensors as HuggingFace passes them. Key heads are not repeated for their query heads."""

    query_BHTD: Tensor
    key_BKTD: Tensor
    value_BKTE: Tensor
    bounds: Bounds
    scaling: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks_H is None

    @property
    def traits(self) -> Traits:
        heads, width = self.query_BHTD.shape[1], self.query_BHTD.shape[3]
        return Traits(
            width, self.value_BKTE.shape[3], heads != self.key_BKTD.shape[1],
            self.window is not None, self.softcap is not None, self.sinks_H is not None,
            self.bounds.last_seen is not None,
        )  # fmt: skip

    def windowed(self, length: int) -> bool:
        return self.window is not None and self.window < length
