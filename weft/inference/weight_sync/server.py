"""The sender's side of protocol.py: accepts the workers of engines and exchanges messages with them.

Anyone who reaches the port can connect. A connection without a valid ticket takes at most a few KB for a few seconds,
while other connections are served, and cannot end or delay a sync.
"""

from __future__ import annotations

import hmac
import select
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from weft.inference.weight_sync.buckets import BucketTensor, SyncContent
from weft.inference.weight_sync.protocol import (
    PROTOCOL,
    WORKER_DIED,
    SyncChannel,
    SyncError,
    Ticket,
    parsed,
    understood,
)
from weft.inference.weight_sync.verify import compare
from weft.launch import flight

_HELLO_SECONDS = 5.0  # for a peer to show its ticket
_HELLO_BYTES = 4096  # most bytes of the message with the ticket
_MOST_PENDING = 64  # connections without a ticket yet; beyond that, the oldest is closed


@dataclass(frozen=True)
class Connection:
    """An admitted worker of an engine, with the fields of its hello (protocol.Delivery)."""

    channel: SyncChannel
    name: str
    member: int
    has: int | None
    base: bool
    joined: str | None
    mapped: str | None
    torch: str = ""
    nccl: str = ""
    holds: int | None = None


@dataclass(frozen=True)
class Hello:
    """The first message of a worker of an engine (protocol.Delivery)."""

    protocol: int
    key: bytes
    name: str
    member: int
    version: int
    has: int | None
    holds: int | None
    base: bool
    joined: str | None
    mapped: str | None
    torch: str
    nccl: str

    @staticmethod
    def parse(text: bytes) -> Hello:
        """Parse a message. ValueError if it is malformed."""
        message = parsed(text)
        kinds: dict[str, tuple[type, ...]] = {
            "hello": (int,), "key": (str,), "name": (str,), "member": (int,), "version": (int,),
            "has": (int, type(None)), "holds": (int, type(None)), "base": (bool,), "joined": (str, type(None)),
            "mapped": (str, type(None)),
            "torch": (str,), "nccl": (str,),
        }  # fmt: skip
        if message.keys() != kinds.keys():
            raise ValueError(f"the message has the fields {', '.join(message)}")
        for name, allowed in kinds.items():
            if not isinstance(message[name], allowed) or (isinstance(message[name], bool) and bool not in allowed):
                raise ValueError(f"{name} is {message[name]!r:.40}")
        message["key"] = message["key"].encode(errors="replace")
        return Hello(message.pop("hello"), **message)


class _Pending:
    """A connection that has not shown a ticket yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.deadline = time.monotonic() + _HELLO_SECONDS
        self.is_closed = False
        self._received = bytearray()
        connection.setblocking(False)

    def hear(self) -> bool:
        """Read without blocking, at most the first message; returns whether that is complete. Sets `is_closed` if the
        peer left or announced too long a message."""
        try:
            part = self.socket.recv(self._lacking())
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        self._received += part
        self.is_closed = not part or self._lacking() > _HELLO_BYTES
        return not self.is_closed and not self._lacking()

    def hello(self) -> Hello | None:
        """The first message; None if it is malformed."""
        try:
            return Hello.parse(bytes(self._received[4:]))
        except ValueError:
            return None

    def _lacking(self) -> int:
        """Bytes that the first message still lacks."""
        if len(self._received) < 4:
            return 4 - len(self._received)
        return 4 + int.from_bytes(self._received[:4], "big") - len(self._received)


class SyncServer:
    """The listening socket of one sending rank, and its connections during a sync. timeout: seconds of any wait."""

    def __init__(self, address: str, port: int, timeout: float) -> None:
        self.timeout = timeout
        self.connections = list[Connection]()  # all that are connected
        self.active = list[Connection]()  # those that receive the current part
        self._listener = socket.create_server((address, port), backlog=128)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])

    def welcome(self, tickets: Iterable[Ticket], version: int, attempt: int | None = None) -> None:
        """Accept connections until every worker with one of these tickets has requested this version. SyncError if a
        worker does not connect in time, has died, or requests another version. By then the workers of other engines are
        connected, so that leave() can notify them. attempt: the number of this sync; reports of workers that died in an
        earlier sync are ignored."""
        missing = {(ticket.name, ticket.member): ticket for ticket in tickets}
        waiting, deadline = list[_Pending](), time.monotonic() + self.timeout
        failures = list[SyncError]()
        try:
            while missing:
                flight.beat()
                for pending in self._complete_hellos(waiting, deadline):
                    try:
                        connection = self._admit(pending, missing, version, attempt)
                    except SyncError as error:
                        pending.socket.close()
                        failures.append(error)
                        missing = {worker: ticket for worker, ticket in missing.items() if worker[0] != error.engine}
                        continue
                    if connection is not None:
                        self.connections.append(connection)
                if missing and time.monotonic() > deadline:
                    names = ", ".join(sorted({name for name, _ in missing}))
                    raise SyncError(
                        f"{names} did not connect for version {version} within {self.timeout:g} s. Check that the "
                        "engine is running and was told to receive this version.",
                        late=True,
                        engine=next(iter(missing))[0],
                    )
        finally:
            for pending in waiting:
                pending.socket.close()
        if failures:
            raise failures[0]

    def _complete_hellos(self, waiting: list[_Pending], deadline: float) -> list[_Pending]:
        """The pending connections whose first message is complete. Connections that are too late or too many are
        closed."""
        now = time.monotonic()
        until = min([deadline, now + 1.0, *(pending.deadline for pending in waiting)])
        # poll(), because select() takes no descriptor above 1023
        poll = select.poll()
        for listened in (self._listener, *(pending.socket for pending in waiting)):
            poll.register(listened, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(max(0.0, until - now) * 1000)}
        if self._listener.fileno() in readable:
            with suppress(OSError):  # the peer has already left
                waiting.append(_Pending(self._listener.accept()[0]))
        complete = [pending for pending in waiting if pending.socket.fileno() in readable and pending.hear()]
        refused = [pending for pending in waiting if pending.is_closed or time.monotonic() > pending.deadline]
        refused += waiting[:-_MOST_PENDING]
        for pending in {*complete, *refused}:
            waiting.remove(pending)
            if pending not in complete:
                pending.socket.close()
        return complete

    def _admit(
        self, pending: _Pending, missing: dict[tuple[str, int], Ticket], version: int, attempt: int | None
    ) -> Connection | None:
        """The connection of a worker with a valid ticket; others are closed, and give None. SyncError if the worker has
        another protocol, has died, or requests another version."""
        hello = pending.hello()
        worker = (hello.name, hello.member) if hello is not None else None
        ticket = missing.get(worker) if worker is not None else None
        if hello is None or worker is None or ticket is None or not hmac.compare_digest(ticket.key.encode(), hello.key):
            pending.socket.close()
            return None
        if hello.version == WORKER_DIED and hello.has != attempt:  # in a sync that is over
            pending.socket.close()
            return None
        with _at_engine(ticket.name):
            if hello.protocol != PROTOCOL:
                raise SyncError(
                    f"{ticket.name} uses sync protocol {hello.protocol}, but this trainer uses {PROTOCOL}: their "
                    "versions of weft differ"
                )
            if hello.version == WORKER_DIED:
                raise SyncError(f"{ticket.name} died before it connected for version {version}")
            if hello.version != version:
                raise SyncError(f"{ticket.name} requests version {hello.version}, but version {version} is being sent")
        del missing[worker]
        channel = SyncChannel(pending.socket, ticket.name, self.timeout)
        return Connection(
            channel, *worker, hello.has, hello.base, hello.joined, hello.mapped, hello.torch, hello.nccl, hello.holds
        )

    def begin(
        self, content: SyncContent, version: int, transports: Sequence[Mapping[str, Any]], verify: bool, deltas: bool
    ) -> None:
        """Announce a part. transports: per active connection, the message fields of its transport. deltas: as in
        SyncPart."""
        manifest = [[entry.name, entry.dtype, entry.shape] for entry in content.entries.values()]
        form = None if content.form is None else [content.form.name, *content.form.block]
        for connection, transport in zip(self.active, transports, strict=True):
            with _at_engine(connection.name):
                connection.channel.write(
                    begin=content.kind, version=version, verify=verify, transport=transport, manifest=manifest,
                    adapter=content.adapter, form=form, deltas=deltas,
                )  # fmt: skip

    def post(self, number: int, rows: Sequence[BucketTensor], location: Mapping[str, Any]) -> None:
        """Announce a bucket. location: the message field with its path, number of bytes or slot."""
        table = [
            [row.entry.name, row.entry.dtype, row.entry.shape, row.offset, row.length]
            + ([] if row.changed is None else [row.changed, row.digest])
            for row in rows
        ]
        for connection in self.active:
            with _at_engine(connection.name):
                connection.channel.write(bucket=number, rows=table, **location)

    def wait_taken(self, number: int, version: int) -> None:
        """Wait until every active connection has taken this bucket."""
        for connection, message in self._answers(f"bucket {number} of version {version} to be taken", "took"):
            if message["took"] != number:
                text = f"{connection.name} took bucket {message['took']} of version {version}, not {number}"
                raise SyncError(text, engine=connection.name)

    def prove(self, buckets: int, version: int, sent: Mapping[str, int]) -> str:
        """After the last bucket: compare the checksums that every engine reports with those of the sent tensors.
        buckets: their number. sent: checksums by tensor; {} to compare nothing. SyncError if one differs. Returns the
        engines and tensors for which a patch did not result in the sent tensor; "" if there are none."""
        problem = ""
        for connection in self.active:
            with _at_engine(connection.name):
                connection.channel.write(end=buckets)
        for connection, report in self._answers(f"what it received of version {version}", "received"):
            with _at_engine(connection.name):
                with understood(connection.name):
                    received, placed = sums_of(report["received"]), report["placed"]
                    placed, mismatched = None if placed is None else sums_of(placed), list(report["mismatched"])
                if mismatched:
                    first = f"first {mismatched[0]!s:.200}"
                    problem = (
                        f"{connection.name}: {len(mismatched)} patched tensors differ from the sent tensors, {first}"
                    )
                else:
                    compare(version, connection.name, sent, received, placed)
        return problem

    def again(self, version: int) -> None:
        """Tell the engines that the part will be sent again."""
        for connection in self.active:
            with _at_engine(connection.name):
                connection.channel.write(again=version)

    def commit(self, version: int) -> None:
        """Allow the engines to sample with this version, and wait for their confirmation."""
        for connection in self.active:
            with _at_engine(connection.name):
                connection.channel.write(commit=version)
        for _ in self._answers(f"version {version} to be confirmed", "committed"):
            pass

    def leave(self, version: int, error: str | None = None) -> None:
        """Tell every connection that the sync is done, or its error, and close the connection."""
        for connection in self.connections:
            with suppress(SyncError):
                connection.channel.write(**({"done": version} if error is None else {"error": error}))
            connection.channel.close()
        self.connections = self.active = []

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _answers(self, awaited: str, key: str) -> Iterator[tuple[Connection, dict[str, Any]]]:
        for connection in self.active:
            flight.beat()
            try:
                yield connection, connection.channel.read(awaited, key)
            except SyncError as error:
                text = str(error)
                text = text if text.startswith(connection.name) else f"{connection.name}: {text}"
                raise SyncError(text, error.late, connection.name) from error


@contextmanager
def _at_engine(name: str) -> Iterator[None]:
    """A context that adds this engine's name to a SyncError."""
    try:
        yield
    except SyncError as error:
        error.engine = name
        raise


def sums_of(value: Any) -> dict[str, int]:
    """Validate checksums by name. TypeError if they are malformed."""
    if not isinstance(value, dict) or not all(isinstance(number, int) for number in value.values()):
        raise TypeError("checksums must be an object of numbers by name")
    return value
