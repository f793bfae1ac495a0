"""RUN/system.jsonl: use of this machine over time, sampled by a thread: processor, memory, NVIDIA GPUs.

GPUs are read through NVML, the library of NVIDIA's driver, which does not wait for kernels or streams. Its functions
and structures: docs.nvidia.com/deploy/nvml-api. Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from weft.terminal import say

SYSTEM = "system.jsonl"
_CGROUP = Path("/sys/fs/cgroup")  # of a container
_STOP_SECONDS = 2.0  # the driver of a lost GPU may not respond; the run then ends without the last sample
_UUID_BYTES = 96
_DIE = 0  # NVML_TEMPERATURE_GPU
_GIB = float(1 << 30)


class _Utilisation(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sampling period in which kernels ran, and in which memory was accessed."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def nvml() -> Any:
    """NVML, initialised; None without an NVIDIA driver."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


class Gpus:
    """The GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES, which is torch's. most: maximum number
    of them; None for all. library: NVML.

    Numbers in CUDA_VISIBLE_DEVICES are read in the order of the bus, as with CUDA_DEVICE_ORDER=PCI_BUS_ID. CUDA's
    default order differs if a machine has GPUs of different models."""

    def __init__(self, library: Any, limit: int | None = None) -> None:
        self._library = library
        self._handles = [] if library is None or limit == 0 else self._visible()[:limit]

    def __len__(self) -> int:
        return len(self._handles)

    def sample(self) -> dict[str, float]:
        """Metric -> value. Metrics that a GPU or the driver does not support are missing."""
        values: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            name = f"system/gpu{index}"
            busy, memory = _Utilisation(), _Memory()
            celsius, milliwatts = ctypes.c_uint(), ctypes.c_uint()
            if self._read("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(busy)):
                values[f"{name}/utilisation"] = busy.gpu / 100.0
            if self._read("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
                values[f"{name}/memory_gib"] = memory.used / _GIB
            if self._read("nvmlDeviceGetTemperature", handle, _DIE, ctypes.byref(celsius)):
                values[f"{name}/celsius"] = float(celsius.value)
            if self._read("nvmlDeviceGetPowerUsage", handle, ctypes.byref(milliwatts)):
                values[f"{name}/watts"] = milliwatts.value / 1000.0
        return values

    def _read(self, function: str, *arguments: Any) -> bool:
        """Whether a function of NVML exists and succeeded."""
        try:
            return bool(getattr(self._library, function)(*arguments) == 0)
        except AttributeError:  # an old driver
            return False

    def _visible(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if not self._read("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return []
        handles_by_index = [self._by_index(index) for index in range(count.value)]
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is None:
            return [handle for handle in handles_by_index if handle is not None]
        handles: list[ctypes.c_void_p] = []
        for word in (part.strip() for part in named.split(",")):
            handle = (
                handles_by_index[int(word)]
                if word.isdecimal() and int(word) < len(handles_by_index)
                else self._by_uuid(word, handles_by_index)
            )
            if handle is None:
                break  # CUDA ignores the devices after a missing device
            handles.append(handle)
        return handles

    def _by_index(self, index: int) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        return handle if self._read("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)) else None

    def _by_uuid(self, word: str, handles: list[ctypes.c_void_p | None]) -> ctypes.c_void_p | None:
        """The GPU whose UUID begins with this word, or the MIG instance with this UUID."""
        if word.startswith("GPU-"):
            return next(
                (handle for handle in handles if handle is not None and self._uuid(handle).startswith(word)), None
            )
        handle = ctypes.c_void_p()
        ok = self._read("nvmlDeviceGetHandleByUUID", word.encode(), ctypes.byref(handle))
        return handle if word.startswith("MIG-") and ok else None

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_UUID_BYTES)
        return text.value.decode() if self._read("nvmlDeviceGetUUID", handle, text, _UUID_BYTES) else ""


def host_sample() -> dict[str, float]:
    """The share of all cores that was busy since the last call, and the used memory: of the container if it has a
    limit, without the kernel's file cache."""
    memory = psutil.virtual_memory()
    used = float(memory.total - memory.available)
    with suppress(OSError, ValueError, KeyError):  # not in a container, or a container without a limit
        if int((_CGROUP / "memory.max").read_text()) < memory.total:
            figures = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            used = float(int((_CGROUP / "memory.current").read_text()) - int(figures["inactive_file"]))
    return {"system/cpu": psutil.cpu_percent(None) / 100.0, "system/memory_gib": used / _GIB}


class SystemMonitor:
    """Inside, a thread samples the machine at once, every `seconds`, and at the end. Each sample is a line of `path`,
    and is passed to `send`. gpus: as `most` of Gpus. step: the last finished step, which each sample contains; the
    caller sets it."""

    def __init__(
        self, path: Path, seconds: float, gpus: int | None, step: int, send: Callable[[Mapping[str, object]], None]
    ) -> None:
        self.step = step
        self._path, self._seconds, self._limit, self._send = path, seconds, gpus, send
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system", daemon=True)

    def __enter__(self) -> SystemMonitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_STOP_SECONDS)

    def _work(self) -> None:
        try:
            host_sample()  # psutil's first share of busy cores covers no interval
            gpus = Gpus(nvml() if self._limit != 0 else None, self._limit)
            ends = self._stop.wait(min(1.0, self._seconds))
            while True:
                values = {**host_sample(), **gpus.sample()}
                line: dict[str, float] = {"step": self.step, "time": round(time.time(), 3)}
                line |= {name: float(f"{value:.4g}") for name, value in values.items()}
                with self._path.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                self._send({name: value for name, value in line.items() if name != "time"})
                if ends:
                    return
                ends = self._stop.wait(self._seconds)
        except OSError as error:  # a failed sample must not end a run
            say(f"system   weft no longer writes {self._path.name}: {error.strerror or error}", error=True)
