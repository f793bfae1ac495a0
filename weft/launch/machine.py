"""The resources of this machine (cores and accelerators), and the accelerators that a dry run can assume. Imports torch
only to count accelerators."""

from __future__ import annotations

import os
import platform
import random
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.launch.accelerators import ASSUMABLE
from weft.launch.options import Device

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_GAPS = 64 << 20  # smaller ones are not worth a call
_HBLKHD, _UORDBLKS = 4, 7  # places in glibc's struct mallinfo2 of ten sizes: bytes in mappings, and in the heap

# Below the ports that Linux assigns (ip_local_port_range), so that a free port stays free; above the ports of Ray's
# workers.
PORTS = range(20_000, 32_000)

ADDRESS = "WEFT_ADDRESS"  # environment variable with the address of an actor's host


def host_address() -> str:
    """The address at which other hosts reach this machine. It is the same in all processes of a machine."""
    return os.environ.get(ADDRESS, "127.0.0.1")


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, the environment of this process and of the processes that it starts has these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def free_port() -> int:
    """A free port, for a server that needs its port before it starts."""
    source = random.SystemRandom()  # a seeded generator would return the same port in all processes
    for port in source.sample(PORTS, len(PORTS)):
        with socket.socket() as server, suppress(OSError):
            server.bind(("", port))
            return port
    raise OSError(f"no port of {PORTS[0]} to {PORTS[-1]} is free")


def cpu_cores() -> int:
    """The number of cores that this process may use, by its affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no container (cgroup v2), or one without a quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def accelerator_count(device: Device) -> int:
    """The number of accelerators for ranks of this machine; 0 for CPU ranks. Imports torch."""
    if device == "cpu":
        return 0
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and count == 0:
        raise UserError(
            "--device cuda, but torch sees no CUDA device here: use --device cpu, or install torch with CUDA. For a "
            "dry run use --assume h100-80gb."
        )
    return count


def device_name(kind: str) -> str:
    """The name of this process's accelerator, or of the processor. kind: type of a torch.device."""
    if kind == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return f"{processor_name()} (CPU)"


def processor_name() -> str:
    """The vendor's name of the processor, if Linux reports it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check_ranks_fit(ranks: int, device: Device) -> None:
    """Raise UserError if `ranks` exceed the accelerators, so that some ranks would share one."""
    count = accelerator_count(device)
    if count and ranks > count:
        raise UserError(
            f"{ranks} ranks, but this machine has {count} accelerator{'s' if count > 1 else ''}: "
            f"use --nproc {count} or less, or --device cpu."
        )


def keep_freed_memory() -> None:
    """Let this process keep up to 1 GiB of freed memory for later allocations (glibc only).

    Otherwise a step on a CPU maps and unmaps the memory of its tensors page by page, which takes 5 to 13% of its time.
    """
    if sys.platform != "linux":
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


class HeapGaps:
    """Returns the pages of gaps in the heap to the system, where they let the process grow (glibc 2.33 and later).

    With `keep_freed_memory`, tensors that outlive a layer lie between others that were freed. Larger ones do not fit
    into these gaps, so that without this the process grows with every layer (docs/benchmarks/memory.md).
    """

    def __init__(self) -> None:
        self._libc: Any = None
        if sys.platform == "linux":
            import ctypes

            libc = ctypes.CDLL(None)
            if hasattr(libc, "mallinfo2") and hasattr(libc, "malloc_trim"):
                fields = {"_fields_": [("sizes", ctypes.c_size_t * 10)]}
                libc.mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), fields)
                self._libc = libc
        self._peak = 0  # bytes of this process at most, when gaps were last looked at
        self._start = 0 if self._libc is None else self._used_and_unused()[1]
        self._unused: int | None = None  # anonymous memory not in use, one layer after gaps were last returned

    def before_layer(self) -> None:
        """Return gaps if the process has a new peak, and gaps have grown by more than a sixteenth of the bytes in use.
        The allocator keeps the memory that one layer frees for the next layer."""
        if self._libc is None:
            return
        # Not getrusage's ru_maxrss, which begins with the peak of the process that started this one.
        peak = int(Path("/proc/self/status").read_bytes().partition(b"VmHWM:")[2].split(None, 1)[0]) << 10
        if self._unused is not None and peak - self._peak < _GAPS:  # the following calls take up to milliseconds
            return
        self._peak = peak
        used, unused = self._used_and_unused()
        if self._unused is None:
            self._unused = unused
        elif unused - self._unused > max(_GAPS, used // 16):
            self._return()

    def before_backward(self) -> None:
        """Return memory that forwards of layers have freed to the system, if it is much: backward allocates other
        sizes."""
        if self._unused is not None and self._unused - self._start > _GAPS:
            self._return()

    def _return(self) -> None:
        self._libc.malloc_trim(0)
        self._unused = None

    def _used_and_unused(self) -> tuple[int, int]:
        """(bytes in use, other bytes of this process's anonymous memory)."""
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
        sizes = self._libc.mallinfo2().sizes
        used = sizes[_HBLKHD] + sizes[_UORDBLKS]
        return used, (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE") - used


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let Linux end this process when its parent ends, even by SIGKILL, so that no orphan uses accelerators."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    _control_process(set_parent_death_signal, number)


def adopt_orphans() -> None:
    """Let Linux make this process the parent of its descendants whose parent ends, so that it can find them all."""
    set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER
    _control_process(set_child_subreaper, 1)


def _control_process(option: int, value: int) -> None:
    """prctl(2) of Linux; nothing on other systems."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(option, value)


def oom_kills() -> int | None:
    """The number of processes of this container that the kernel killed for lack of memory; None if unknown."""
    for path in _memory_event_files():
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _memory_event_files() -> Iterator[Path]:
    """Possible memory event files of this process's control groups (v1 and v2): at the group's path, and at the root,
    where they are in a container."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in groups:
        if number == "0":
            root, file = Path("/sys/fs/cgroup"), "memory.events"
        elif "memory" in controllers.split(","):
            root, file = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
        else:
            continue
        yield root / path.lstrip("/") / file
        yield root / file


@dataclass(frozen=True)
class Accelerator:
    """An accelerator that a dry run can assume. memory: bytes that torch reports, within a few percent; vendors state
    more than a process can use. capability: CUDA's; None for AMD."""

    name: str
    memory: int
    capability: tuple[int, int] | None = (9, 0)


ACCELERATORS = {
    name: Accelerator(name, int(rates.gib * (1 << 30)), card.capability) for name, (card, rates) in ASSUMABLE.items()
}


def accelerator(name: str | None) -> Accelerator | None:
    """The accelerator with this name; None for None. Raises UserError with all names for an unknown name."""
    if name is None:
        return None
    if name not in ACCELERATORS:
        raise UserError(f"--assume {name}: unknown accelerator; use one of {', '.join(ACCELERATORS)}.")
    return ACCELERATORS[name]


def known_accelerator(device: str, memory: int) -> Accelerator | None:
    """The accelerator with this name and memory in bytes, as torch reports them; None if no entry matches."""
    fits = (candidate for candidate in ACCELERATORS.values() if abs(candidate.memory - memory) < 0.1 * memory)
    return next((candidate for candidate in fits if re.search(ASSUMABLE[candidate.name][0].pattern, device)), None)
