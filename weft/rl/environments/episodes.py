"""Conversations with environments: calls to the environment processes, and the tokens of replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.config.rl_schema import RlConfig
from weft.data.encode import Encoding, read_encoding
from weft.data.image_files import PromptImages
from weft.data.images import Images
from weft.data.prompts import as_text
from weft.engine.batch.media import ImageRoom
from weft.errors import BadRowError, UserError
from weft.inference.types import Prompt
from weft.rl.chat import ChatRenderer
from weft.rl.environments.base import Environment, Reply, environment_class
from weft.rl.environments.pool import EnvironmentPool
from weft.rl.workers import Worker, WorkerError

_GRACE = 1.0  # seconds to cancel a late coroutine before its process is killed


class EnvironmentFailure(Exception):
    """The environment's code raised, ended its process, exceeded the time limit or gave an unreadable reply. Only this
    sample is lost."""


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """The tokens that follow an answer. reply_images: as in Sample, with the images among these tokens."""

    tokens: list[int]
    reply_images: PromptImages | None


@dataclass(frozen=True)
class Episodes:
    """Settings of all conversations. most_prompt: limit of tokens of a prompt, including the environment's first
    messages. most_tokens: limit of tokens of a conversation, after its prompt. timeout: seconds of one call. room: the
    trainers' room for a sample with images; None for a text-only model."""

    kind: type[Environment]
    pool: EnvironmentPool
    chats: ChatRenderer
    max_turns: int
    most_prompt: int
    most_tokens: int
    timeout: float
    room: ImageRoom | None = None

    async def close(self) -> None:
        """End all environments."""
        await self.pool.close()

    async def open(self) -> EnvironmentSession:
        """A new environment in its own process. UserError if it cannot be imported there."""
        return EnvironmentSession(self.kind.__qualname__, await self.pool.open(), self.timeout)

    def max_completion_tokens(self, prompt: Prompt, reply_images: PromptImages | None) -> int:
        """The most tokens that a conversation may have after its prompt. Images of replies lower the limit, because the
        sample must fit into one row. If only the prompt has images, they were checked before training."""
        if self.room is None or reply_images is None:
            return self.most_tokens
        return min(self.most_tokens, self.room.tokens - self.room.in_tokens(reply_images.patches) - len(prompt.tokens))

    def opened(self, prompt: Prompt, opening: Reply) -> Prompt:
        """The prompt, followed by the reply of Environment.start. It is rendered completely, because no token has been
        sampled yet. EnvironmentFailure if it is not a valid prompt."""
        name = f"{self.kind.__name__}.start"
        if opening.done:
            raise EnvironmentFailure(f"{name} returned done=True before the first answer")
        if opening.messages:
            if prompt.messages is None:
                raise UserError(
                    f"{prompt.source}: the prompt is a text, but rl.environment starts with messages. Write prompts "
                    "as messages, or set rl.chat=true."
                )
            if prompt.images is not None or not all(isinstance(m.get("content"), str) for m in opening.messages):
                raise UserError(
                    f"rl.environment: {name} replied to {prompt.source}: model.path is a text-only model, so "
                    "replies must not have images."
                )
            last, first = prompt.messages[-1], opening.messages[0]
            joined = last["role"] == first["role"] == "user"
            messages = (*prompt.messages, *opening.messages)
            if joined:
                content = f"{as_text([dict(last)])}\n\n{first['content']}"
                messages = (*prompt.messages[:-1], {**last, "content": content}, *opening.messages[1:])
            tokens = self.chats.rendered_question(prompt.source, messages, prompt.columns)
            prompt = replace(
                prompt, tokens=tokens, messages=messages, text=as_text([dict(message) for message in messages])
            )
        elif opening.text is not None or opening.tokens is not None:
            tokens = tuple(opening.tokens or self.chats.tokens([str(opening.text)])[0])
            prompt = replace(prompt, tokens=(*prompt.tokens, *tokens), text=prompt.text + (opening.text or ""))
        if len(prompt.tokens) > self.most_prompt:
            raise EnvironmentFailure(
                f"{name} returned a prompt of {len(prompt.tokens):,} tokens, more than "
                f"rollout.max_prompt_tokens={self.most_prompt:,}"
            )
        return prompt

    def reply_tokens(self, prompt: Prompt, reply: Reply, ended: bool, reply_images: PromptImages | None) -> ReplyTokens:
        """The tokens of a reply. ended: whether the answer before it has an end token. reply_images: images of earlier
        replies. UserError if the chat template cannot render the reply, EnvironmentFailure if it cannot be read."""
        if reply.tokens is None and reply.text is None:
            return self._of_messages(prompt, reply, ended, reply_images)
        tokens = list(reply.tokens) if reply.tokens is not None else self.chats.tokens([str(reply.text)])[0]
        if set(tokens) & set(prompt.placeholders):
            raise EnvironmentFailure(
                f"{self.kind.__name__}.step replied with a placeholder token of an image; pass images as parts of "
                "`messages`"
            )
        return ReplyTokens(tokens, reply_images)

    def _of_messages(self, prompt: Prompt, reply: Reply, ended: bool, reply_images: PromptImages | None) -> ReplyTokens:
        if not reply.messages:
            raise UserError(
                f"rl.environment: {self.kind.__name__} returned an empty reply to an answer to {prompt.source} "
                "without done=True. Set `messages`, `text` or `tokens`, or done=True."
            )
        if prompt.messages is None:
            raise UserError(
                f"{prompt.source}: the prompt is a text, but rl.environment replies with messages. Write prompts as "
                "messages (or set rl.chat=true), or reply with `text`."
            )
        try:
            continuation = self.chats.continuation(prompt, reply.messages, reply.calls, reply_images)
        except BadRowError as error:
            raise EnvironmentFailure(f"{self.kind.__name__}.step: {error}") from error
        if continuation.reply_images is not None and self.room is not None and self.room.refusal:
            raise UserError(
                f"rl.environment: {self.kind.__name__} replied with an image, but this model cannot be trained on "
                f"images: {self.room.refusal}."
            )
        return ReplyTokens([*(() if ended else continuation.closing), *continuation.tokens], continuation.reply_images)


class EnvironmentSession:
    """One environment in its process. Methods raise EnvironmentFailure."""

    def __init__(self, name: str, worker: Worker, timeout: float) -> None:
        self._name, self._worker, self._timeout = name, worker, timeout
        self._has_ended = False

    async def start(self, prompt: Prompt) -> Reply | None:
        """Call Environment.start; returns its reply."""
        opening: Reply | None = await self._call("start", prompt)
        return opening

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        """Call Environment.step; returns the reply."""
        reply: Reply = await self._call("step", text, tokens)
        return reply

    async def close(self) -> None:
        """Call Environment.close if its process still runs; then end the process and its children."""
        try:
            if not self._has_ended:
                await self._call("close")
        finally:
            await self._worker.end()

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            result, error = await self._worker.ask((method, arguments, self._timeout), self._timeout + _GRACE)
        except WorkerError as failure:
            self._has_ended = True
            late = f" took more than {self._timeout:g} seconds"
            error = late if failure.late else f": its process {failure}"
        except asyncio.CancelledError:
            self._has_ended = True
            raise
        if error is not None:
            raise EnvironmentFailure(f"{self._name}.{method}{error}")
        return result


def load_environment(
    config: RlConfig,
    tokenizer: PreTrainedTokenizerBase,
    encoding: Encoding | None = None,
    images: Images | None = None,
) -> Episodes | None:
    """The Episodes of a config, or None without rl.environment. encoding: how chats are encoded; default: the config's.
    images: the image settings of a vision model."""
    kind, path = environment_class(config), config.rl.environment
    if kind is None or path is None:
        return None
    chats = ChatRenderer(tokenizer, encoding or read_encoding(config.data, tokenizer), images)
    rl, rollout = config.rl, config.rollout
    limits = rl.max_turns, rollout.max_prompt_tokens, rollout.max_new_tokens, rl.environment_timeout
    return Episodes(kind, EnvironmentPool(path), chats, *limits)
