"""`python supervisor.py FOLDER COMMAND ...` runs COMMAND in its own process group. It ends the group when its standard
input closes, which happens whenever the process that started it ends. Then it removes FOLDER, unless that is "".
Imports nothing from weft.

A forked child does the work, because Ray kills the children of its processes, but not the grandchildren. If the child
is killed, the parent cleans up.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def main(folder: str, command: list[str]) -> int:
    """Fork the supervising child and wait for it. Returns the exit status of the command."""
    group, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(group)
        return _supervise(folder, command, pipe)
    os.close(pipe)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        _clear(int(os.read(group, 32) or b"0"), folder)
    return _exit_status(status)


def _supervise(folder: str, command: list[str], pipe: int) -> int:
    """Run the command until it ends. pipe: file descriptor to which its process group is written."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent)
    os.write(pipe, str(child.pid).encode())
    threading.Thread(target=_end_when_closed, args=(child.pid,), daemon=True).start()
    status = child.wait()
    _clear(child.pid, folder)
    return _exit_status(status)


def _clear(group: int, folder: str) -> None:
    """Kill the remaining processes of the command's group and remove its folder. group: 0 if the command never
    started."""
    if group:
        _signal(group, signal.SIGKILL)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _exit_status(status: int) -> int:
    """The status as a shell reports it: 128 + signal for a command that a signal ended."""
    return status if status >= 0 else 128 - status


def _end_when_closed(group: int) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    _signal(group, signal.SIGTERM)
    time.sleep(_GRACE)
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _end_with_parent() -> None:
    """Ask Linux to kill the child if this process is killed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
