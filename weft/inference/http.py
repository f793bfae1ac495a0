"""JSON over HTTP to a server that weft has started on this machine. One connection per call; only the standard library.

Calls use HTTP/1.0 because it has no chunked transfer: the response ends when the server closes the connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LATER = (408, 409, 425, 429)  # a timeout, a conflict, too early, too many requests: it may answer another time


class RefusedError(RuntimeError):
    """The server answered with a status other than 2xx. text: the response's body."""

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call} was answered with status {status}: {text}")
        self.status, self.text = status, text

    @property
    def is_final(self) -> bool:
        """Whether the server would refuse the same request again, whichever server it is."""
        return 400 <= self.status < 500 and self.status not in _LATER


@dataclass(frozen=True, slots=True)
class Address:
    """A server's Unix socket, or its port on 127.0.0.1. key: its API key, if any."""

    endpoint: str | int
    key: str = field(default="", repr=False)

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The response: parsed JSON, or text. RefusedError for a status other than 2xx; ConnectionError if nothing
        listens or the response is incomplete. Has no timeout of its own. Cancelling closes the connection."""
        reader, writer = await self._connect()
        try:
            writer.write(_request(method, path, body, self.key))
            await writer.drain()
            answer = await reader.read()
        finally:
            writer.close()
        status, kind, content = _parsed(answer, f"{method} {path}")
        if not 200 <= status < 300:
            raise RefusedError(f"{method} {path}", status, content.decode(errors="replace").strip())
        return json.loads(content) if "json" in kind else content.decode(errors="replace")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            if isinstance(self.endpoint, str):
                return await asyncio.open_unix_connection(self.endpoint)
            return await asyncio.open_connection("127.0.0.1", self.endpoint)
        except OSError as error:
            raise ConnectionError(f"nothing listens at {self.endpoint}: {error}") from error


def _request(method: str, path: str, body: Mapping[str, Any] | None, key: str) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = [
        f"{method} {path} HTTP/1.0", "Host: localhost", "Content-Type: application/json",
        f"Content-Length: {len(content)}", *([f"Authorization: Bearer {key}"] if key else []), "", "",
    ]  # fmt: skip
    return "\r\n".join(head).encode() + content


def _parsed(answer: bytes, call: str) -> tuple[int, str, bytes]:
    """(status, content type, content) of a response. ConnectionError if it is incomplete."""
    head, gap, content = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split()
    if not gap or len(words) < 2 or not words[1].isdigit():
        raise ConnectionError(f"{call}: the connection was closed before an answer")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", len(content)))
    if len(content) != length:
        raise ConnectionError(f"{call}: the connection was closed after {len(content)} of {length} bytes of the answer")
    return int(words[1]), headers.get("content-type", ""), content
