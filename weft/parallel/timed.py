"""FSDP2's collectives on a CPU, timed: there the thread that computes waits for each of them.

Through FSDP2's own registration (torch 2.13): set_custom_all_gather, set_custom_reduce_scatter, set_all_reduce_hook.
What is sent, and into which buffers, is what FSDP2 does by default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.parallel.fsdp import fsdp_modules
from weft.telemetry import timing
from weft.versions import all_gather_single, reduce_scatter_single


def time_collectives(module: nn.Module) -> None:
    """Tell `timing` how long the units of `module`, which is on a CPU, wait for their gathers and reductions."""
    gather = TimedAllGather()
    for unit in fsdp_modules(module):
        scatter = TimedReduceScatter()
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
        unit.set_all_reduce_hook(scatter.reduced)


class TimedAllGather:
    """A gather of shards."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        with timing.waiting():
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class TimedReduceScatter:
    """A reduction over the ranks that hold shards, and over those that hold copies right after it."""

    def __init__(self) -> None:
        self._ready = 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._ready = time.perf_counter()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with timing.waiting():
            work = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._ready = time.perf_counter()
        return work

    def reduced(self, _: Tensor) -> None:
        """FSDP2 calls this when the reduction over copies is done; where there is none, at once."""
        timing.waited(self._ready)
