"""Peak memory, in GiB (2^30 bytes)."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

GIB = float(1 << 30)


def own_peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has held at once: of the accelerator, or resident on the host for CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / GIB
    return _peak_resident_bytes() / GIB


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike ru_maxrss, VmHWM does not survive exec: it has no share of the launcher that started this process.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
