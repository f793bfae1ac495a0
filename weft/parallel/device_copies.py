"""fsdp.cpu_offload=optimizer: copies of shards on the accelerator, in the compute dtype. The master weights are on the
host.

FSDP2's CPUOffloadPolicy copies a unit's fp32 shard to the accelerator in each gather. Here FSDP gathers from a copy
that stays on the accelerator. The copy is refreshed once after each optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from weft.parallel.fsdp import fsdp_modules

_STAGING = 2  # number of pinned buffers: one is filled while another is copied


@dataclass
class _DeviceCopy:
    """A shard on the accelerator. host: FSDP's view of the master shard, with padding. shard: the same elements on the
    accelerator, in the compute dtype; None before the first refresh. stale: whether the master has changed since."""

    parameter: FSDPParam
    host: Tensor
    shard: Tensor | None = None
    stale: bool = True


@dataclass
class _Staging:
    """A pinned buffer between host and accelerator. done: event of the last copy from the buffer."""

    memory: Tensor
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class DeviceCopies:
    """Copies of the shards of all FSDP units of a module.

    The optimizer calls `update` for each parameter after it has stepped it. `refresh` updates all stale copies. On CUDA
    copies run on a separate stream, and `refresh` makes the compute stream wait for it.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._copies: dict[nn.Parameter, _DeviceCopy] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: list[_Staging] = []
        self._turn = 0

    @property
    def bytes(self) -> int:
        """Bytes on the accelerator."""
        return sum(copy.shard.nbytes for copy in self._copies.values() if copy.shard is not None)

    def invalidate(self) -> None:
        """Mark all copies as stale, after a change of master weights."""
        for copy in self._copies.values():
            copy.stale = True

    def free(self) -> int:
        """Free the copies until the next `refresh`. Returns the number of freed bytes."""
        freed = self.bytes
        for copy in self._copies.values():
            copy.parameter._sharded_param_data = copy.host
            copy.shard, copy.stale = None, True
        return freed

    @torch.no_grad()
    def refresh(self) -> None:
        """Update every stale copy, and make the compute stream wait for all copies."""
        if not self._copies:
            self._find_shards()
        for parameter, copy in self._copies.items():
            if copy.stale:
                self.update(parameter)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @torch.no_grad()
    def update(self, parameter: nn.Parameter) -> None:
        """Update the copy of one parameter from its master."""
        copy = self._copies[parameter]
        if copy.shard is None:
            dtype = copy.parameter.param_dtype or copy.host.dtype
            # Allocated on the compute stream, which waits for the copies before it reads them.
            copy.shard = torch.empty_like(copy.host, dtype=dtype, device=self._device, pin_memory=False)
        copy.parameter._sharded_param_data = copy.shard
        if self._stream is None:
            copy.shard.copy_(copy.host)
        else:
            self._send(copy.host, copy.shard)
        copy.stale = False

    def _find_shards(self) -> None:
        """Find FSDP's parameters. FSDP's lazy initialisation must run first, as in the first forward, because it
        determines memory and dtypes. Parameters with their own conversion (fsdp_pre_all_gather) are skipped."""
        assert isinstance(self._module, FSDPModule)
        self._module._get_fsdp_state()._lazy_init()
        for unit in fsdp_modules(self._module):
            group = unit._get_fsdp_state()._fsdp_param_group
            for parameter in [] if group is None else group.fsdp_params:
                if not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
                    copy = _DeviceCopy(parameter, parameter._sharded_param_data)
                    self._copies[parameter.sharded_param] = copy

    def _send(self, host: Tensor, shard: Tensor) -> None:
        """Copy to CUDA through pinned memory. The host converts to the compute dtype, so half the bytes are sent."""
        assert self._stream is not None
        if not self._staging:
            largest = max(copy.host.numel() for copy in self._copies.values())
            self._staging = [
                _Staging(torch.empty(largest, dtype=torch.float32, pin_memory=True)) for _ in range(_STAGING)
            ]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        staging = self._staging[self._turn]
        self._turn = (self._turn + 1) % _STAGING
        staging.done.synchronize()
        pinned = staging.memory.view(torch.uint8)[: shard.nbytes].view(shard.dtype)
        pinned.copy_(host)
        with torch.cuda.stream(self._stream):
            shard.copy_(pinned, non_blocking=True)
            staging.done.record(self._stream)
