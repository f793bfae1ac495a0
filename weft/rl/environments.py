"""What answers the policy in a conversation of several turns: the protocol, and how one is named and called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.config.rl_schema import RlConfig
from weft.data.encode import Encoding, read_encoding
from weft.errors import UserError, first_line
from weft.importing import import_named
from weft.rl.chat import Chats
from weft.rl.types import Prompt


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
    """Answers the policy in one conversation: an object is made for each sample, without arguments.

    Methods may be coroutines; others run in threads of their own. tools: JSON schemas of functions that the chat
    template offers the policy. gives_reward: whether rewards of replies count, as reward `environment`.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    gives_reward: bool = False

    async def start(self, prompt: Prompt) -> None:
        """Before the first answer. prompt: with all columns of its row."""

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        """What is said to an answer. text: decoded, without the token that ends it; tokens: with it."""
        raise NotImplementedError

    async def close(self) -> None:
        """After the last answer, whatever became of it."""


class EnvironmentFailure(Exception):
    """Code of the environment raised, or took too long: this costs one sample."""


@dataclass(frozen=True)
class Episodes:
    """How conversations with an environment go. most_tokens: of one, behind its prompt; timeout: seconds of a step."""

    kind: type[Environment]
    chats: Chats
    max_turns: int
    most_tokens: int
    timeout: float

    async def call(self, method: Any, *arguments: Any) -> Any:
        """Calls a method of an environment. Raises EnvironmentFailure."""
        try:
            async with asyncio.timeout(self.timeout):
                if inspect.iscoroutinefunction(method):
                    return await method(*arguments)
                return await asyncio.to_thread(method, *arguments)
        except TimeoutError as error:
            raise EnvironmentFailure(f"{_of(method)} took more than {self.timeout:g} seconds") from error
        except Exception as error:
            raise EnvironmentFailure(f"{_of(method)}: {type(error).__name__}: {first_line(error)}") from error

    def behind(self, prompt: Prompt, reply: Reply, ended: bool) -> list[int]:
        """The tokens of a reply. ended: whether the policy has ended its answer by itself. Raises UserError."""
        if reply.tokens is not None:
            return list(reply.tokens)
        if reply.text is not None:
            return self.chats.tokens([reply.text])[0]
        if not reply.messages:
            raise UserError(
                f"rl.environment: {self.kind.__name__} replied nothing to an answer to {prompt.source} and was not "
                "done: give `messages`, `text` or `tokens`, or set done=True."
            )
        if prompt.messages is None:
            raise UserError(
                f"{prompt.source}: the prompt is a text, and rl.environment replies with messages: write prompts as "
                "messages (or set rl.chat=true), or reply with `text`."
            )
        found = self.chats.continuation(prompt, reply.messages, reply.calls)
        return [*(() if ended else found.closing), *found.tokens]


def environment_class(config: RlConfig) -> type[Environment] | None:
    """The class that rl.environment names; None without one. Raises UserError where it is no environment."""
    path = config.rl.environment
    if path is None:
        return None
    found = import_named(path, "rl.environment")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise UserError(
            f"rl.environment: {path} is no environment: write a class of weft.rl.environments.Environment "
            "(docs/environments.md)."
        )
    if not config.rl.reward and not found.gives_reward:
        raise UserError(
            f"rl.reward is empty, and {path} gives no rewards: name a reward function, or set gives_reward = True in "
            "the class and `reward` in its replies."
        )
    return found


def load_environment(
    config: RlConfig, tokenizer: PreTrainedTokenizerBase, encoding: Encoding | None = None
) -> Episodes | None:
    """Conversations with the environment that a config names; None where there is none.

    encoding: the chat template; by default the config's.
    """
    kind = environment_class(config)
    if kind is None:
        return None
    chats = Chats(tokenizer, encoding or read_encoding(config.data, tokenizer))
    return Episodes(kind, chats, config.rl.max_turns, config.rollout.max_new_tokens, config.rl.environment_timeout)


def _of(method: Any) -> str:
    return str(getattr(method, "__qualname__", method))
