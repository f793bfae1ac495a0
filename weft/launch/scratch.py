"""Scratch folders in the temporary directory, files of shared memory, and processes of a run. If a run was killed, the
next start removes them.

The user of a folder or a file holds a lock on it. The kernel releases the lock when the process ends for any reason.
Processes are identified by the id and start time that the run recorded (reaper.py), never by their names.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PREFIX = "weft-"
PROCESSES = "processes"  # a file in a folder, with a line for each process of its run, written by `note_of`
MARK = "WEFT_RUN_SCRATCH"  # an environment variable of processes of a run: the path of the folder
SHARED_MEMORY = Path("/dev/shm")
MEMORY_PREFIX = "weft-sync-"  # of files of shared memory, which their owner locks
_LOCK = "in-use"  # a file that the users of the folder lock
_SAME_SECONDS = 2.0  # start times are derived from the clock, which may be adjusted
_KILL_SECONDS = 10.0  # time for killed processes to end


@contextmanager
def scratch_folder(kind: str = "", base: str | None = None) -> Iterator[Path]:
    """A folder that only this user can read. It is removed with the context. kind: prefix of its name. base: its
    parent; by default the temporary directory."""
    base = base or tempfile.gettempdir()
    remove_abandoned(base)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}", dir=base))
    unlocked = folder / f"{_LOCK}.new"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unlocked.rename(folder / _LOCK)  # no other process sees it before it is locked
        yield folder
    finally:
        _remove(folder)
        os.close(descriptor)


def remove_abandoned(base: str) -> None:
    """Remove folders without a user, whose lock is free, and kill the processes that are recorded in them."""
    for folder in Path(base).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kill_all(processes_of(folder))
                _remove(folder)
            finally:
                os.close(descriptor)


def remove_abandoned_memory() -> None:
    """Remove files of shared memory without an owner, whose lock is free."""
    for path in SHARED_MEMORY.glob(f"{MEMORY_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def note_of(process: psutil.Process) -> str:
    """A process as a line of PROCESSES: its id and its start time."""
    return f"{process.pid} {process.create_time():.2f}\n"


def processes_of(folder: Path) -> list[psutil.Process]:
    """The running processes of the folder's run: recorded in its file PROCESSES, or with its mark in their environment.
    Empty without such a file. Another process with the id of an ended one does not count."""
    running = dict[psutil.Process, None]()
    with suppress(OSError):
        for line in (folder / PROCESSES).read_text(encoding="ascii", errors="replace").splitlines():
            with suppress(ValueError, psutil.Error):
                number, started = line.split()
                process = psutil.Process(int(number))
                if abs(process.create_time() - float(started)) < _SAME_SECONDS and is_running(process):
                    running[process] = None
        running |= dict.fromkeys(marked_processes(folder))
    return list(running)


def marked_processes(folder: Path) -> list[psutil.Process]:
    """The processes that inherited the mark of the folder's run, regardless of their parents."""
    marked = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == str(folder):
                marked.append(process)
    return marked


def kill_all(processes: Collection[psutil.Process], seconds: float = _KILL_SECONDS) -> list[psutil.Process]:
    """Kill these processes, and wait at most `seconds` for them to end. Returns the processes that still run."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    end = time.monotonic() + seconds
    alive = [process for process in processes if is_running(process)]
    while alive and time.monotonic() < end:
        time.sleep(0.02)
        alive = [process for process in alive if is_running(process)]
    return alive


def is_running(process: psutil.Process) -> bool:
    """Whether a process runs. False for a zombie. True for a process that this user cannot inspect."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _remove(folder: Path) -> None:
    """Remove a folder. Retries for two seconds, because processes that are ending may still write to it."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
