"""Offloads activations: the tensors that recomputation keeps of a layer are on the host between the layer's forward and
backward.

Copies run on a separate stream. A layer's tensors are copied to the host while the next layers compute. They are copied
back one layer before backward needs them.
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

LAYERS_IN_FLIGHT = 2  # layers whose tensors are still on the device, because their copies may be running
PAGE = 1 << 18  # bytes; host memory of a tensor is a multiple of this
_CHUNK_PAGES = 256
NARROW = 8  # tensors smaller than the hidden states by this factor stay on the device


class Copies(Protocol):
    """Copies between host and device. They run in the order in which they were started."""

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Start copies of (target, source) pairs. They begin after all computations queued so far. Returns an event."""

    def wait(self, event: Any) -> None:
        """Make later computations wait for the copies of this event."""


class ImmediateCopies:
    """Copies for a device without streams, such as the CPU."""

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def wait(self, event: None) -> None:
        """Do nothing: start() has completed the copies."""


class StreamCopies:
    """Copies on one CUDA stream. Their order ensures that a returned page is not overwritten before it was read."""

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
    """Host memory in pages, pinned for CUDA. It grows in chunks and never shrinks, because pinning is slow."""

    def __init__(self, limit: int | None, *, pinned: bool) -> None:
        """limit: most bytes; None for no limit."""
        self._max_pages, self._pinned = None if limit is None else -(-limit // PAGE), pinned
        self._chunks: list[Tensor] = []
        self._idle: list[int] = []
        self._pages = 0
        self._lock = threading.Lock()  # autograd's threads return pages in backward

    @property
    def limit(self) -> int | None:
        """The most bytes of the pool; None for no limit."""
        return None if self._max_pages is None else self._max_pages * PAGE

    @property
    def used(self) -> int:
        """Bytes of pages in use."""
        return (self._pages - len(self._idle)) * PAGE

    def take(self, size: int) -> list[int] | None:
        """Indices of pages for `size` bytes. None if the limit allows no more pages."""
        count = -(-size // PAGE)
        with self._lock:
            while len(self._idle) < count:
                added = _CHUNK_PAGES if self._max_pages is None else min(_CHUNK_PAGES, self._max_pages - self._pages)
                if added <= 0:
                    return None
                self._chunks.append(torch.empty(added * PAGE, dtype=torch.uint8, pin_memory=self._pinned))
                self._idle += range(self._pages, self._pages + added)
                self._pages += added
            self._idle.sort()
            pages, self._idle = self._idle[:count], self._idle[count:]
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Return pages to the pool."""
        with self._lock:
            self._idle += pages

    def pieces(self, pages: Sequence[int], size: int) -> Iterator[Tensor]:
        """The first `size` bytes of these pages, as few uint8 tensors as possible. (Every chunk but the last has
        _CHUNK_PAGES pages, so an index gives chunk and offset.)"""
        runs = groupby(enumerate(pages), lambda pair: (pair[1] - pair[0], pair[1] // _CHUNK_PAGES))
        for _, group in runs:
            run = [page for _, page in group]
            chunk, first = divmod(run[0], _CHUNK_PAGES)
            count = min(size, len(run) * PAGE)
            yield self._chunks[chunk][first * PAGE : first * PAGE + count]
            size -= count


@dataclass
class Traffic:
    """Counts of an engine's copies since it was built. sent, fetched: tensors copied to and from the host. bytes:
    copied to the host. stayed: tensors that stayed on the device because the pool was full. most_in_flight: the largest
    number of layers with simultaneous copies to the host."""

    sent: int = 0
    fetched: int = 0
    bytes: int = 0
    stayed: int = 0
    most_in_flight: int = 0


class ActivationOffload:
    """The activation offload of one engine's layers."""

    def __init__(self, *, kept: bool) -> None:
        """kept: whether to offload all results that recomputation keeps, or only the layers' inputs."""
        self.kept, self.traffic = kept, Traffic()
        self._copies: Copies = ImmediateCopies()
        self._pages = HostPages(None, pinned=False)
        self._flying: deque[HostedLayer] = deque()
        self._last: HostedLayer | None = None

    def open(self, device: torch.device, limit: int | None, copies: Copies | None = None) -> None:
        """Choose the implementation of copies for a device, and limit the host's pool. limit: bytes; None for no
        limit."""
        cuda = device.type == "cuda" and torch.cuda.is_available()
        self._copies = copies or (StreamCopies(device) if cuda else ImmediateCopies())
        self._pages = HostPages(limit, pinned=cuda)

    @property
    def used(self) -> int:
        """Bytes of the host's pool in use."""
        return self._pages.used

    @property
    def limit(self) -> int | None:
        """The most bytes of the host's pool; None for no limit."""
        return self._pages.limit

    def begin_row(self) -> None:
        """Mark the next layer as the first of a forward, so that its backward prefetches no earlier layer."""
        self._last = None

    def layer(self, hidden: Tensor) -> HostedLayer:
        """The offload of a layer that begins. hidden: its input. Waits until at most LAYERS_IN_FLIGHT layers, with this
        one, have running copies."""
        while len(self._flying) >= LAYERS_IN_FLIGHT:
            self._flying.popleft().finish()
        self._last = HostedLayer(self, hidden, None if self._last is None else ref(self._last))
        self._flying.append(self._last)
        self.traffic.most_in_flight = max(self.traffic.most_in_flight, len(self._flying))
        return self._last

    def send(self, tensor: Tensor) -> HostedTensor | None:
        """Start to copy a tensor to the host. None if the pool is full."""
        pages = self._pages.take(tensor.nbytes)
        if pages is None:
            self.traffic.stayed += 1
            return None
        self.traffic.sent += 1
        self.traffic.bytes += tensor.nbytes
        return HostedTensor(self, tensor, pages)


class HostedLayer:
    """The offload of one run of a layer. previous: the layer before it in the same forward.

    References to the tensors are weak. The autograd graph owns the tensors, so they are freed with the graph.
    """

    def __init__(self, owner: ActivationOffload, hidden: Tensor, previous: ref[HostedLayer] | None) -> None:
        self._owner, self._previous = owner, previous
        self._hidden, self._narrow_bytes = hidden.untyped_storage()._cdata, hidden.nbytes // NARROW
        self._tensors: list[ref[HostedTensor]] = []

    def hosted(self, tensor: Tensor, *, narrow: bool = True) -> HostedTensor | None:
        """The tensor on the host; None if it stays on the device. narrow: whether narrow tensors stay."""
        if narrow and tensor.nbytes < self._narrow_bytes:
            return None
        item = self._owner.send(tensor)
        if item is not None:
            self._tensors.append(ref(item))
        return item

    def hidden_to_host(self) -> AbstractContextManager[Any]:
        """A context in which torch.utils.checkpoint saves the layer's input on the host."""

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
        """Start to copy tensors back that are only on the host."""
        for item in self._alive():
            item.fetch()

    def finish(self) -> None:
        """Wait for the copies to the host, and free the device memory."""
        for item in self._alive():
            item.finish()

    def _alive(self) -> list[HostedTensor]:
        return [item for reference in self._tensors if (item := reference()) is not None]


def alias_of(tensor: Tensor) -> Tensor:
    """An alias of the tensor without a graph. It shares the version counter, so in-place changes can be detected."""
    # Inside a dispatch mode this dispatch key is excluded, and detach() would give the alias its own version counter.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class HostedTensor:
    """A tensor whose values are on the host, and on the device while a copy runs."""

    def __init__(self, owner: ActivationOffload, tensor: Tensor, pages: list[int]) -> None:
        self._owner, self._pages = owner, pages
        self._source: Tensor | None = alias_of(tensor)
        self._version = self._source._version
        self._device, self._dtype, self._size, self._bytes = tensor.device, tensor.dtype, tensor.size(), tensor.nbytes
        self._stride = torch.empty_like(tensor, device="meta").stride()  # strides of a dense tensor of this layout
        self._fetched: tuple[Tensor, Any] | None = None
        dense = self._source if self._source.stride() == self._stride else self._source.clone()
        self._event = owner._copies.start(self._pairs(dense, to_host=True))

    def _pairs(self, dense: Tensor, *, to_host: bool) -> list[tuple[Tensor, Tensor]]:
        """(target, source) pairs of the copies between a dense device tensor and the pages."""
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        on_host = list(self._owner._pages.pieces(self._pages, self._bytes))
        on_device = flat.split([len(piece) for piece in on_host])
        return list(zip(on_host, on_device, strict=True) if to_host else zip(on_device, on_host, strict=True))

    def finish(self) -> None:
        """Wait for the copy to the host, and free the device tensor."""
        if self._source is not None:
            self._check()
            self._owner._copies.wait(self._event)
            self._source = None

    def fetch(self) -> None:
        """Start to copy the values back, if they are only on the host."""
        if self._source is None and self._fetched is None:
            dense = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
            self._fetched = dense, self._owner._copies.start(self._pairs(dense, to_host=False))
            self._owner.traffic.fetched += 1

    def restore(self) -> Tensor:
        """The tensor on the device. Each call copies it again, if it is only on the host."""
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
                "The model's code changed a tensor in place while weft copied it to the host. Set "
                "model.offload_activations=off."
            )

    def __del__(self) -> None:
        # Later computations may reuse the device memory only after the copies that read or write it. Pages can be
        # returned at once, because later copies run after the ones already started.
        if self._source is not None:
            self._owner._copies.wait(self._event)
        if self._fetched is not None:
            self._owner._copies.wait(self._fetched[1])
        self._owner._pages.give(self._pages)
