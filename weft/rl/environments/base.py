"""Environments: the interface for user code that replies to the policy over several turns. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.config.conditions import ENVIRONMENT_SCHEMES
from weft.errors import UserError
from weft.importing import import_named
from weft.inference.types import Prompt

if TYPE_CHECKING:
    from weft.config.rl_schema import RlConfig


@dataclass(frozen=True)
class Reply:
    """An environment's reply to an answer.

    Set one of messages, text and tokens. messages: tool results or user turns, which the chat template renders; images
    are given as in prompts (paths are relative to the folder where weft was started). text, tokens: appended to the
    answer as they are. calls: the answer's tool calls, as in a message's `tool_calls`, for templates that need them to
    render results. done: whether the conversation ends; nothing is appended then. reward: summed over the turns. notes:
    recorded with the sample.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    text: str | None = None
    tokens: Sequence[int] | None = None
    calls: Sequence[Mapping[str, Any]] = ()
    done: bool = False
    reward: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


class Environment:
    """Answers the policy in one conversation. One object is created per sample, without arguments, in its own process.
    Methods may be coroutines or plain functions.

    tools: JSON schemas of the functions that the chat template offers to the policy. gives_reward: whether the replies'
    rewards count, under the name `environment`.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    gives_reward: bool = False

    async def start(self, prompt: Prompt) -> Reply | None:
        """Called before the first answer. prompt: has all columns of its row. May return a Reply, whose messages follow
        those of the prompt (a first one of the user is joined to a last one); its reward and notes count like those of
        a reply of `step`."""

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        """The reply to an answer. text: the decoded answer without its end token. tokens: with the end token."""
        raise NotImplementedError

    async def close(self) -> None:
        """Called after the last answer, unless the process has died."""


def environment_class(config: RlConfig) -> type[Environment] | None:
    """The class at rl.environment, or None. UserError if it is not an Environment, or if the run would have no
    rewards."""
    path = config.rl.environment
    if path is None:
        return None
    loaded = load_class(path)
    if not config.rl.reward and not loaded.gives_reward:
        raise UserError(
            f"rl.reward is empty, and {path} returns no rewards. Set rl.reward to a reward function, or set "
            "gives_reward = True in the class and `reward` in its replies."
        )
    return loaded


def load_class(path: str) -> type[Environment]:
    """The class that rl.environment names: by its import path, or an adapter's for `gymnasium:NAME` and `openenv:URL`.
    UserError if there is none."""
    scheme, _, name = path.partition(":")
    if scheme in ENVIRONMENT_SCHEMES:
        adapted: type[Environment] = import_module(f"weft.rl.environments.{scheme}_adapter").environment(name)
        return adapted
    loaded = import_named(path, "rl.environment")
    if not (isinstance(loaded, type) and issubclass(loaded, Environment)):
        raise UserError(
            f"rl.environment: {path} is not an environment: write a subclass of "
            "weft.rl.environments.base.Environment (docs/how-to/environments.md)."
        )
    return loaded
