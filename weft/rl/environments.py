"""What answers the policy in a conversation of several turns: the protocol, and how one is named. Imports no torch."""

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
    """What an environment makes of an answer.

    messages: what is said to the policy next, tool results or a user's words, as the chat template renders them; or
    text, or tokens, which go behind the answer as they stand. calls: the answer's calls of tools, as in `tool_calls` of
    a message, for templates that render results beside their calls. done: the conversation ends here, and what else is
    said is not read. reward: is added up over the turns. notes: are kept beside the sample.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    text: str | None = None
    tokens: Sequence[int] | None = None
    calls: Sequence[Mapping[str, Any]] = ()
    done: bool = False
    reward: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


class Environment:
    """Answers the policy in one conversation: an object is made for each sample, without arguments, in a process of its
    own.

    Methods may be coroutines. tools: JSON schemas of functions that the chat template offers the policy. gives_reward:
    whether rewards of replies count, as reward `environment`.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    gives_reward: bool = False

    async def start(self, prompt: Prompt) -> None:
        """Before the first answer. prompt: with all columns of its row."""

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        """What is said to an answer. text: decoded, without the token that ends it; tokens: with it."""
        raise NotImplementedError

    async def close(self) -> None:
        """After the last answer, whatever became of it; not where the process is gone."""


def environment_class(config: RlConfig) -> type[Environment] | None:
    """The class that rl.environment names; None without one. Raises UserError where it is no environment."""
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
