"""Messages and set-up of processes that run user code (reward functions, environments).

The controller starts them with `python -m weft.rl.NAME` and does not fork, because it has threads. They import no
torch. Requests arrive on standard input and answers go to standard output, each a pickle preceded by its length.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import sys
from typing import IO, Any, Protocol

HEADER = struct.Struct(">Q")  # bytes of the pickle that follows
IMPORT_SECONDS = 120  # limit on importing the user's code


class Readable(Protocol):
    """A byte stream whose `read` blocks until `size` bytes have arrived, or the stream has ended."""

    def read(self, size: int, /) -> bytes: ...


class Writable(Protocol):
    """A byte stream."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> None: ...


def take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Take standard input and output as (requests, answers). Prints of user code then go to standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def add_import_folders(path: list[str]) -> None:
    """Add the controller's import folders to sys.path."""
    sys.path += [folder for folder in path if folder not in sys.path]


def prefer_oom_kill() -> None:
    """Let the kernel kill this process before the controller when memory is short."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def receive(stream: Readable) -> Any:
    """Read the next message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(*HEADER.unpack(header))) if len(header) == HEADER.size else None


def send(stream: Writable, thing: Any) -> None:
    """Send a message and flush."""
    stream.write(packed(thing))
    stream.flush()


def packed(thing: Any) -> bytes:
    """The bytes of a message."""
    data = pickle.dumps(thing)
    return HEADER.pack(len(data)) + data
