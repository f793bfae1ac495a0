"""Where engines come for weights: the sender's end of wire.py's messages."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.observe import flight
from weft.rollout.sync.content import Content, Row
from weft.rollout.sync.proof import compare
from weft.rollout.sync.wire import PROTOCOL, Channel, SyncError, Ticket


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


class Desk:
    """A listening socket of one rank, and whoever is connected during a sync."""

    def __init__(self, address: str, port: int, timeout: float) -> None:
        self.timeout = timeout
        self.links = list[Link]()  # all who are connected
        self.active = list[Link]()  # those who take the content that is being sent
        self._listener = socket.create_server((address, port), backlog=128)
        self.port = int(self._listener.getsockname()[1])

    def welcome(self, tickets: Iterable[Ticket], version: int) -> None:
        """Wait until every worker that has a ticket is connected, and asks for this version."""
        missing = {(ticket.name, ticket.member): ticket for ticket in tickets}
        deadline = time.monotonic() + self.timeout
        while missing:
            flight.beat()
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, (host, *_) = self._listener.accept()
            except TimeoutError as error:
                names = ", ".join(sorted({name for name, _ in missing}))
                raise SyncError(
                    f"{names} did not come for version {version} within {self.timeout:g} s: is the engine running, and "
                    f"was it told to take this version?",
                    late=True,
                ) from error
            link = self._greet(Channel(connection, f"an engine on {host}", self.timeout), missing, version)
            if link is not None:
                self.links.append(link)

    def _greet(self, channel: Channel, missing: dict[tuple[str, int], Ticket], version: int) -> Link | None:
        """None for one that was not invited, or that has left again."""
        try:
            hello = channel.read("its ticket", "hello")
        except SyncError:
            channel.close()
            return None
        who = str(hello.get("name")), int(hello.get("member", 0))
        ticket = missing.get(who)
        if ticket is None or ticket.key != hello.get("key"):
            channel.close()
            return None
        channel.peer = ticket.name
        if hello["hello"] != PROTOCOL:
            raise SyncError(
                f"{ticket.name} syncs by protocol {hello['hello']}, this is {PROTOCOL}: versions of weft differ"
            )
        if hello["version"] != version:
            raise SyncError(f"{ticket.name} asks for version {hello['version']}, and version {version} is being sent")
        del missing[who]
        return Link(channel, *who, hello["has"], bool(hello["base"]), hello["joined"], hello["mapped"])

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
            compare(version, link.name, sent, report["received"], report["placed"])

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
