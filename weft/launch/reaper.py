"""A process next to the controller of a run. It outlives the controller and ends the processes that the run started.

The controller registers roots: processes that it starts for the run. The reaper records them and their descendants, by
process id and start time, in a file of the run's scratch folder. So it also finds processes that leave their process
group or session, or whose parent ends. When the controller has ended, it kills the recorded processes and removes
scratch folders and shared memory. If the reaper was also killed, the next start reads the file (scratch.py).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from weft.launch.scratch import (
    MARK,
    PROCESSES,
    kill_all,
    marked_processes,
    note_of,
    remove_abandoned,
    remove_abandoned_memory,
    scratch_folder,
)
from weft.version import PACKAGE

_LOOK_SECONDS = 1.0
_END_SECONDS = 20.0  # time in which the reaper must kill the remaining processes
_ROOT, _BASE, _END = "root", "base", "end"  # the words of the controller's lines


class Reaper:
    """The controller's side. Outside of `reaping` there is no process, and nothing is recorded or killed."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        if folder is not None:
            paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft.launch.reaper", str(os.getpid()), str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip

    @property
    def mark(self) -> dict[str, str]:
        """Environment variables of a root, which its descendants inherit."""
        return {} if self._folder is None else {MARK: str(self._folder)}

    def add(self, *roots: int) -> None:
        """Register processes by their ids. They and their descendants end with the run."""
        self._tell(*(f"{_ROOT} {root}" for root in roots))

    def clean(self, base: str) -> None:
        """Register `base`: if the controller is killed, abandoned scratch folders in it are removed."""
        self._tell(f"{_BASE} {base}")

    def end(self) -> None:
        """Let the reaper kill the remaining processes and end. If the reaper takes too long, it is killed."""
        if self._process is None:
            return
        self._tell(_END)
        try:
            self._process.communicate(timeout=_END_SECONDS)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self._process.kill()
            self._process.wait(_END_SECONDS)
        self._process = None

    def _tell(self, *lines: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # the reaper was killed; the next start does its work
                self._process.stdin.write("".join(f"{line}\n" for line in lines).encode())
                self._process.stdin.flush()


# The reaper of this process's run. It is global, because there is one per process.
_current = Reaper()


def current() -> Reaper:
    """The reaper of the run in this process."""
    return _current


@contextmanager
def reaping() -> Iterator[Reaper]:
    """Inside, this process has a reaper."""
    global _current
    before = _current
    with scratch_folder("run-") as folder:
        _current = Reaper(folder)
        _current.clean(tempfile.gettempdir())
        try:
            yield _current
        finally:
            _current.end()
            _current = before


def descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The descendants of `roots`, without the roots."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    descendants_found, waiting = dict[psutil.Process, None](), list(roots)
    while waiting:
        parent = waiting.pop()
        for child in children.get(parent.pid, ()):
            if child not in descendants_found:
                descendants_found[child] = None
                waiting.append(child)
    return list(descendants_found)


class _Notes:
    """The processes of a run, in memory and in the file that the next start reads."""

    def __init__(self, folder: Path) -> None:
        self.processes: dict[psutil.Process, None] = {}
        self._file = (folder / PROCESSES).open("a", encoding="ascii")

    def add(self, processes: Iterable[psutil.Process]) -> None:
        """Note processes that are not noted yet."""
        for process in processes:
            if process not in self.processes and process.pid != os.getpid():
                with suppress(psutil.Error, OSError, ValueError):
                    self.processes[process] = None
                    self._file.write(note_of(process))
        with suppress(OSError, ValueError):  # the folder's disk is full
            self._file.flush()

    def look(self) -> None:
        """Note the descendants of the noted processes."""
        running = [process for process in self.processes if process.is_running()]
        self.add(descendants(running))


def main(controller: int, folder: Path) -> None:
    """Serve until the controller writes that the run is over, or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to all processes of the job ends the controller, too
    notes, bases, received, over = _Notes(folder), dict[str, None](), b"", False
    orders = select.poll()
    orders.register(0, select.POLLIN)
    while not over:
        if orders.poll(_LOOK_SECONDS * 1000):
            data = os.read(0, 1 << 16)
            received += data
            *lines, received = received.split(b"\n")
            for line in lines:
                word, _, argument = line.decode().partition(" ")
                if word == _ROOT:
                    with suppress(psutil.Error):
                        notes.add([psutil.Process(int(argument))])
                elif word == _BASE:
                    bases[argument] = None
                over = over or word == _END
            if not data:
                break
        elif os.getppid() != controller:
            break  # a forked child of the controller still holds the other end of the pipe
        notes.look()
    for _ in range(3):  # a process may start another while it is killed
        notes.look()
        notes.add(marked_processes(folder))
        kill_all([process for process in notes.processes if process.is_running()])
    remove_abandoned_memory()
    if not over:
        for base in bases:
            remove_abandoned(base)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
