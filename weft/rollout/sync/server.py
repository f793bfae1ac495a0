"""Where engines come for weights: the sender's end of protocol.py's messages.

Whoever reaches the port may connect. Until it has shown a ticket it costs a few KB and a few seconds, during which
others are heard as well, and nothing that it says ends or delays a sync.
"""

from __future__ import annotations

import hmac
import select
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.rollout.sync.buckets import Content, Row
from weft.rollout.sync.protocol import GONE, PROTOCOL, Channel, SyncError, Ticket, parsed, understood
from weft.rollout.sync.verify import compare
from weft.telemetry import flight

_HELLO_SECONDS = 5.0  # that a peer has to show its ticket
_HELLO_BYTES = 4096  # of what it says there
_GUESTS = 64  # peers that have not shown one; the first of more has to go


@dataclass(frozen=True)
class Link:
    """A worker of an engine that is connected, and what it said of itself (wire.Delivery)."""

    channel: Channel
    name: str
    member: int
    has: int | None
    base: bool
    joined: str | None
    mapped: str | None


@dataclass(frozen=True)
class Hello:
    """The first message of a worker of an engine (wire.Delivery)."""

    protocol: int
    key: bytes
    name: str
    member: int
    version: int
    has: int | None
    base: bool
    joined: str | None
    mapped: str | None

    @staticmethod
    def of(text: bytes) -> Hello:
        """ValueError where it is no such message."""
        message = parsed(text)
        kinds: dict[str, tuple[type, ...]] = {
            "hello": (int,), "key": (str,), "name": (str,), "member": (int,), "version": (int,),
            "has": (int, type(None)), "base": (bool,), "joined": (str, type(None)), "mapped": (str, type(None)),
        }  # fmt: skip
        if message.keys() != kinds.keys():
            raise ValueError(f"it has the fields {', '.join(message)}")
        for name, allowed in kinds.items():
            if not isinstance(message[name], allowed) or (isinstance(message[name], bool) and bool not in allowed):
                raise ValueError(f"{name} is {message[name]!r:.40}")
        message["key"] = message["key"].encode(errors="replace")
        return Hello(message.pop("hello"), **message)


class _Guest:
    """One that is connected, and has not shown a ticket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + _HELLO_SECONDS
        self.gone = False
        self._said = bytearray()
        connection.setblocking(False)

    def hear(self) -> bool:
        """Read what is there, and nothing behind the first message; whether that is whole."""
        try:
            part = self.connection.recv(self._lacking())
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        self._said += part
        self.gone = not part or self._lacking() > _HELLO_BYTES
        return not self.gone and not self._lacking()

    def hello(self) -> Hello | None:
        """What it has said; None where that is no hello."""
        try:
            return Hello.of(bytes(self._said[4:]))
        except ValueError:
            return None

    def _lacking(self) -> int:
        """Bytes."""
        if len(self._said) < 4:
            return 4 - len(self._said)
        return 4 + int.from_bytes(self._said[:4], "big") - len(self._said)


class Desk:
    """A listening socket of one rank, and whoever is connected during a sync."""

    def __init__(self, address: str, port: int, timeout: float) -> None:
        self.timeout = timeout
        self.links = list[Link]()  # all who are connected
        self.active = list[Link]()  # those who take the content that is being sent
        self._listener = socket.create_server((address, port), backlog=128)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])

    def welcome(self, tickets: Iterable[Ticket], version: int) -> None:
        """Wait until every worker that has a ticket is connected, and asks for this version."""
        missing = {(ticket.name, ticket.member): ticket for ticket in tickets}
        guests, deadline = list[_Guest](), time.monotonic() + self.timeout
        try:
            while missing:
                flight.beat()
                for guest in self._heard(guests, deadline):
                    link = self._admit(guest, missing, version)
                    if link is not None:
                        self.links.append(link)
                if missing and time.monotonic() > deadline:
                    names = ", ".join(sorted({name for name, _ in missing}))
                    raise SyncError(
                        f"{names} did not come for version {version} within {self.timeout:g} s: is the engine running, "
                        f"and was it told to take this version?",
                        late=True,
                    )
        finally:
            for guest in guests:
                guest.connection.close()

    def _heard(self, guests: list[_Guest], deadline: float) -> list[_Guest]:
        """Those that have said all that they have to say to be let in; others stay guests, or are sent away."""
        now = time.monotonic()
        until = min([deadline, now + 1.0, *(guest.deadline for guest in guests)])
        # poll and not select, which knows no descriptors above 1023
        poll = select.poll()
        for one in (self._listener, *(guest.connection for guest in guests)):
            poll.register(one, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, until - now) * 1000)}
        if self._listener.fileno() in ready:
            with suppress(OSError):  # it has left again
                guests.append(_Guest(self._listener.accept()[0]))
        whole = [guest for guest in guests if guest.connection.fileno() in ready and guest.hear()]
        sent_away = [guest for guest in guests if guest.gone or time.monotonic() > guest.deadline] + guests[:-_GUESTS]
        for guest in {*whole, *sent_away}:
            guests.remove(guest)
            if guest not in whole:
                guest.connection.close()
        return whole

    def _admit(self, guest: _Guest, missing: dict[tuple[str, int], Ticket], version: int) -> Link | None:
        """None for one that was not invited."""
        hello = guest.hello()
        who = (hello.name, hello.member) if hello is not None else None
        ticket = missing.get(who) if who is not None else None
        if hello is None or who is None or ticket is None or not hmac.compare_digest(ticket.key.encode(), hello.key):
            guest.connection.close()
            return None
        if hello.protocol != PROTOCOL:
            raise SyncError(
                f"{ticket.name} syncs by protocol {hello.protocol}, this is {PROTOCOL}: versions of weft differ"
            )
        if hello.version == GONE:
            raise SyncError(f"{ticket.name} did not come for version {version}: it has died")
        if hello.version != version:
            raise SyncError(f"{ticket.name} asks for version {hello.version}, and version {version} is being sent")
        del missing[who]
        channel = Channel(guest.connection, ticket.name, self.timeout)
        return Link(channel, *who, hello.has, hello.base, hello.joined, hello.mapped)

    def begin(self, content: Content, version: int, planes: Sequence[Mapping[str, Any]], verify: bool) -> None:
        """planes: what each active link needs to know of how buckets come."""
        manifest = [[entry.name, entry.dtype, entry.shape] for entry in content.entries.values()]
        for link, plane in zip(self.active, planes, strict=True):
            link.channel.write(
                begin=content.kind, version=version, verify=verify, plane=plane, manifest=manifest,
                adapter=content.adapter,
            )  # fmt: skip

    def post(self, number: int, rows: Sequence[Row], where: Mapping[str, Any]) -> None:
        """A bucket is there. where: path, bytes or slot of it."""
        table = [[row.entry.name, row.entry.dtype, row.entry.shape, row.offset, row.entry.length] for row in rows]
        for link in self.active:
            link.channel.write(bucket=number, rows=table, **where)

    def wait_taken(self, number: int, version: int) -> None:
        """Until all have taken a bucket."""
        for link, message in self._answers(f"bucket {number} of version {version} to be taken", "took"):
            if message["took"] != number:
                raise SyncError(f"{link.name} took bucket {message['took']} of version {version}, not {number}")

    def prove(self, buckets: int, version: int, sent: Mapping[str, int]) -> None:
        """All buckets were posted: compare what was sent with what every engine says; sent: {} where it need not."""
        for link in self.active:
            link.channel.write(end=buckets)
        for link, report in self._answers(f"what it received of version {version}", "received"):
            with understood(link.name):
                received, placed = sums_of(report["received"]), report["placed"]
                placed = None if placed is None else sums_of(placed)
            compare(version, link.name, sent, received, placed)

    def commit(self, version: int) -> None:
        """Engines may sample with it from here on."""
        for link in self.active:
            link.channel.write(commit=version)
        for _ in self._answers(f"version {version} to be confirmed", "committed"):
            pass

    def leave(self, version: int, error: str | None = None) -> None:
        """Tell all who are connected that it is done, or what went wrong, and end the connections."""
        for link in self.links:
            with suppress(SyncError):
                link.channel.write(**({"done": version} if error is None else {"error": error}))
            link.channel.close()
        self.links = self.active = []

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _answers(self, what: str, key: str) -> Iterator[tuple[Link, dict[str, Any]]]:
        for link in self.active:
            flight.beat()
            try:
                yield link, link.channel.read(what, key)
            except SyncError as error:
                text = str(error)
                raise SyncError(text if text.startswith(link.name) else f"{link.name}: {text}", error.late) from error


def sums_of(value: Any) -> dict[str, int]:
    """Checksums by name. TypeError where they are none."""
    if not isinstance(value, dict) or not all(isinstance(number, int) for number in value.values()):
        raise TypeError("checksums are numbers by name")
    return value
