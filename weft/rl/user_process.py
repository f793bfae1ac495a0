"""What a process of the user's code (reward functions, environments) shares with the controller: how both talk.

It is started afresh (`python -m weft.rl.NAME`), not forked: the controller has threads. It imports no torch. Requests
come in on its standard input, answers go out on its output, each pickled behind its length.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import sys
from typing import IO, Any, Protocol

HEADER = struct.Struct(">Q")  # bytes of the pickle that follows
IMPORT_SECONDS = 120  # that such a process may take to import the user's code


class Readable(Protocol):
    """A stream of bytes; `read` waits for all that is asked for."""

    def read(self, size: int, /) -> bytes: ...


class Writable(Protocol):
    """A stream of bytes."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> None: ...


def take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """(requests, answers). Whatever the user's code prints goes to the standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def add_import_folders(path: list[str]) -> None:
    """Import from the controller's folders, too."""
    sys.path += [folder for folder in path if folder not in sys.path]


def prefer_oom_kill() -> None:
    """Where the kernel is short of memory it ends this process, and not the controller."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def receive(stream: Readable) -> Any:
    """The next thing that was sent; None at the end."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(*HEADER.unpack(header))) if len(header) == HEADER.size else None


def send(stream: Writable, thing: Any) -> None:
    """Sends it at once."""
    stream.write(packed(thing))
    stream.flush()


def packed(thing: Any) -> bytes:
    """As it travels."""
    data = pickle.dumps(thing)
    return HEADER.pack(len(data)) + data
