"""fsdp.cpu_offload=optimizer: the accelerator's copies, in the compute dtype, of shards whose masters are on the host.

FSDP2's CPUOffloadPolicy copies a unit's fp32 shard to the accelerator each time that it gathers the unit. Here FSDP
gathers from a copy that stays on the accelerator, and is renewed once after each update of its master.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from weft.parallel.fsdp import fsdp_modules

_STAGING = 2  # buffers of pinned memory, so that one is filled while another is copied


@dataclass
class _DeviceCopy:
    """A shard on the accelerator. host: FSDP's view of the master, with the padding of uneven shards. shard: the same
    elements in the compute dtype."""

    parameter: FSDPParam
    host: Tensor
    shard: Tensor | None = None
    stale: bool = True


@dataclass
class _Staging:
    """Pinned memory through which shards go to the accelerator, and when the last copy out of it is done."""

    memory: Tensor
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class DeviceCopies:
    """Copies of the shards of all FSDP units of a module.

    They follow `update`, which the optimizer calls for each parameter that it has stepped, and `refresh`, which renews
    all that are stale. On CUDA copies run in a stream of their own; `refresh` lets the stream that computes wait.
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
        """Say that masters have changed."""
        for copy in self._copies.values():
            copy.stale = True

    def free(self) -> int:
        """Give up the accelerator's memory until the next `refresh`; returns the bytes."""
        freed = self.bytes
        for copy in self._copies.values():
            copy.parameter._sharded_param_data = copy.host
            copy.shard, copy.stale = None, True
        return freed

    @torch.no_grad()
    def refresh(self) -> None:
        """Renew every stale copy, and wait, in the stream that computes, for all of them."""
        if not self._copies:
            self._find()
        for parameter, copy in self._copies.items():
            if copy.stale:
                self.update(parameter)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @torch.no_grad()
    def update(self, parameter: nn.Parameter) -> None:
        """Renew the copy of one parameter, whose master has its new value."""
        copy = self._copies[parameter]
        if copy.shard is None:
            dtype = copy.parameter.param_dtype or copy.host.dtype
            # Allocated in the stream that computes, which waits for copies before it reads them.
            copy.shard = torch.empty_like(copy.host, dtype=dtype, device=self._device, pin_memory=False)
        copy.parameter._sharded_param_data = copy.shard
        if self._stream is None:
            copy.shard.copy_(copy.host)
        else:
            self._send(copy.host, copy.shard)
        copy.stale = False

    def _find(self) -> None:
        """Look up FSDP's parameters, after FSDP has settled their memory and dtypes, as it would in the first
        forward. Parameters that convert themselves when they are gathered are left alone."""
        assert isinstance(self._module, FSDPModule)
        self._module._get_fsdp_state()._lazy_init()
        for unit in fsdp_modules(self._module):
            group = unit._get_fsdp_state()._fsdp_param_group
            for parameter in [] if group is None else group.fsdp_params:
                if not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
                    copy = _DeviceCopy(parameter, parameter._sharded_param_data)
                    self._copies[parameter.sharded_param] = copy

    def _send(self, host: Tensor, shard: Tensor) -> None:
        """Copy to CUDA through pinned memory, which is filled in the compute dtype: half the bytes travel."""
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
