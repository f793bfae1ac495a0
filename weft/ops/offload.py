"""Results that recomputation keeps, stored on the host between a layer's forward and its backward.

Copies run on a stream of their own, beside the computation: a layer's results go to the host while the next layers
compute, and come back one layer before backward needs them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LAYERS_IN_FLIGHT = 2  # layers whose results are on the device, too, because their copies may still run
PAGE = 1 << 18  # bytes: what a tensor takes on the host is a multiple
_CHUNK_PAGES = 256
NARROW = 8  # results that are so much smaller than hidden states stay on the device


class Copies(Protocol):
    """Copies between host and device, in the order in which they are started."""

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Start to copy (target, source) pairs, after what has been computed so far. Returns an event."""

    def wait(self, event: Any) -> None:
        """Let later computations begin after the event's copies."""


class ImmediateCopies:
    """Copies of a device that has no streams, such as the CPU."""

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def wait(self, event: None) -> None:
        """Nothing: the copies are done."""


class StreamCopies:
    """Copies on one CUDA stream, so that a page that is given back is not overwritten before it was read."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(event)


class HostPages:
    """Host memory in pages, pinned for CUDA. It grows in chunks, which stay, because pinning is slow."""

    def __init__(self, limit: int | None, *, pinned: bool) -> None:
        """limit: bytes, at most; None for no limit."""
        self._most, self._pinned = None if limit is None else -(-limit // PAGE), pinned
        self._chunks: list[Tensor] = []
        self._idle: list[int] = []
        self._pages = 0
        self._lock = threading.Lock()  # backward gives pages back in a thread of autograd

    @property
    def limit(self) -> int | None:
        """The most bytes; None for no limit."""
        return None if self._most is None else self._most * PAGE

    @property
    def used(self) -> int:
        """Bytes of pages in use."""
        return (self._pages - len(self._idle)) * PAGE

    def take(self, size: int) -> list[int] | None:
        """Numbers of pages for so many bytes; None if the limit allows no more."""
        count = -(-size // PAGE)
        with self._lock:
            while len(self._idle) < count:
                rest = _CHUNK_PAGES if self._most is None else min(_CHUNK_PAGES, self._most - self._pages)
                if rest <= 0:
                    return None
                self._chunks.append(torch.empty(rest * PAGE, dtype=torch.uint8, pin_memory=self._pinned))
                self._idle += range(self._pages, self._pages + rest)
                self._pages += rest
            self._idle.sort()
            pages, self._idle = self._idle[:count], self._idle[count:]
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Return pages."""
        with self._lock:
            self._idle += pages

    def pieces(self, pages: Sequence[int], size: int) -> Iterator[Tensor]:
        """The bytes of pages, as few pieces as possible: uint8, together `size` long. Pages of all chunks but the last
        have numbers that begin at multiples of _CHUNK_PAGES."""
        runs = groupby(enumerate(pages), lambda pair: (pair[1] - pair[0], pair[1] // _CHUNK_PAGES))
        for _, group in runs:
            run = [page for _, page in group]
            chunk, first = divmod(run[0], _CHUNK_PAGES)
            count = min(size, len(run) * PAGE)
            yield self._chunks[chunk][first * PAGE : first * PAGE + count]
            size -= count


@dataclass
class Traffic:
    """What an engine's layers have copied since it was built. sent, fetched: tensors to and from the host; bytes: sent.
    stayed: tensors that the pool had no room for. most_in_flight: layers whose copies to the host ran at once."""

    sent: int = 0
    fetched: int = 0
    bytes: int = 0
    stayed: int = 0
    most_in_flight: int = 0


class ActivationOffload:
    """The transfers of one engine's layers."""

    def __init__(self, *, kept: bool) -> None:
        """kept: move all that recomputation keeps; else hidden states alone."""
        self.kept, self.traffic = kept, Traffic()
        self._copies: Copies = ImmediateCopies()
        self._pages = HostPages(None, pinned=False)
        self._flying: deque[HostedLayer] = deque()
        self._last: HostedLayer | None = None

    def open(self, device: torch.device, limit: int | None, copies: Copies | None = None) -> None:
        """Choose the copies for a device, and bound the host's pool. limit: bytes; None for no bound."""
        cuda = device.type == "cuda" and torch.cuda.is_available()
        self._copies = copies or (StreamCopies(device) if cuda else ImmediateCopies())
        self._pages = HostPages(limit, pinned=cuda)

    @property
    def used(self) -> int:
        """Bytes of the host's pool in use."""
        return self._pages.used

    @property
    def limit(self) -> int | None:
        """The most bytes that the pool may have; None for no bound."""
        return self._pages.limit

    def begin_row(self) -> None:
        """Say that the next layer is the first of a forward: backward needs no other before it."""
        self._last = None

    def layer(self, hidden: Tensor) -> HostedLayer:
        """The transfers of a layer that begins. hidden: its input. At most LAYERS_IN_FLIGHT are in flight with it."""
        while len(self._flying) >= LAYERS_IN_FLIGHT:
            self._flying.popleft().finish()
        self._last = HostedLayer(self, hidden, None if self._last is None else ref(self._last))
        self._flying.append(self._last)
        self.traffic.most_in_flight = max(self.traffic.most_in_flight, len(self._flying))
        return self._last

    def send(self, tensor: Tensor) -> HostedTensor | None:
        """Start to copy a tensor to the host; None if it has no room."""
        pages = self._pages.take(tensor.nbytes)
        if pages is None:
            self.traffic.stayed += 1
            return None
        self.traffic.sent += 1
        self.traffic.bytes += tensor.nbytes
        return HostedTensor(self, tensor, pages)


class HostedLayer:
    """One run of a layer. previous: the layer before it in the same forward. It refers weakly to its tensors, which
    the graph of backward owns, so that they go with the graph."""

    def __init__(self, owner: ActivationOffload, hidden: Tensor, previous: ref[HostedLayer] | None) -> None:
        self._owner, self._previous = owner, previous
        self._hidden, self._least = hidden.untyped_storage()._cdata, hidden.nbytes // NARROW
        self._tensors: list[ref[HostedTensor]] = []

    def hosted(self, tensor: Tensor, *, narrow: bool = True) -> HostedTensor | None:
        """The tensor on the host; None if it stays. narrow: let it stay if it is narrow."""
        if narrow and tensor.nbytes < self._least:
            return None
        item = self._owner.send(tensor)
        if item is not None:
            self._tensors.append(ref(item))
        return item

    def hidden_to_host(self) -> AbstractContextManager[Any]:
        """Inside, torch.utils.checkpoint saves the layer's input on the host."""

        def pack(tensor: Tensor) -> Tensor | HostedTensor:
            is_hidden = tensor.untyped_storage()._cdata == self._hidden
            return (self.hosted(tensor, narrow=False) if is_hidden else None) or tensor

        def unpack(item: Tensor | HostedTensor) -> Tensor:
            if isinstance(item, Tensor):
                return item
            self.fetch()
            previous = None if self._previous is None else self._previous()
            if previous is not None:
                previous.fetch()
            return item.restore()

        return saved_tensors_hooks(pack, unpack)

    def fetch(self) -> None:
        """Start to copy back what is on the host alone."""
        for item in self._alive():
            item.fetch()

    def finish(self) -> None:
        """Wait for the copies to the host, and free the memory of the device."""
        for item in self._alive():
            item.finish()

    def _alive(self) -> list[HostedTensor]:
        return [item for reference in self._tensors if (item := reference()) is not None]


def alias_of(tensor: Tensor) -> Tensor:
    """The tensor without a graph, counting changes in place with it."""
    # In a dispatch mode it does so only if this key is not excluded.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class HostedTensor:
    """A tensor's values on the host, and on the device while copies run."""

    def __init__(self, owner: ActivationOffload, tensor: Tensor, pages: list[int]) -> None:
        self._owner, self._pages = owner, pages
        self._source: Tensor | None = alias_of(tensor)
        self._version = self._source._version
        self._device, self._dtype, self._size, self._bytes = tensor.device, tensor.dtype, tensor.size(), tensor.nbytes
        self._stride = torch.empty_like(tensor, device="meta").stride()  # of a dense tensor
        self._fetched: tuple[Tensor, Any] | None = None
        dense = self._source if self._source.stride() == self._stride else self._source.clone()
        self._event = owner._copies.start(self._pairs(dense, to_host=True))

    def _pairs(self, dense: Tensor, *, to_host: bool) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of the copies between a dense tensor of the device and the pages."""
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        pieces = list(self._owner._pages.pieces(self._pages, self._bytes))
        parts = flat.split([len(piece) for piece in pieces])
        return list(zip(pieces, parts, strict=True) if to_host else zip(parts, pieces, strict=True))

    def finish(self) -> None:
        """Wait for the copy to the host, and drop the tensor of the device."""
        if self._source is not None:
            self._check()
            self._owner._copies.wait(self._event)
            self._source = None

    def fetch(self) -> None:
        """Start to copy the values back, if they are on the host alone."""
        if self._source is None and self._fetched is None:
            dense = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
            self._fetched = dense, self._owner._copies.start(self._pairs(dense, to_host=False))
            self._owner.traffic.fetched += 1

    def restore(self) -> Tensor:
        """The tensor on the device. Another call copies it again."""
        if self._source is not None:
            self._check()
            return self._source.detach()
        self.fetch()
        assert self._fetched is not None
        (tensor, event), self._fetched = self._fetched, None
        self._owner._copies.wait(event)
        return tensor

    def _check(self) -> None:
        if self._source is not None and self._source._version != self._version:
            raise RuntimeError(
                "The model's code has changed a tensor in place that is copied to the host: set "
                "model.offload_activations=off."
            )

    def __del__(self) -> None:
        # Memory of the device may be used again only after copies from it and to it; pages, after what was started
        # before, because copies keep their order.
        if self._source is not None:
            self._owner._copies.wait(self._event)
        if self._fetched is not None:
            self._owner._copies.wait(self._fetched[1])
        self._owner._pages.give(self._pages)
