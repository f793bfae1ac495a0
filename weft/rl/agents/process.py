"""Runs an agent in the process of its episode (weft/rl/environments/worker.py forks it). Imports no torch."""

from __future__ import annotations

import inspect
import json
import math
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from weft.rl.agents.base import agent_function, is_command, is_verifiers
from weft.rl.agents.verifiers_agent import verifiers_function

_SHOWN = 300  # characters of a program's output that an error shows


def agent_factory(agent: str) -> Callable[[], Any]:
    """A function that makes an object whose `run(row, base_url, api_key, model)` runs the agent and returns {"reward":
    float or None, "notes": dict}."""
    if is_verifiers(agent):
        function = verifiers_function(agent)
    elif is_command(agent):
        return lambda: SimpleNamespace(run=_command(shlex.split(agent)))
    else:
        function = agent_function(agent)
    run = _coroutine(function) if inspect.iscoroutinefunction(function) else _plain(function)
    return lambda: SimpleNamespace(run=run)


def outcome(result: Any) -> dict[str, Any]:
    """What an agent returned, as {"reward", "notes"}. TypeError or ValueError if it is neither a number, a mapping with
    `reward` nor None."""
    notes = {name: value for name, value in result.items() if name != "reward"} if isinstance(result, Mapping) else {}
    reward = result.get("reward") if isinstance(result, Mapping) else result
    if reward is None:
        return {"reward": None, "notes": notes}
    try:
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise TypeError(f"returned {reward!r:.80} as its reward, which is not a number") from error
    if not math.isfinite(number):
        raise ValueError(f"returned the reward {number}")
    json.dumps(notes, default=str)  # notes are recorded as JSON
    return {"reward": number, "notes": notes}


def _environment(base_url: str, api_key: str, model: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model}


def _coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(row: Any, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        os.environ.update(_environment(base_url, api_key, model))
        return outcome(await function(row, base_url, api_key))

    return run


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(row: Any, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        os.environ.update(_environment(base_url, api_key, model))
        return outcome(function(row, base_url, api_key))

    return run


def _command(words: list[str]) -> Callable[..., Any]:
    def run(row: Any, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        text = json.dumps(row, default=str)
        environment = {**os.environ, **_environment(base_url, api_key, model)}
        done = subprocess.run(words, input=text, env=environment, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise RuntimeError(f"`{words[0]}` ended with status {done.returncode}: {done.stderr.strip()[-_SHOWN:]}")
        lines = done.stdout.strip().splitlines()
        try:
            return outcome(json.loads(lines[-1])) if lines else outcome(None)
        except json.JSONDecodeError:
            return {"reward": None, "notes": {"output": lines[-1][-_SHOWN:]}}

    return run
