"""An attention call: tensors, and the bounds of the documents in them.

Shapes: B batch, T tokens of a row, H query heads, K key heads (H a multiple of K), D head width, E value width.
A row is packed (B = 1, documents end to end) or padded (documents right-padded, one per batch entry). Bounds travel
as the forward argument `doc_bounds`; HuggingFace's own mask is ignored, because it is wrong for some families.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.ops.context import ContextRow

BOUNDS_ARGUMENT = "doc_bounds"


@dataclass(eq=False)
class Bounds:
    """The bounds of a row's documents.

    lengths: tokens of each document. padded: one document per batch entry, right-padded, instead of end to end.
    cu_seqlens: [documents + 1] int32 on the row's device, for kernels that need it. firsts: each document's first
    position here; None: 0. key_lengths, cu_keys: the same for keys, if documents have more keys than queries; queries
    are then the last tokens of their document. last_seen: [T] int32 of a packed row, index of the last token that each
    token sees (tokens of an image see later ones of it); None: itself. context: documents of the row that are shared
    over mesh.cp. cache: values that kernels derive once per row. past: in generation, [B] tokens before each entry's
    new one; keys and values come from a cache. even: all of `past` are equal.
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

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def longest_keys(self) -> int:
        return self.longest if self.key_lengths is None else max(self.key_lengths)

    @staticmethod
    def packed(lengths: tuple[int, ...], device: torch.device, key_lengths: tuple[int, ...] | None = None) -> Bounds:
        """Bounds of a packed row. Cumulative lengths are copied to the device only where kernels read them there."""
        keys = None if key_lengths is None else _cumulative(key_lengths, device)
        return Bounds(lengths, cu_seqlens=_cumulative(lengths, device), key_lengths=key_lengths, cu_keys=keys)


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, order=True)
class Traits:
    """What a kernel must support, beyond causality, for calls of one kind. width: head width of queries and keys."""

    width: int
    value_width: int
    grouped: bool = False  # fewer key heads than query heads
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    images: bool = False  # tokens of an image see later ones of it

    @property
    def names(self) -> list[str]:
        return [name for name in ("window", "softcap", "sinks", "images") if getattr(self, name)]

    def __str__(self) -> str:
        widths = f"{self.width}" if self.value_width == self.width else f"{self.width}/{self.value_width}"
        return ", ".join([f"heads {widths} wide", *(["grouped"] if self.grouped else []), *self.names])


@dataclass(frozen=True)
class Call:
    """One attention call: tensors as HuggingFace passes them, keys and values not repeated."""

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
