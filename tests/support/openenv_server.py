"""Servers that speak OpenEnv's protocol and play HigherLower: a stand-in, and the real package's.

python -m tests.support.openenv_server PORT      # the real one; it needs openenv
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.asyncio.server import Request, Response, Server, ServerConnection, serve

from tests.support.games import HigherLower

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

    async def start() -> Server:
        return await serve(_session, "127.0.0.1", 0, process_request=_schema)

    serving = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _schema(connection: ServerConnection, request: Request) -> Response | None:
    """The answer to GET /schema, which is no WebSocket."""
    if request.path != "/schema":
        return None
    return connection.respond(200, json.dumps({"action": SCHEMA, "observation": {}, "state": {}}))


async def _session(connection: ServerConnection) -> None:
    game = HigherLower()
    async for text in connection:
        message = json.loads(text)
        answer = None if message["type"] == "close" else _answered(game, message)
        if answer is None:
            return
        answered = json.dumps(answer)
        await connection.ping()  # and the answer in two frames: both are allowed
        await connection.send([answered[:3], answered[3:]])


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
