"""Peak memory, in GiB (2^30 bytes)."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

GIB = float(1 << 30)


def own_peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has held at once: of the accelerator, or resident on the host for CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / GIB
    return _peak_resident_bytes() / GIB


def peak_memory_gib(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """own_peak_memory_gib of the rank of `group` where it is largest; collective."""
    own = own_peak_memory_gib(device)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return own
    largest = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return float(largest.item())


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike ru_maxrss, VmHWM does not survive exec: it has no share of the launcher that started this process.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
