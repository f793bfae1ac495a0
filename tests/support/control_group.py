"""A memory control group of Linux for processes of a test, whose limit the kernel enforces by killing them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def memory_group(megabytes: int) -> Iterator[Path | None]:
    """Within the group of this process; None where 0 are asked for. OSError where this user may make none."""
    if not megabytes:
        yield None
        return
    folder = _process_group() / f"weft-test-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(megabytes << 20))
        yield folder
    finally:
        for _ in range(100):  # until the last process has ended
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def enter(folder: Path | None) -> None:
    """This process, and all that it starts."""
    if folder is not None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def can_limit_memory() -> bool:
    """Whether groups can be made here."""
    try:
        with memory_group(64):
            return True
    except OSError:
        return False


def _process_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if number == "0" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/")
    raise OSError("no memory controller")
