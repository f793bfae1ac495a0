"""`python guard.py FOLDER COMMAND ...` runs COMMAND in a process group of its own, and ends the whole group when its
standard input is closed: which happens when the process that started it ends, however that ends. Then FOLDER, if one is
named, is removed. Imports nothing of weft.

It does so in a child of its own: Ray ends the children of its processes when it ends these, but not theirs. Should that
child be killed, the parent does the rest.
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

_GRACE = 5.0  # seconds between asking and ending


def main(folder: str, command: list[str]) -> int:
    """Wait for the child that guards. Returns the exit status of the command."""
    group, tells = os.pipe()
    guard = os.fork()
    if guard == 0:
        os.close(group)
        return _guard(folder, command, tells)
    os.close(tells)
    status = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    if status < 0:
        _clear(int(os.read(group, 32) or b"0"), folder)
    return _told(status)


def _guard(folder: str, command: list[str], tells: int) -> int:
    """Run it to its end. tells: a pipe that is told its process group."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent)
    os.write(tells, str(child.pid).encode())
    threading.Thread(target=_end_when_closed, args=(child.pid,), daemon=True).start()
    status = child.wait()
    _clear(child.pid, folder)
    return _told(status)


def _clear(group: int, folder: str) -> None:
    """End what a command has left of its group, and remove its folder. group: 0 where it never began."""
    if group:
        _signal(group, signal.SIGKILL)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _told(status: int) -> int:
    """As a shell says it where a signal was the end."""
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
    """Ask Linux to end the child should this process be killed itself."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
