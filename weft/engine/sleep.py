"""Giving a device's memory up for a while: parts of an engine wait in the host's memory, for something else to run.

What moves is storages. Each one's bytes go to a buffer of the host (pinned where there is an accelerator), and it is
shrunk to nothing in place, so that every tensor, view and reference to it (FSDP2's, the optimizer's, the average's)
stays what it was, and has its elements again after waking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from weft.engine.ema import Ema
from weft.engine.foreign import OnShards
from weft.parallel.mesh import own_part

Part = Literal["parameters", "optimizer", "gradients"]
PARTS: tuple[Part, ...] = get_args(Part)


class Sleeper:
    """What of one engine is asleep, and where it waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._asleep: dict[Part, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self._idle: dict[Part, list[Tensor]] = {}  # pinned buffers, kept for the next time: to pin memory is slow

    @property
    def asleep(self) -> dict[Part, int]:
        """Bytes that wait on the host, by part."""
        return {part: sum(buffer.numel() for _, buffer in kept) for part, kept in self._asleep.items()}

    @torch.no_grad()
    def sleep(self, part: Part, tensors: Iterable[Tensor]) -> int:
        """Move what these tensors hold on the device; the bytes. What is on the host already stays."""
        assert part not in self._asleep, f"{part} are asleep"
        storages = _storages(tensors, self.device)
        buffers = self._buffers(part, [storage.nbytes() for storage in storages])
        for storage, buffer in zip(storages, buffers, strict=True):
            buffer.copy_(_bytes_of(storage), non_blocking=True)
        self._synchronise()
        for storage in storages:
            storage.resize_(0)
        self._asleep[part] = list(zip(storages, buffers, strict=True))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # or another process could not have it
        return self.asleep[part]

    @torch.no_grad()
    def wake(self, part: Part) -> int:
        """Bring a part back, bit for bit; the bytes."""
        kept, moved = self._asleep.pop(part), 0
        for storage, buffer in kept:
            assert storage.nbytes() == 0, f"somebody gave {storage.nbytes()} bytes to what is asleep ({part})"
            storage.resize_(buffer.numel())
            _bytes_of(storage).copy_(buffer, non_blocking=True)
            moved += buffer.numel()
        self._synchronise()
        if self.device.type == "cuda":
            self._idle[part] = [buffer for _, buffer in kept]
        return moved

    def _buffers(self, part: Part, sizes: list[int]) -> list[Tensor]:
        idle = self._idle.pop(part, [])
        if [buffer.numel() for buffer in idle] == sizes:
            return idle
        del idle
        pin = self.device.type == "cuda"
        return [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in sizes]

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def held(
    part: Part, module: nn.Module, optimizer: torch.optim.Optimizer | OnShards | None, ema: Ema | None
) -> Iterator[Tensor]:
    """The tensors of a part of an engine; of `optimizer` its state and the average of the weights."""
    if part == "parameters":
        yield from module.parameters()
    elif part == "gradients":
        yield from (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
    elif optimizer is not None:
        kept = (value for state in optimizer.state.values() for value in state.values())
        yield from (value for value in kept if isinstance(value, Tensor) and value.ndim)
        yield from () if ema is None else ema.shards.values()


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages with elements on the device, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for plain in _plain(tensor.detach()):
            if plain.device.type == device.type and plain.untyped_storage().nbytes():
                found.setdefault(plain.untyped_storage().data_ptr(), plain.untyped_storage())
    return list(found.values())


def _plain(tensor: Any) -> Iterator[Tensor]:
    """What a tensor is made of: of a DTensor its shard, of a quantised one its parts."""
    own = own_part(tensor)
    if not hasattr(own, "__tensor_flatten__"):
        yield own
        return
    for name in own.__tensor_flatten__()[0]:
        yield from _plain(getattr(own, name))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The whole of a storage, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
