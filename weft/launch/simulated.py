"""The simulation of a device: a step runs on the CPU with torch's fake tensors, which have sizes but no values.

Code that chooses kernels or sizes by the device calls `device_kind`. Code that waits for numbers from a device calls
`read`. Code that fills host memory is inside `host_memory`. Little other code depends on a simulation.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # defines the shapes of fake tensors in collectives
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

NEW = (9, 0)  # the compute capability of a device that this machine does not have


class Simulation:
    """The simulation of a device."""

    def __init__(self, kind: str, memory: int = 0, capability: tuple[int, int] | None = None) -> None:
        """kind: the type of the device, `cuda` or `cpu`. memory: its bytes. capability: CUDA's; None: a new one's."""
        self.kind, self.memory, self.capability = kind, memory, capability or NEW
        # Real tensors (a table on the host) become fake when they are first used.
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, tensors are fake, and this process behaves like a rank on the device."""
        global _current
        assert _current is None, "a simulation is already running"
        _current = self
        try:
            with self.fake:
                yield
        finally:
            _current = None

    def on_device(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, without values. On an accelerator it is a copy."""
        fake = tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)
        return fake.clone() if self.kind == "cuda" else fake


_current: Simulation | None = None
_thread = threading.local()  # in_host: other threads build rows during the step's operations


def is_simulated() -> bool:
    """Whether a simulation runs."""
    return _current is not None


def device_kind(device: torch.device) -> str:
    """The type of device for which kernels and sizes are chosen."""
    return device.type if _current is None else _current.kind


def device_memory(device: torch.device) -> int:
    """Bytes of the accelerator for which sizes are chosen; 0 for a CPU."""
    if _current is not None:
        return _current.memory
    return _memory(device) if device.type == "cuda" else 0


def device_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of the CUDA device for which kernels are chosen; NEW on a machine without one."""
    if _current is not None:
        return _current.capability
    return _capability(device) if torch.cuda.is_available() else NEW


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def read(values: Tensor, planned: Callable[[], Sequence[Any]]) -> list[Any]:
    """values.tolist(), for which the host waits. In a simulation, the result of `planned`."""
    return values.tolist() if _current is None else list(planned())


def on_host() -> AbstractContextManager[Any]:
    """Inside, new tensors have values even in a simulation: torch computes the offsets of shards with them."""
    return nullcontext() if _current is None else unset_fake_temporarily()


@contextmanager
def host_memory() -> Iterator[None]:
    """Inside, this thread's new tensors are in host memory, not on the simulated accelerator."""
    before, _thread.in_host = getattr(_thread, "in_host", False), True
    try:
        yield
    finally:
        _thread.in_host = before


def fills_host() -> bool:
    """Whether new tensors are in host memory, not on the simulated accelerator."""
    return getattr(_thread, "in_host", False) and _current is not None and _current.kind == "cuda"


def has_ended(work: Any) -> bool:
    """Whether the transfer of a message has ended. Always true in a simulation."""
    return _current is not None or bool(work.is_completed())
