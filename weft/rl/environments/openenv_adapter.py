"""Servers of OpenEnv as environments. Imports no torch, and no package of OpenEnv's.

A session is a WebSocket at /ws, as in OpenEnv's own client: the server's POST /reset and /step make a new environment
for each request (0.10).
"""

from __future__ import annotations

import functools
import json
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from weft.errors import UserError, first_line
from weft.importing import import_extra
from weft.inference.types import Prompt
from weft.rl.environments.base import Environment, Reply

websockets = import_extra("websockets", "rl", "rl.environment: a server of OpenEnv")

_CONNECT_SECONDS = 5.0
_MOST_BYTES = 1 << 27  # of a message
_LIST_TOOLS = {"type": "list_tools"}
# Titles of the action schemas of servers that are tools of MCP.
_TOOLS = ("Action", "CallToolAction", "ListToolsAction")


def environment(url: str) -> type[Environment]:
    """The Environment that plays one session of the server at `url`. UserError if no server answers there."""
    url = url.rstrip("/")
    return type("OpenEnv", (OpenEnvSession,), {"url": url, "schema": _action_schema(url)})


@functools.cache
def _action_schema(url: str) -> Mapping[str, Any]:
    """The JSON schema of the server's actions."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=_CONNECT_SECONDS) as answer:
            schema: Mapping[str, Any] = json.load(answer)["action"]
            return schema
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"rl.environment: no server of OpenEnv answers at {url}/schema: {first_line(error)}. Start the server, "
            "or correct the address."
        ) from error


class OpenEnvSession(Environment):
    """One session. Each observation is a user message; the first follows the prompt.

    Columns that are read: `reset`, the arguments of `reset`; `seed` (default: the prompt's index). An action is the
    JSON object of an answer, alone or in a fence of ```; if the schema requires one field, a text is its value. An
    answer without a valid action costs a turn.
    """

    gives_reward = True
    url: str
    schema: Mapping[str, Any]

    async def start(self, prompt: Prompt) -> Reply:
        # rl.environment_timeout is the limit. A server that plays a long step in its event loop answers no pings.
        self.socket = await websockets.connect(
            f"ws{self.url.removeprefix('http')}/ws", max_size=_MOST_BYTES, open_timeout=None, ping_interval=None,
            close_timeout=1.0,
        )  # fmt: skip
        arguments = {"seed": int(prompt.columns.get("seed", prompt.index)), **(prompt.columns.get("reset") or {})}
        data = await self._ask("reset", arguments)
        text = shown(data["observation"])
        if self.schema.get("title") in _TOOLS:
            tools = (await self._ask("step", _LIST_TOOLS))["observation"].get("tools", [])
            form = '{"type": "call_tool", "tool_name": NAME, "arguments": {...}}'
            text += f"\n\nAnswer with {form}. Tools: {json.dumps(tools)}"
        elif len(self.schema.get("required", ())) != 1:
            text += f"\n\nAnswer with a JSON object of this schema: {json.dumps(self.schema.get('properties', {}))}"
        if data.get("done"):
            return Reply(done=True)
        return Reply(messages=[{"role": "user", "content": text}], reward=data.get("reward"))

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        try:
            data = await self._ask("step", read_action(text, self.schema))
        except ValueError as error:
            return Reply(messages=[{"role": "user", "content": f"Invalid action: {error}"}])
        if data.get("done"):
            return Reply(done=True, reward=data.get("reward"), notes={"observation": data["observation"]})
        return Reply(messages=[{"role": "user", "content": shown(data["observation"])}], reward=data.get("reward"))

    async def close(self) -> None:
        if hasattr(self, "socket"):
            with suppress(websockets.ConnectionClosed):  # the server has broken off already
                await self.socket.send(json.dumps({"type": "close"}))
            await self.socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the server's answer. ValueError for an action that the server finds invalid, RuntimeError for any
        other error."""
        await self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self.socket.recv())
        body: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return body
        if body.get("code") == "VALIDATION_ERROR":
            raise ValueError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in body.get("errors", ())))
        raise RuntimeError(f"the server answered {body.get('code')}: {body.get('message')}")


def read_action(text: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The action in an answer. ValueError if there is none."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = "\n".join(text.splitlines()[1:-1]).strip()
    try:
        action = json.loads(text)
    except ValueError:
        action = text
    if isinstance(action, dict):
        return action
    required = schema.get("required", ())
    if len(required) != 1:
        raise ValueError("answer with a JSON object")
    name = required[0]
    return {name: text if schema.get("properties", {}).get(name, {}).get("type") == "string" else action}


def shown(observation: Mapping[str, Any]) -> str:
    """An observation as the policy reads it: its only field, if that is a text, else JSON without `metadata`."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return json.dumps(fields, ensure_ascii=False)
