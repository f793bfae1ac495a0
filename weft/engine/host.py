"""Host memory for device content: sleeping parts of an engine (sleep.py), and copies for a checkpoint
(checkpoint/snapshot.py). The engines of a process share one pool.

Chunks have one size, a power of two, because torch rounds each pinned allocation up to a power of two. A tensor that is
longer than a chunk, or begins near a chunk's end, spans several.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from weft.launch import flight

CHUNK = 1 << 26  # bytes
_ALIGNED = 512  # bytes: every item begins at a multiple, and chunk sizes are multiples


@dataclass(eq=False)
class Allocation:
    """Chunks in use. pieces: for each requested size, its bytes (uint8), in order."""

    chunks: list[Tensor]
    pieces: list[list[Tensor]]
    by_writer: bool


class HostPool:
    """Chunks of host memory, pinned if tensors live on an accelerator. Returned chunks are kept, because pinning is
    slow. The pool is therefore as large as the most memory ever in use at once, or requested by `fill`."""

    def __init__(self, storage: torch.device) -> None:
        """storage: the device of the tensors."""
        self.storage, self.pinned = storage, storage.type == "cuda"
        self._idle: list[Tensor] = []
        self._writers = 0  # allocations that a writing thread returns
        self._changed = threading.Condition()
        self.bytes = 0  # of all chunks
        self._target = 0  # bytes that fill() will allocate
        self._filling: threading.Thread | None = None

    def take(self, sizes: Sequence[int], *, by_writer: bool = False) -> Allocation:
        """Memory for items of these sizes, in bytes.

        by_writer: a thread that writes to disk returns the memory; later calls wait for it before they allocate more.
        """
        count = -(-sum(map(_padded, sizes)) // CHUNK)
        with self._changed:
            if count > len(self._idle) and self._writers and not by_writer:
                flight.enter("save")
                self._changed.wait_for(lambda: count <= len(self._idle) or not self._writers)
                flight.enter("sleep")
            chunks, self._idle = self._idle[:count], self._idle[count:]
            self._writers += by_writer
            for _ in range(count - len(chunks)):
                chunks.append(self._allocate())
                self.bytes += CHUNK
        return Allocation(chunks, list(_cut(chunks, sizes)), by_writer)

    def fill(self, size: int) -> None:
        """Allocate this many more bytes in a thread, if memory is pinned. Pinning runs at 2 to 3 GB/s, so the first
        save or sleep of a large model would otherwise wait many seconds. If the host runs out of memory, the thread
        ends, and the later allocation raises the error."""
        with self._changed:
            self._target += size
            if self.pinned and self._filling is None:
                self._filling = threading.Thread(target=self._fill, name="weft pinned memory", daemon=True)
                self._filling.start()

    def _fill(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(self.storage)  # a new thread uses the first device, and would create a context there
        with suppress(RuntimeError):
            while self._lacks():
                chunk = self._allocate()
                with self._changed:
                    self._idle.append(chunk)
                    self.bytes += CHUNK
                    self._changed.notify_all()

    def _lacks(self) -> bool:
        """Whether fill() must continue; drops its thread when it must not."""
        with self._changed:
            lacks = self.bytes < self._target
            if not lacks:
                self._filling = None
        return lacks

    def _allocate(self) -> Tensor:
        return torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self.pinned)

    def give(self, allocation: Allocation) -> None:
        """Return an allocation; a second call does nothing."""
        with self._changed:
            self._idle += allocation.chunks
            self._writers -= allocation.by_writer
            allocation.chunks, allocation.pieces, allocation.by_writer = [], [], False
            self._changed.notify_all()


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _cut(chunks: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[list[Tensor]]:
    offset = 0
    for size in sizes:
        pieces, filled = [], 0
        while filled < size:
            chunk, start = divmod(offset + filled, CHUNK)
            count = min(size - filled, CHUNK - start)
            pieces.append(chunks[chunk][start : start + count])
            filled += count
        yield pieces
        offset += _padded(size)


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A tensor whose bytes are in pieces of host memory, row-major."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Tensor]

    @staticmethod
    def wrap(tensor: Tensor) -> HostTensor:
        """Wraps a CPU tensor without a copy."""
        return HostTensor(tuple(tensor.shape), tensor.dtype, [flat_bytes(tensor)])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def meta(self) -> Tensor:
        """Shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def fill(self, tensor: Tensor) -> None:
        """Copy a tensor of this shape and dtype into the pieces; asynchronous from an accelerator."""
        source, done = flat_bytes(tensor), 0
        for piece in self.pieces:
            piece.copy_(source[done : done + len(piece)], non_blocking=True)
            done += len(piece)

    def flat(self) -> Iterator[Tensor]:
        """The elements, piece after piece."""
        return (piece.view(self.dtype) for piece in self.pieces)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """A box of the tensor: a view if its rows are in one piece, else a copy."""
        first, end = (index[0].start, index[0].stop) if index else (0, 1)
        row = prod(self.shape[1:]) * self.dtype.itemsize
        rows = self._bytes(first * row, end * row).view(self.dtype).reshape(end - first, *self.shape[1:])
        return rows[(slice(None), *index[1:])] if index else rows.reshape(())

    def _bytes(self, first: int, end: int) -> Tensor:
        parts, offset = [], 0
        for piece in self.pieces:
            start, stop = max(first - offset, 0), min(end - offset, len(piece))
            if start < stop:
                parts.append(piece[start:stop])
            offset += len(piece)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def flat_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8 of a tensor, without a copy if the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
