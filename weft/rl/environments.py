"""Environments: the protocol by which user code answers the policy over several turns. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.importing import import_named
from weft.rollout.types import Prompt


@dataclass(frozen=True)
class Reply:
    """An environment's reply to an answer.

    messages: tool results or user turns, for the chat template, with images as in prompts (a path is relative to where
    weft was started); or text, or tokens, which follow the answer as they
    are. calls: the answer's tool calls, as in a message's `tool_calls`, for templates that need them to render results.
    done: the conversation ends, and nothing more is read of the reply. reward: summed over the turns. notes: recorded
    with the sample.
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
    Methods may be coroutines.

    tools: JSON schemas of functions that the chat template offers to the policy. gives_reward: whether the replies'
    rewards count, as the reward `environment`.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    gives_reward: bool = False

    async def start(self, prompt: Prompt) -> None:
        """Called before the first answer. prompt: with all columns of its row."""

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        """The reply to an answer. text: decoded, without the end token. tokens: with it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Called after the last answer, unless the process has died."""


def environment_class(config: RlConfig) -> type[Environment] | None:
    """The class at rl.environment, or None. UserError where it is not an environment."""
    path = config.rl.environment
    if path is None:
        return None
    found = import_named(path, "rl.environment")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise UserError(
            f"rl.environment: {path} is no environment: write a class of weft.rl.environments.Environment "
            "(docs/how-to/environments.md)."
        )
    if not config.rl.reward and not found.gives_reward:
        raise UserError(
            f"rl.reward is empty, and {path} gives no rewards: name a reward function, or set gives_reward = True in "
            "the class and `reward` in its replies."
        )
    return found
