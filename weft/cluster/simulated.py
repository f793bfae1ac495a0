"""What stands in for an accelerator while a step is simulated: torch's fake tensors, on the CPU, which have sizes and
no values.

Code that chooses kernels or sizes by the device asks `device_kind`; code that waits for a number asks `read`. Nothing
else need know of a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # gives collectives of fake tensors their shapes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily


class Simulation:
    """The simulation of a device."""

    def __init__(self, kind: str) -> None:
        """kind: the type of the device, `cuda` or `cpu`."""
        self.kind = kind
        # What is no fake tensor (a table on the host) becomes one at its first use.
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, tensors are fake, and this process computes as on the device."""
        global _current
        assert _current is None, "a simulation runs already"
        _current = self
        try:
            with self.fake:
                yield
        finally:
            _current = None


_current: Simulation | None = None


def runs() -> bool:
    """Whether a simulation runs."""
    return _current is not None


def device_kind(device: torch.device) -> str:
    """The type of device for which kernels and sizes are chosen."""
    return device.type if _current is None else _current.kind


def read(values: Tensor, planned: Callable[[], Sequence[Any]]) -> list[Any]:
    """values.tolist(), for which the host waits. planned: what a simulation takes for them."""
    return values.tolist() if _current is None else list(planned())


def on_host() -> AbstractContextManager[Any]:
    """Inside, new tensors have values in a simulation, too: torch computes with them where shards begin."""
    return nullcontext() if _current is None else unset_fake_temporarily()


def has_ended(work: Any) -> bool:
    """Whether a message has left. In a simulation all have, at once."""
    return _current is not None or bool(work.is_completed())
