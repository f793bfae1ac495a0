"""Traces of chosen steps by torch's profiler, with the phases of the flight record as ranges in them.

RUN/profile/rank-0-step-3.json.gz opens in https://ui.perfetto.dev. With profile.memory on CUDA there is also
rank-0-step-3.memory.pickle, which opens in https://pytorch.org/memory_viz. Imports torch only when a step is traced.

This file also measures the peak memory of the process.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config.run_schema import ProfileConfig
from weft.errors import UserError
from weft.launch import flight

if TYPE_CHECKING:
    import torch

FOLDER = "profile"
# Maximum number of allocations and frees in a memory snapshot.
_MOST_EVENTS = 1_000_000


def check_profile(config: ProfileConfig, *, steps: int | None = None, world: int | None = None) -> None:
    """Raise UserError if the config contains a step or rank that the run does not have. steps, world: numbers of steps
    and ranks of the run; None: not checked."""
    late = [] if steps is None else [step for step in config.steps if step > steps]
    if late:
        raise UserError(f"profile.steps contains step {late[0]}, but the run has {steps}: use earlier steps.")
    absent = [] if world is None else [rank for rank in config.ranks if rank >= world]
    if config.steps and absent:
        raise UserError(
            f"profile.ranks contains rank {absent[0]}, but the run has {world}, 0 to {world - 1}: use some of these."
            if world and world > 1
            else f"profile.ranks contains rank {absent[0]}, but the run has only rank 0: remove profile.ranks."
        )


@contextmanager
def profiled(config: ProfileConfig, step: int, folder: Path, rank: int) -> Iterator[None]:
    """Inside, trace this step if the config selects this step and rank. folder: RUN."""
    if step not in config.steps or rank not in config.ranks:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto writes two lines per trace into the progress bar
    import torch

    path = folder / FOLDER / f"rank-{rank}-step-{step}"
    path.parent.mkdir(exist_ok=True)
    snapshot = config.memory and torch.cuda.is_available()
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
    with torch.profiler.profile(record_shapes=True, profile_memory=config.memory) as profile, _ranges():
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels still in the queue belong to the step
        flight.enter("profile")
    if snapshot:
        torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
    profile.export_chrome_trace(f"{path}.json.gz")


@contextmanager
def _ranges() -> Iterator[None]:
    """Inside, each phase is a range in the trace: `forward 1`, `backward 1`, `optimizer`."""
    import torch

    open_range: list[Any] = []

    def leave() -> None:
        if open_range:
            open_range.pop().__exit__(None, None, None)

    def enter(phase: str, micro_batch: int) -> None:
        leave()
        name = f"{phase} {micro_batch}" if micro_batch else phase
        open_range.append(torch.profiler.record_function(f"weft: {name}"))
        open_range[0].__enter__()

    flight.recorder.listeners.append(enter)
    try:
        yield
    finally:
        leave()
        flight.recorder.listeners.remove(enter)


def own_peak_memory_gib(device: torch.device) -> float:
    """The peak memory of this process in GiB (2^30 bytes): of the accelerator, or resident on the host for CPU."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / (1 << 30)
    return _peak_resident_bytes() / (1 << 30)


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # VmHWM is reset by exec, unlike ru_maxrss, so it does not include the launcher that started this process.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
