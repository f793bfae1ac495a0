"""Messages and set-up of processes that run user code (reward functions, environments).

The controller starts them with `python -m weft.rl.NAME` and does not fork, because it has threads. They import no
torch. Requests arrive on standard input and answers go to standard output, each a pickle preceded by its length. The
process that the controller starts is a supervisor; its fork runs the user's code. All processes that the code starts,
also in other sessions, end with the fork. `os.getppid()` of user code is not the controller.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from typing import IO, Any, Protocol

import psutil

from weft.launch.machine import adopt_orphans, end_with_parent
from weft.launch.reaper import descendants

HEADER = struct.Struct(">Q")  # bytes of the pickle that follows
IMPORT_SECONDS = 120  # limit on importing the user's code
_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0  # for processes that were killed to end


class ByteReader(Protocol):
    """A byte stream whose `read` blocks until `size` bytes have arrived, or the stream has ended."""

    def read(self, size: int, /) -> bytes: ...


class ByteWriter(Protocol):
    """A byte stream."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> None: ...


def supervise(max_processes: int) -> None:
    """Fork, and return in the child. This process waits until the child has ended, or until the controller requests its
    end (SIGTERM, or the end of standard input). It then kills all processes that the child has started, and exits with
    the child's status (128 + the number for a signal). max_processes: processes that the child may start.

    The child itself may not notice the controller's end: a function that hangs reads no input, and may hold the
    interpreter's lock forever.
    """
    adopt_orphans()
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    supervisor, child = os.getpid(), os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        woken.close()
        wakes.close()
        os.setpgid(0, 0)  # the supervisor must not get signals to the group of user code
        end_with_parent(signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)  # it has died in between
        return
    events, before = select.poll(), len(psutil.pids())
    events.register(0, 0)  # wait only for the hang-up, not for input
    events.register(woken, select.POLLIN)
    status: int | None = None
    while status is None and not signals:
        events_by_descriptor = dict(events.poll(_LOOK_SECONDS * 1000))
        with contextlib.suppress(BlockingIOError):
            woken.recv(1 << 12)
        status = _bury().get(child)
        if 0 in events_by_descriptor:
            break
        if len(psutil.pids()) - before > max_processes and len(descendants([psutil.Process()])) > max_processes:
            os.write(2, f"user code has started more than {max_processes} processes; weft ends it\n".encode())
            break
    buried = _end_descendants()
    status = buried.get(child, -signal.SIGKILL) if status is None else status
    os._exit(status if status >= 0 else 128 - status)


def _bury() -> dict[int, int]:
    """Process id -> status (negative: the signal) of children that have ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            ended[waited[0]] = os.waitstatus_to_exitcode(waited[1])
    return ended


def _end_descendants() -> dict[int, int]:
    """Kill all processes that descend from this one, which has adopted those without a parent; returns statuses as
    _bury does. They are stopped first, so that none of them starts another process meanwhile."""
    stopped, ended = set[psutil.Process](), dict[int, int]()
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end:
        ended |= _bury()
        running = descendants([psutil.Process()])
        if not running:
            break
        unstopped = [process for process in running if process not in stopped]
        stopped.update(unstopped)
        for process in unstopped or running:
            with contextlib.suppress(psutil.Error):
                process.suspend() if unstopped else process.kill()
        if not unstopped:
            time.sleep(0.01)
    return ended


def take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Take standard input and output as (requests, answers). Prints of user code then go to standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def end_if_forked(process: int) -> None:
    """End this process unless its id is `process`: it is a fork that user code made and that has returned from it. It
    must not answer the controller, too."""
    if os.getpid() != process:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


def add_import_folders(path: list[str]) -> None:
    """Add the controller's import folders to sys.path."""
    sys.path += [folder for folder in path if folder not in sys.path]


def prefer_oom_kill() -> None:
    """Let the kernel kill this process before the controller when memory is short."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def receive(stream: ByteReader) -> Any:
    """Read the next message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(*HEADER.unpack(header))) if len(header) == HEADER.size else None


def send(stream: ByteWriter, message: Any) -> None:
    """Send a message and flush."""
    stream.write(packed(message))
    stream.flush()


def packed(message: Any) -> bytes:
    """The bytes of a message."""
    data = pickle.dumps(message)
    return HEADER.pack(len(data)) + data
