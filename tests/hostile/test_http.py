"""The HTTP server that agents call: garbage, and clients that stall or go, cost their own connection and no other."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from weft.rl.agents.http_server import HttpRequest, HttpResponse, HttpServer

GOOD = b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
GARBAGE: dict[str, tuple[bytes, int | None]] = {  # name -> (what a client sends, the status; None: no response)
    "no HTTP": (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\n", 400),
    "no path": (b"GET\r\n\r\n", 400),
    "a long head": (b"GET /a HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    "a length of -1": (b"POST /a HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 413),
    "a length in words": (b"POST /a HTTP/1.1\r\nContent-Length: two\r\n\r\n", 413),
    "a length above the limit": (b"POST /a HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
    "a length of many digits": (b"POST /a HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
    "less than its length": (b"POST /a HTTP/1.1\r\nContent-Length: 9\r\n\r\n{}", None),
    "a chunk without a size": (CHUNKED + b"zz\r\n\r\n", 400),
    "a chunk of -1": (CHUNKED + b"-1\r\n\r\n", 413),
    "a chunk above the limit": (CHUNKED + b"fffffffff\r\n", 413),
    "a long line for a size": (CHUNKED + b"1" * 70_000 + b"\r\n", 400),
    "a long trailer": (CHUNKED + b"0\r\n" + b"a" * 200_000 + b"\r\n\r\n", 200),
    "a cut chunk": (CHUNKED + b"5\r\nab", None),
    "nothing": (b"", None),
}


async def echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, json.dumps({"size": len(request.body)}).encode())


async def sent(port: int, data: bytes) -> int | None:
    """The status of the response to these bytes, after which the client sends no more; None without a response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        if not data.startswith(CHUNKED + b"0"):
            writer.write_eof()
        line = await asyncio.wait_for(reader.readline(), 10)
    except ConnectionError:
        return None
    finally:
        writer.close()
    return int(line.split()[1]) if line else None


async def with_server(do: Any) -> list[dict[str, Any]]:
    """Call do(port); returns what asyncio had to complain of. The server ends within a second."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    server = HttpServer(echo)
    await server.start("127.0.0.1", 0)
    await do(server.port)
    assert await sent_whole(server.port) == 200
    began = time.monotonic()
    await server.close()
    assert time.monotonic() - began < 1.0
    return complaints


async def sent_whole(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GOOD)
    line = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    return int(line.split()[1])


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_answered_or_closed(name: str) -> None:
    data, status = GARBAGE[name]

    async def do(port: int) -> None:
        assert await sent(port, data) == status

    assert asyncio.run(with_server(do)) == []


def test_random_bytes_and_cut_requests_disturb_nobody() -> None:
    chance = random.Random(0)

    async def do(port: int) -> None:
        for _ in range(100):
            data = bytearray(chance.choice([GOOD, CHUNKED + b"2\r\n{}\r\n0\r\n\r\n"]))
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            await sent(port, bytes(data[: chance.randint(1, len(data))]))

    assert asyncio.run(with_server(do)) == []


def test_clients_that_stall_hold_up_neither_others_nor_the_end() -> None:
    """A client that sends nothing, half a head, half a body, or reads nothing of many responses."""

    async def do(port: int) -> None:
        for data in (b"", b"POST /a HT", GOOD[:-1], GOOD * 50_000):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            await asyncio.sleep(0.02)

    assert asyncio.run(with_server(do)) == []
