"""Fetches images at URLs, once, while the data are read, if data.fetch_images allows it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from weft.data.image_columns import Image
from weft.errors import BadRowError, first_line
from weft.version import __version__

_SECONDS = 30.0  # longest pause between two bytes, in seconds
_ANSWER_SECONDS = 60.0  # seconds for the whole answer: a server may send one byte at a time
_MOST_BYTES = 64 << 20
_TRIES = 3
_HANDLERS = (ProxyHandler, HTTPRedirectHandler, HTTPErrorProcessor, HTTPDefaultErrorHandler)


def fetch_image(image: Image, location: str, allowed: bool) -> Image:
    """The image, with its bytes fetched if it is a URL. allowed: as data.fetch_images. Raises BadRowError."""
    if image.url is None or image.data is not None:
        return image
    if not allowed:
        raise BadRowError(
            f"{location} ({image.url}): weft fetches URLs only with data.fetch_images=true. Set it, or name a file."
        )
    for attempt in range(_TRIES):
        try:
            return replace(image, data=_read(image.url))
        except HTTPError as error:
            reason = f"the server answers {error.code} ({error.reason})"
            if error.code < 500:
                break
        except TimeoutError as error:
            reason = first_line(error)
            if str(error) == _TOO_SLOW:
                break
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = first_line(error)
        if attempt + 1 < _TRIES:
            time.sleep(attempt + 1.0)
    raise BadRowError(f"{location} ({image.url}): cannot be fetched: {reason}.")


def _read(url: str) -> bytes:
    """The bytes at a URL. The opener handles only http and https, also in redirections."""
    opener = OpenerDirector()
    connections = _Connections()
    for handler in (*(kind() for kind in _HANDLERS), _Http(connections), _Https(connections)):
        opener.add_handler(handler)
    request = Request(url, headers={"User-Agent": f"weft/{__version__}"})
    with connections.ended_in_time(), opener.open(request, timeout=_SECONDS) as answer:
        data: bytes = answer.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return data


# ---------------------------------------------------------------- a time limit for a whole answer

_TOO_SLOW = f"it did not arrive within {_ANSWER_SECONDS:g} s"


@dataclass
class _Connections:
    """The connections of a request. A timer ends them, because the timeout of a socket restarts at every byte."""

    sockets: list[socket.socket] = field(default_factory=list)
    ended: bool = False

    def add(self, connection: socket.socket) -> None:
        self.sockets.append(connection.dup())  # TLS takes the descriptor of the original socket
        if self.ended:
            self.end()

    def end(self) -> None:
        self.ended = True
        for connection in self.sockets:
            with suppress(OSError):  # already closed
                connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def ended_in_time(self) -> Iterator[None]:
        """If the timer has ended the connections, raises TimeoutError in place of the body's network error."""
        timer = threading.Timer(_ANSWER_SECONDS, self.end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (HTTPException, OSError):
            if not self.ended:
                raise
        finally:
            timer.cancel()
            for connection in self.sockets:
                connection.close()
        if self.ended:
            raise TimeoutError(_TOO_SLOW)


class _TrackedConnection(HTTPConnection):
    """Adds its socket to `connections` as soon as it is connected."""

    connections: _Connections

    def connect(self) -> None:
        super().connect()
        self.connections.add(self.sock)


class _TrackedSecureConnection(HTTPSConnection, _TrackedConnection):
    """_TrackedConnection for HTTPS: HTTPSConnection.connect calls its connect before the TLS handshake."""


class _Http(HTTPHandler):
    def __init__(self, connections: _Connections) -> None:
        super().__init__()
        self._kind: Any = type("_Connection", (_TrackedConnection,), {"connections": connections})

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._kind, req)


class _Https(HTTPSHandler):
    def __init__(self, connections: _Connections) -> None:
        super().__init__()
        self._kind: Any = type("_Connection", (_TrackedSecureConnection,), {"connections": connections})

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._kind, req)
