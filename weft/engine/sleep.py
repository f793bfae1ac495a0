"""Sleep: moves parts of an engine to host memory, so that another engine can use the device's memory.

Storages are moved, not tensors: the bytes of a storage are copied to the host (host.py), and it is shrunk to zero in
place. So every tensor, view and reference (of FSDP2, the optimizer and the average) stays valid, and has its elements
again after wake().
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from weft.engine.host import Allocation, HostPool
from weft.engine.optim.custom_optimizer import ShardOptimizer
from weft.engine.optim.optimizer import Ema
from weft.parallel.mesh import local_shard

Part = Literal["parameters", "optimizer", "gradients"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class _Waiting:
    """Storages, and the host memory that holds their bytes."""

    storages: list[torch.UntypedStorage]
    sizes: list[int]
    allocation: Allocation

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


class Offloader:
    """The sleeping parts of one engine and their host memory."""

    def __init__(self, device: torch.device, storage: torch.device, shares_with: Offloader | None = None) -> None:
        """storage: the device of the engine's shards. shares_with: the Sleeper of another engine of this process; both
        share a pool if their storage is the same."""
        shared = shares_with is not None and shares_with.pool.storage == storage
        self.device = device
        self.pool: HostPool = shares_with.pool if shares_with is not None and shared else HostPool(storage)
        self._asleep: dict[Part, _Waiting] = {}

    @property
    def asleep(self) -> dict[Part, int]:
        """Bytes on the host, by part."""
        return {part: waiting.bytes for part, waiting in self._asleep.items()}

    @torch.no_grad()
    def sleep(self, part: Part, tensors: Iterable[Tensor]) -> int:
        """Move the elements of these tensors from the device to the host; returns the bytes. Waits for a checkpoint
        that is being written from the same memory."""
        assert part not in self._asleep, f"{part} are asleep"
        storages = _storages(tensors, self.device)
        sizes = [storage.nbytes() for storage in storages]
        waiting = _Waiting(storages, sizes, self.pool.take(sizes))
        for source, host in _pairs(waiting):
            host.copy_(source, non_blocking=True)
        self._synchronise()
        for storage in storages:
            storage.resize_(0)
        self._asleep[part] = waiting
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # so that another process can use the memory
        return waiting.bytes

    @torch.no_grad()
    def wake(self, part: Part) -> int:
        """Bring a part back, bit for bit; returns the bytes."""
        waiting = self._asleep.pop(part)
        for storage, size in zip(waiting.storages, waiting.sizes, strict=True):
            assert storage.nbytes() == 0, f"a storage of {part} has {storage.nbytes()} bytes although it is asleep"
            storage.resize_(size)
        for target, host in _pairs(waiting):
            target.copy_(host, non_blocking=True)
        self._synchronise()
        self.pool.give(waiting.allocation)
        return waiting.bytes

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class OffloadedTensors:
    """Storages whose memory and contents were freed; restore() allocates them again, without contents."""

    storages: list[torch.UntypedStorage]
    sizes: list[int]

    @classmethod
    def free(cls, tensors: Iterable[Tensor], device: torch.device) -> OffloadedTensors:
        """Empty the storages of the tensors on the device. The tensors stay valid, without elements."""
        storages = _storages(tensors, device)
        emptied = cls(storages, [storage.nbytes() for storage in storages])
        for storage in storages:
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return emptied

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def restore(self) -> None:
        """Allocate the memory again, uninitialised."""
        for storage, size in zip(self.storages, self.sizes, strict=True):
            storage.resize_(size)


def _pairs(waiting: _Waiting) -> Iterator[tuple[Tensor, Tensor]]:
    """(bytes of a storage, their memory on the host), piece by piece."""
    for storage, pieces in zip(waiting.storages, waiting.allocation.pieces, strict=True):
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # all of it
        offset = 0
        for piece in pieces:
            yield source[offset : offset + len(piece)], piece
            offset += len(piece)


def tensors_of(
    part: Part, module: nn.Module, optimizer: torch.optim.Optimizer | ShardOptimizer | None, ema: Ema | None
) -> Iterator[Tensor]:
    """The tensors of a part of an engine; `optimizer` has the optimizer's state and the average of the weights."""
    if part == "parameters":
        yield from module.parameters()
    elif part == "gradients":
        yield from (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
    elif optimizer is not None:
        values = (value for state in optimizer.state.values() for value in state.values())
        yield from (value for value in values if isinstance(value, Tensor) and value.ndim)
        yield from () if ema is None else ema.shards.values()


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages with elements on the device, each once."""
    by_address: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for plain in _plain(tensor.detach()):
            if plain.device.type == device.type and plain.untyped_storage().nbytes():
                by_address.setdefault(plain.untyped_storage().data_ptr(), plain.untyped_storage())
    return list(by_address.values())


def _plain(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors of a tensor: the shard of a DTensor, the parts of a quantised tensor."""
    local = local_shard(tensor)
    if not hasattr(local, "__tensor_flatten__"):
        yield local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from _plain(getattr(local, name))
