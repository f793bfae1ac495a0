"""The agent that rl.agent names: an (async) function or a command. Imports no torch."""

from __future__ import annotations

import inspect
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.config.conditions import VERIFIERS
from weft.errors import UserError
from weft.importing import import_named
from weft.rl.agents.verifiers_agent import verifiers_function

KEY = "rl.agent"
_SIGNATURE = "async def agent(row, base_url, api_key) -> float | dict | None"


def is_verifiers(agent: str) -> bool:
    """Whether rl.agent is an environment of the package verifiers."""
    return agent.startswith(f"{VERIFIERS}:")


def is_command(agent: str) -> bool:
    """Whether rl.agent is a command: it has a space or a slash, which no import path has."""
    return any(character.isspace() or character == "/" for character in agent.strip())


def agent_function(path: str) -> Callable[..., Any]:
    """The function at an import path. UserError if it does not accept (row, base_url, api_key)."""
    function = import_named(path, KEY)
    try:
        inspect.signature(function).bind({}, "", "")
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{KEY}: {path} is not an agent: write `{_SIGNATURE}`, or a plain function with these arguments "
            "(docs/how-to/agents.md)."
        ) from error
    agent: Callable[..., Any] = function
    return agent


def check_agent(agent: str) -> None:
    """Raise UserError if rl.agent names no function that can be imported, or no program that can be started."""
    if is_verifiers(agent):
        verifiers_function(agent)
        return
    if not is_command(agent):
        agent_function(agent)
        return
    try:
        program = shlex.split(agent)[0]
    except (ValueError, IndexError) as error:
        raise UserError(f"{KEY}: {agent!r} is not a valid command line: {error}.") from error
    if shutil.which(program) is None:
        raise UserError(
            f"{KEY}: {agent!r} is a command, and there is no program {program} in PATH or at {Path.cwd() / program}. "
            "An import path of a function has neither spaces nor slashes, as in my_agents:solve."
        )
