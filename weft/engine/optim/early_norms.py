"""Norms of gradients on the host, computed while backward still computes the gradients of other units.

With fsdp.cpu_offload=optimizer FSDP copies each unit's gradients to the host as soon as they are reduced. A thread
computes their norms meanwhile. After backward only the norms of the last unit remain to be computed.
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

# torch's fp32 norm on CPU adds up in few accumulators: over 1e8 elements the result is 1% too small (torch 2.13).
# If few elements are much larger than the rest, the error is 2e-5 over 2^16 elements and 3e-6 over 2^13.
CPU_CHUNK = 1 << 13


def counted_parts(name: str, parameter: nn.Parameter, cuts: ShardSpecs | None) -> list[tuple[int, Tensor]]:
    """This rank's parts of a parameter's gradient: (number of ranks that hold the same elements, the elements)."""
    assert parameter.grad is not None
    gradient, cut = local_shard(parameter.grad), None if cuts is None else cuts.get(name)
    return [(1, gradient)] if cut is None else split(parameter, gradient, cut)


def host_norms(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """For each tensor, the norms of its chunks, in fp32 or fp64."""
    return [
        list(torch._foreach_norm(list(part.reshape(-1).split(CPU_CHUNK)), 2.0, dtype=norm_dtype(part)))
        if part.numel()
        else []
        for part in parts
    ]


def norm_dtype(part: Tensor) -> torch.dtype:
    """Dtype in which the norm of a tensor is computed."""
    return torch.float64 if part.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _NormsOf:
    """Norms of the parts of a gradient. address, version: identify the gradient and its contents."""

    norms: Future[list[list[Tensor]]]
    address: int
    version: int


class EarlyNorms:
    """Norms of the gradients that arrive on the host during the last backward of a step.

    late: names of parameters to skip, because their gradients change after backward: they are summed over other axes.
    """

    def __init__(self, module: nn.Module, cuts: ShardSpecs, late: Collection[str]) -> None:
        self._module, self._cuts = module, cuts
        self._names: Mapping[nn.Parameter, str] = {
            parameter: name for name, parameter in module.named_parameters() if name not in late
        }
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradient-norms")
        self._norms: dict[nn.Parameter, _NormsOf] = {}
        self._reducing: FSDPModule | None = None
        for unit in fsdp_modules(module):
            announce_reductions(unit, self._reduces)

    def norms_of(self, parameter: nn.Parameter) -> list[list[Tensor]] | None:
        """Norms of the chunks of each part of a gradient. None if they were not computed, or if the gradient has
        changed since."""
        entry = self._norms.get(parameter)
        if entry is None or parameter.grad is None:
            return None
        gradient = local_shard(parameter.grad)
        if gradient.data_ptr() != entry.address or gradient._version != entry.version:
            return None
        return entry.norms.result()

    def forget(self) -> None:
        """Wait for the thread and drop all norms, before the next step."""
        for entry in self._norms.values():
            entry.norms.exception()
        self._norms, self._reducing = {}, None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _reduces(self, unit: FSDPModule) -> None:
        """Called when a unit begins to reduce its gradients. The gradients of the previous unit have then arrived in
        pinned memory, or their copy has begun."""
        if self._reducing is unit:
            return
        previous, self._reducing = self._reducing, unit
        assert isinstance(self._module, FSDPModule)
        state: Any = self._module._get_fsdp_state()
        group = None if previous is None else previous._get_fsdp_state()._fsdp_param_group
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

        self._norms[parameter] = _NormsOf(self._thread.submit(compute), gradient.data_ptr(), gradient._version)
