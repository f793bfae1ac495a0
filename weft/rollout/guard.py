"""`python guard.py COMMAND ...` runs COMMAND in a process group of its own, and ends the whole group when its standard
input is closed: which happens when the process that started it ends, however that ends. Imports nothing of weft.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

_GRACE = 5.0  # seconds between asking and ending


def main(command: list[str]) -> int:
    """Run it to its end, and take what it has left of its group with it. Returns its exit status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent)
    threading.Thread(target=_end_when_closed, args=(child.pid,), daemon=True).start()
    status = child.wait()
    _signal(child.pid, signal.SIGKILL)
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
    sys.exit(main(sys.argv[1:]))
