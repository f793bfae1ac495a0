"""Sums of squares of gradients, on the host, while backward still computes the gradients of other units.

With fsdp.cpu_offload=optimizer FSDP copies each unit's reduced gradients to the host as soon as they are reduced. A
thread of this file then computes their norms, so that after backward only the last unit's are left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from weft.parallel.fsdp import announce_reductions, fsdp_modules
from weft.parallel.mesh import local_shard
from weft.parallel.shards.cuts import ShardSpecs, split

# An fp32 sum of squares on CPU runs through few accumulators: over 1e8 elements its root is 1% too small (torch 2.13).
# With a few large elements among many small ones, 2e-5 over 2^16 elements and 3e-6 over 2^13.
CPU_CHUNK = 1 << 13


def counted_parts(name: str, parameter: nn.Parameter, cuts: ShardSpecs | None) -> list[tuple[int, Tensor]]:
    """(number of ranks that hold the same elements, these elements) of a parameter's gradient on this rank."""
    assert parameter.grad is not None
    gradient, cut = local_shard(parameter.grad), None if cuts is None else cuts.get(name)
    return [(1, gradient)] if cut is None else split(parameter, gradient, cut)


def host_norms(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """The norms of pieces of each tensor, in fp32 or better."""
    return [
        list(torch._foreach_norm(list(part.reshape(-1).split(CPU_CHUNK)), 2.0, dtype=norm_dtype(part)))
        if part.numel()
        else []
        for part in parts
    ]


def norm_dtype(part: Tensor) -> torch.dtype:
    """Dtype of a norm."""
    return torch.float64 if part.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Known:
    """Norms of the parts of a gradient, and which gradient it was."""

    norms: Future[list[list[Tensor]]]
    address: int
    version: int


class EarlyNorms:
    """Norms of gradients that have arrived in the last backward of a step.

    late: parameters whose gradient changes after backward, because it is summed over other axes.
    """

    def __init__(self, module: nn.Module, cuts: ShardSpecs, late: Collection[str]) -> None:
        self._module, self._cuts = module, cuts
        self._names: Mapping[nn.Parameter, str] = {
            parameter: name for name, parameter in module.named_parameters() if name not in late
        }
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradient-norms")
        self._known: dict[nn.Parameter, _Known] = {}
        self._reducing: FSDPModule | None = None
        for unit in fsdp_modules(module):
            announce_reductions(unit, self._reduces)

    def known(self, parameter: nn.Parameter) -> list[list[Tensor]] | None:
        """Norms of pieces of each part of a gradient; None if they were not computed, or if the gradient has changed
        since."""
        entry = self._known.get(parameter)
        if entry is None or parameter.grad is None:
            return None
        gradient = local_shard(parameter.grad)
        if gradient.data_ptr() != entry.address or gradient._version != entry.version:
            return None
        return entry.norms.result()

    def forget(self) -> None:
        """Wait for the thread, and forget all norms: the next step has other gradients."""
        for entry in self._known.values():
            entry.norms.exception()
        self._known, self._reducing = {}, None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _reduces(self, unit: FSDPModule) -> None:
        """Called when a unit begins to reduce its gradients: those of the unit before it have arrived, or are on their
        way to pinned memory."""
        if self._reducing is unit:
            return
        before, self._reducing = self._reducing, unit
        assert isinstance(self._module, FSDPModule)
        state: Any = self._module._get_fsdp_state()
        group = None if before is None else before._get_fsdp_state()._fsdp_param_group
        if group is None or not state._state_ctx.is_last_backward:
            return
        for parameter in group.fsdp_params:
            name = self._names.get(parameter.sharded_param)
            if name is not None and parameter.sharded_param.grad is not None:
                self._submit(name, parameter.sharded_param, parameter.grad_offload_event)

    def _submit(self, name: str, parameter: nn.Parameter, arrival: torch.Event | None) -> None:
        assert parameter.grad is not None
        gradient, cuts = local_shard(parameter.grad), self._cuts
        parts = [part for _, part in counted_parts(name, parameter, cuts)]

        def compute() -> list[list[Tensor]]:
            if arrival is not None:
                arrival.synchronize()
            with torch.no_grad():
                return host_norms(parts)

        self._known[parameter] = _Known(self._thread.submit(compute), gradient.data_ptr(), gradient._version)
