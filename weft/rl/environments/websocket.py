"""A client of WebSocket (RFC 6455) for texts, on asyncio and the standard library."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import struct
from contextlib import suppress
from urllib.parse import urlsplit

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of the handshake
_MOST = 1 << 27  # bytes of a message
_CONTINUATION, _TEXT, _CLOSE, _PING, _PONG = 0, 1, 8, 9, 10


class WebSocket:
    """A connection. ConnectionError if it closes, or if the peer does not keep to the protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, url: str) -> WebSocket:
        """Open a connection to a URL of http, https, ws or wss."""
        parts = urlsplit(url)
        secure = parts.scheme in ("https", "wss")
        host, port = parts.hostname or "", parts.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(host, port, ssl=secure or None)
        key = base64.b64encode(os.urandom(16)).decode()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = [
            f"GET {path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}", "Upgrade: websocket",
            "Connection: Upgrade", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13",
        ]  # fmt: skip
        writer.write("\r\n".join([*head, "", ""]).encode())
        try:
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ConnectionError(f"{url} did not answer as a WebSocket") from error
        status, *lines = answer.split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        accept = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
        if status.split()[1:2] != ["101"] or headers.get("sec-websocket-accept") != accept:
            raise ConnectionError(f"{url} is no WebSocket: it answered {status!r}")
        return cls(reader, writer)

    async def send(self, text: str) -> None:
        """Send a text."""
        await self._send(_TEXT, text.encode())

    async def receive(self) -> str:
        """The next text."""
        message = b""
        while True:
            final, opcode, data = await self._frame()
            if opcode == _CLOSE:
                reason = data[2:].decode(errors="replace")
                raise ConnectionError("the server closed the connection" + (f": {reason}" if reason else ""))
            if opcode == _PING:
                await self._send(_PONG, data)
            elif opcode in (_TEXT, _CONTINUATION):
                message += data
                if len(message) > _MOST:
                    raise ConnectionError(f"a message of more than {_MOST:,} bytes")
                if final:
                    return message.decode()
            elif opcode != _PONG:
                raise ConnectionError(f"a frame that is no text (opcode {opcode})")

    async def close(self) -> None:
        """Say goodbye and close; the peer's goodbye is not waited for."""
        with suppress(ConnectionError):  # it has closed already
            await self._send(_CLOSE, struct.pack(">H", 1000))
        self._writer.close()

    async def _frame(self) -> tuple[bool, int, bytes]:
        """The next frame: whether it is a message's last, its opcode, its data."""
        try:
            first, second = await self._reader.readexactly(2)
            length = second & 0x7F
            if length >= 126:
                width = {126: ">H", 127: ">Q"}[length]
                (length,) = struct.unpack(width, await self._reader.readexactly(struct.calcsize(width)))
            if length > _MOST or second & 0x80:
                raise ConnectionError("a frame that no server may send")
            return bool(first & 0x80), first & 0x0F, await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the server closed the connection") from error

    async def _send(self, opcode: int, data: bytes) -> None:
        mask = os.urandom(4)  # a client masks what it sends
        n = len(data)
        extended = struct.pack(">BH", 0xFE, n) if n < 1 << 16 else struct.pack(">BQ", 0xFF, n)
        length = bytes([0x80 | n]) if n < 126 else extended
        stream = (mask * (n // 4 + 1))[:n]
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(n, "big")
        self._writer.write(bytes([0x80 | opcode]) + length + mask + masked)
        await self._writer.drain()
