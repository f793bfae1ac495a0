"""Messages of the sync port, changed at random: each, at either end, is understood or refused in a sentence."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.fuzz import fuzz
from weft.inference.weight_sync.protocol import Delivery, SyncChannel, SyncError, Ticket
from weft.inference.weight_sync.server import Connection, SyncServer, _Pending

TICKET = Ticket("127.0.0.1", 1, "key", "engine-0")
ENTRY = ["a", "float32", [2, 3]]
BEGIN = {
    "begin": "weights", "version": 3, "verify": True, "transport": {"kind": "shared"}, "manifest": [ENTRY],
    "adapter": None, "form": ["fp8", 128, 128], "deltas": False,
}  # fmt: skip
HELLO = {
    "hello": 7, "version": 3, "has": None, "holds": None, "base": True, "joined": None, "mapped": None, "key": "key",
    "torch": "", "nccl": "",
    "name": "engine-0", "member": 0,
}  # fmt: skip


class RecordedSocket:
    """A socket at whose other end this was said, and then the connection closed."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def recv(self, size: int) -> bytes:
        part, self.data = self.data[:size], self.data[size:]
        return part

    def nothing(self, *_: Any) -> None: ...

    sendall = settimeout = setblocking = setsockopt = close = nothing


def framed(*messages: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "big") + text for text in messages)


def channel(*messages: bytes) -> SyncChannel:
    sent: Any = RecordedSocket(framed(*messages))
    return SyncChannel(sent, "the other end", 5.0)


def as_stranger(content: bytes) -> None:
    connection: Any = RecordedSocket(content)
    pending = _Pending(connection)
    while not pending.hear() and not pending.is_closed:
        pass
    if not pending.is_closed:
        pending.hello()


def as_engine(content: bytes) -> None:
    """At the sender's end, after it has shown its ticket."""
    server = object.__new__(SyncServer)
    for ask in (lambda: server.prove(1, 3, {"a": 1}), lambda: server.wait_taken(0, 3), lambda: server.commit(3)):
        server.active = [Connection(channel(content), "engine-0", 0, None, True, None, None)]
        with suppress(SyncError):
            ask()


def as_sender(bucket: bytes, content: bytes) -> None:
    """At an engine's end: in place of each message of a sync."""
    messages = [json.dumps(BEGIN).encode(), bucket, b'{"end": 1}', b'{"commit": 3}', b'{"done": 3}']
    for position in range(len(messages)):
        delivery = object.__new__(Delivery)
        delivery.ticket, delivery.version, delivery.has = TICKET, 3, None
        delivery.channel = channel(*messages[:position], content, *messages[position + 1 :])
        with suppress(SyncError):
            for part in delivery.parts():
                for _ in part.tensors():
                    pass
                part.finish()


def take(bucket: bytes, path: Path) -> None:
    content = path.read_bytes()
    for text in (content, framed(content)):
        as_stranger(text)
    as_engine(content)
    as_sender(bucket, content)


@pytest.mark.parametrize(
    "count", [500, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_messages(count: int, tmp_path: Path) -> None:
    (tmp_path / "bucket").write_bytes(bytes(4096))
    bucket = json.dumps({"bucket": 0, "path": str(tmp_path / "bucket"), "rows": [[*ENTRY, 0, 24]]}).encode()
    messages = [
        HELLO, BEGIN, {"received": {"a": 1}, "placed": None}, {"received": {"a": 1}, "placed": {"a": 1}}, {"took": 0},
        {"committed": 3}, {"end": 1}, {"commit": 3}, {"done": 3}, {"error": "no room"},
    ]  # fmt: skip
    seeds = [*(json.dumps(message).encode() for message in messages), bucket]
    fuzz(partial(take, bucket), seeds, count, suffix=".json", allowed=())
