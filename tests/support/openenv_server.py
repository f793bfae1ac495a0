"""Servers that speak OpenEnv's protocol and play HigherLower: a stand-in on asyncio, and the real package's.

python -m tests.support.openenv_server PORT      # the real one; it needs openenv
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.support.games import HigherLower

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SCHEMA = {
    "title": "Guess",
    "properties": {"metadata": {"type": "object"}, "text": {"type": "string"}},
    "required": ["text"],
}


@contextmanager
def stand_in() -> Iterator[str]:
    """The URL of a server that runs meanwhile."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = asyncio.run_coroutine_threadsafe(asyncio.start_server(_connected, "127.0.0.1", 0), loop).result()
    try:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if head.startswith("GET /schema "):
        body = json.dumps({"action": SCHEMA, "observation": {}, "state": {}}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
    elif head.startswith("GET /ws "):
        key = next(line.split(": ")[1] for line in head.split("\r\n") if line.startswith("Sec-WebSocket-Key"))
        accept = base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()
        writer.write(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
        )
        with suppress(asyncio.IncompleteReadError):
            await _session(reader, writer)
    writer.close()


async def _session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    game = HigherLower()
    while True:
        first, second = await reader.readexactly(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", await reader.readexactly(2))
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(await reader.readexactly(length)))
        if first & 0x0F == 8:
            return
        if first & 0x0F == 10:
            continue
        message = json.loads(data)
        if message["type"] == "close":
            return
        answer = _answered(game, message)
        if answer is None:
            return
        text = json.dumps(answer).encode()
        writer.write(bytes([0x89, 2]) + b"hi")  # a ping, and the answer in two frames: both are allowed
        for opcode, part in ((0x01, text[:3]), (0x80, text[3:])):
            n = len(part)
            writer.write(bytes([opcode]) + (bytes([n]) if n < 126 else struct.pack(">BH", 126, n)) + part)
        await writer.drain()


def _answered(game: HigherLower, message: dict[str, Any]) -> dict[str, Any] | None:
    """The server's answer; None: it breaks off."""
    if message["type"] == "reset":
        text, _ = game.reset(seed=message["data"]["seed"], options=message["data"].get("options"))
        reward, done = None, False
    elif "text" not in message["data"]:
        errors = [{"loc": ["text"], "msg": "Field required"}]
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}}
    elif message["data"]["text"] == "crash":
        return None
    else:
        try:
            text, reward, terminated, truncated, _ = game.step(message["data"]["text"])
        except ValueError as error:
            return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
        done = terminated or truncated
    observation = {"text": text, "metadata": {}}
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def real(port: int) -> None:
    """Serve the same game with the package openenv."""
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        text: str

    class Said(Observation):
        text: str

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Said:
            self.game = HigherLower()
            return Said(text=self.game.reset(seed=seed or 0, options=options.get("options"))[0])

        def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Said:
            text, reward, terminated, truncated, _ = self.game.step(action.text)
            return Said(text=text, reward=reward, done=terminated or truncated)

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    real(int(sys.argv[1]))
