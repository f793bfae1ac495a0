"""A small HTTP/1.1 server for JSON requests, on asyncio and the standard library. It knows no paths.

A request whose connection closes before its response is written is cancelled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from weft.errors import first_line

_MOST_HEAD, _MOST_BODY = 1 << 16, 1 << 26  # bytes
_MOST_DIGITS = 12  # of a length: Python refuses to read some thousand
_CHUNKED = "chunked"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. headers: by their names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response. lost: called if the connection closes before the response is written."""

    status: int
    body: bytes
    content_type: str = "application/json"
    lost: Callable[[], None] | None = None


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class HttpError(Exception):
    """Answered with this status and an error body as OpenAI's. code, param: as in OpenAI's `error`; param is the key of
    the request."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def response(self) -> HttpResponse:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return HttpResponse(self.status, json.dumps({"error": error}).encode())


class HttpServer:
    """Listens on a host and port, and answers each request with `handle`."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. port: 0 for any free one. OSError if that is not possible."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=_MOST_HEAD)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Close the listening socket and all connections."""
        if self._server is not None:
            self._server.close()
            for task in list(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # by close()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the connection closes."""
        ahead = b""
        while True:
            try:
                request = await _read_request(reader, writer, ahead)
            except HttpError as error:
                await _write(writer, error.response(), keep=False)
                return
            answer, ahead = await self._answer(request, reader)
            if answer is None:
                return
            keep = request.headers.get("connection", "").lower() != "close"
            try:
                await _write(writer, answer, keep)
            except ConnectionError:
                if answer.lost is not None:
                    answer.lost()
                raise
            if not keep:
                return

    async def _answer(self, request: HttpRequest, reader: asyncio.StreamReader) -> tuple[HttpResponse | None, bytes]:
        """The response, or None if the client has gone; and the first byte of the next request, if it has come."""
        handling: asyncio.Future[HttpResponse] = asyncio.ensure_future(self._handle(request))
        watching = asyncio.ensure_future(reader.read(1))
        try:
            waited: set[asyncio.Future[Any]] = {handling, watching}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and (watching.exception() is not None or not watching.result()):
                response = handling.result() if handling.done() and handling.exception() is None else None
                if response is not None and response.lost is not None:
                    response.lost()
                return None, b""
            try:
                return await handling, watching.result() if watching.done() else b""
            except HttpError as error:
                return error.response(), watching.result() if watching.done() else b""
            # an error of the handler: the client receives it, and other connections continue
            except Exception as error:
                failed = HttpError(500, f"{type(error).__name__}: {first_line(error)}")
                return failed.response(), watching.result() if watching.done() else b""
        finally:
            for task in (handling, watching):
                task.cancel()
            await asyncio.gather(handling, watching, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ahead: bytes) -> HttpRequest:
    """The next request. ahead: its first byte, if that was read before. HttpError for a malformed request."""
    try:
        head = ahead + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise HttpError(431, f"the head of a request is at most {_MOST_HEAD} bytes") from None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise HttpError(400, "not a request of HTTP/1.1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if headers.get("transfer-encoding", "").lower() == _CHUNKED:
        length = ""
    elif not length.isdecimal() or len(length) > _MOST_DIGITS or int(length) > _MOST_BODY:
        raise HttpError(413, f"the body of a request is at most {_MOST_BODY} bytes")
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    body = await reader.readexactly(int(length)) if length else await _read_chunks(reader)
    return HttpRequest(words[0], words[1].partition("?")[0], headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    """The body of a request with `Transfer-Encoding: chunked`."""
    body = b""
    while True:
        try:
            size = int((await reader.readline()).split(b";")[0], 16)
        except ValueError:
            raise HttpError(400, "a chunk of the body has no size") from None
        if size < 0 or len(body) + size > _MOST_BODY:
            raise HttpError(413, f"the body of a request is at most {_MOST_BODY} bytes")
        if size == 0:
            with suppress(ValueError):  # a trailer above the limit of a line
                while (await reader.readline()).strip():
                    pass
            return body
        body += await reader.readexactly(size)
        await reader.readexactly(2)


async def _write(writer: asyncio.StreamWriter, response: HttpResponse, keep: bool) -> None:
    head = [
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        f"Connection: {'keep-alive' if keep else 'close'}",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + response.body)
    await writer.drain()
