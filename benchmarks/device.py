"""What benchmarks ask of a device, CUDA or CPU: time, memory, rates of copies and matrix products."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch
from torch import Tensor

from weft.launch.machine import processor_name


@dataclass(frozen=True)
class Device:
    """kind: `cuda` or `cpu`. All memory is in bytes, all time in seconds."""

    kind: str

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def name(self) -> str:
        """As its maker calls it."""
        return torch.cuda.get_device_name() if self.cuda else processor_name()

    def now(self) -> float:
        """The clock, once the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, function: Callable[[], object], runs: int = 10, warm: int = 3) -> float:
        """The median of so many calls, after some that warm up."""
        for _ in range(warm):
            function()
        if not self.cuda:
            times = []
            for _ in range(runs):
                began = time.perf_counter()
                function()
                times.append(time.perf_counter() - began)
            return statistics.median(times)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        for start, end in events:
            start.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) / 1e3 for start, end in events)

    def on_host(self, size: int) -> Tensor:
        """Bytes of the host's memory, pinned for CUDA and all touched."""
        return torch.ones(size, dtype=torch.uint8, pin_memory=self.cuda)

    # ------------------------------------------------------------ memory

    @property
    def memory(self) -> int:
        """All that there is."""
        return torch.cuda.mem_get_info()[1] if self.cuda else int(psutil.virtual_memory().total)

    @property
    def free(self) -> int:
        """What nobody has."""
        self.collect()
        return torch.cuda.mem_get_info()[0] if self.cuda else int(psutil.virtual_memory().available)

    def collect(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def reset_peak(self) -> int:
        """Bytes in use, from which the peak now rises."""
        self.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()  # the allocator's retries
            return int(torch.cuda.memory_allocated())
        Path("/proc/self/clear_refs").write_text("5")
        return _process_memory("VmRSS")

    def peak(self) -> int:
        """The most that this process has held at once since then."""
        return int(torch.cuda.max_memory_allocated()) if self.cuda else _process_memory("VmHWM")

    def allocator(self) -> dict[str, float]:
        """What the caching allocator had to do: retries (each of which waits for the device), and the bytes, in GiB,
        that it had reserved beyond those in use, at the most since reset_peak()."""
        stats = torch.cuda.memory_stats()
        beyond = stats["reserved_bytes.all.peak"] - stats["allocated_bytes.all.peak"]
        return {"allocator's retries": stats["num_alloc_retries"], "fragments GiB": max(0, beyond) / 2**30}

    def answers(self) -> bool:
        """Whether the device still computes: after an illegal access nothing of this process does."""
        try:
            return bool(torch.ones(2, device=self.kind).sum().item() == 2)
        except RuntimeError:
            return False


def _process_memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


# ---------------------------------------------------------------- rates


def matmul_seconds(device: Device, m: int, k: int, n: int, runs: int = 10) -> float:
    """Of [m, k] @ [k, n] in bf16, on random numbers: zeros are faster."""
    a, b = (torch.randn(shape, device=device.kind, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    out = torch.empty(m, n, device=device.kind, dtype=torch.bfloat16)
    return device.seconds(lambda: torch.mm(a, b, out=out), runs)


@cache
def matmul_rate(device: Device, size: int = 0) -> float:
    """FLOPs/s of a large square product in bf16, in this process."""
    size = size or (8192 if device.cuda else 256)
    return 2.0 * size**3 / matmul_seconds(device, size, size, size, runs=20)


def copy_rate(device: Device, source: Tensor, target: Tensor) -> float:
    """Bytes/s of copying one to the other; on one device the bytes that are read and those that are written count."""
    seconds = device.seconds(lambda: target.copy_(source, non_blocking=True))
    same_device = source.device == target.device
    return source.nbytes * (2 if same_device else 1) / seconds
