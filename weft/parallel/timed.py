"""FSDP2's collectives on a CPU, timed: the computing thread waits for each of them.

Uses FSDP2's registration (torch 2.13): set_custom_all_gather, set_custom_reduce_scatter, set_all_reduce_hook. Payloads
and buffers are FSDP2's defaults.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.launch import timing
from weft.parallel.fsdp import fsdp_modules
from weft.versions import all_gather_single, reduce_scatter_single


def time_collectives(module: nn.Module) -> None:
    """Report to `timing` how long the units of `module`, on a CPU, wait for gathers and reductions."""
    gather = TimedAllGather()
    for unit in fsdp_modules(module):
        scatter = TimedReduceScatter()
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
        unit.set_all_reduce_hook(scatter.reduced)


class TimedAllGather:
    """The all-gather of shards."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        with timing.waiting():
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class TimedReduceScatter:
    """The reduce-scatter over shards, and the all-reduce over replicas that follows it."""

    def __init__(self) -> None:
        self._ready_time = 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._ready_time = time.perf_counter()
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
        self._ready_time = time.perf_counter()
        return work

    def reduced(self, _: Tensor) -> None:
        """Hook: FSDP2 calls it after the all-reduce over replicas, or at once if there is none."""
        timing.waited(self._ready_time)
