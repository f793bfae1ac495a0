"""A sample under construction, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weft.data.image_files import PromptImages
from weft.data.messages import IMAGE_PARTS
from weft.inference.base import CallTimes, Completion, spans_of
from weft.inference.types import Prompt, Sample, SampleTimes, shown
from weft.rl.environments.base import Reply
from weft.rl.environments.episodes import ReplyTokens


class TrajectoryBuilder:
    """A sample under construction."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.finish: str = "abort"  # until the first answer
        self.turns, self.error, self.untrained = 0, "", ""  # reasons: of a failure, or why the sample is not trained
        self.reply_images: PromptImages | None = None  # as in Sample
        self._tokens = list(prompt.tokens)
        self._sampled, self._logprobs, self._versions, self._kept_logmass = (
            [value] * len(self._tokens) for value in (False, 0.0, -1, 0.0)
        )
        self._truncated = False
        self._routes: Any = None
        self._calls: list[CallTimes] = []
        self._messages: list[dict[str, Any]] = []
        self._reward, self._notes = 0.0, dict[str, Any]()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def images(self) -> PromptImages | None:
        """The images of the prompt, then those of replies."""
        return shown(self.prompt, self.reply_images)

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return len(self._tokens) - len(self.prompt.tokens)

    def add_completion(self, completion: Completion) -> None:
        """Append an answer of the policy. If its last token is a placeholder for an image, that token is dropped and
        the sample is not trained, because no forward accepts a placeholder without an image."""
        if completion.tokens and completion.tokens[-1] in self.prompt.placeholders:
            completion, self.untrained = _without_the_last(completion), "it sampled a placeholder token of an image"
        self._extend(completion.tokens, True, completion.logprobs, _token_versions(completion), completion.kept_logmass)
        if completion.routes is not None:
            # An engine sends the routes of all tokens so far; keep the routes that earlier answers were sampled with.
            num_known = 0 if self._routes is None else len(self._routes)
            routes = (
                completion.routes if num_known == 0 else np.concatenate([self._routes, completion.routes[num_known:]])
            )
            self._routes = routes
        if completion.times is not None:
            self._calls.append(completion.times)
        self.finish, self.turns = completion.finish, self.turns + 1

    def add_reply_tokens(self, following: ReplyTokens) -> None:
        """Append the tokens of a reply, which the policy did not sample."""
        count = len(following.tokens)
        self._extend(following.tokens, False, [0.0] * count, [-1] * count, None)
        self.reply_images = following.reply_images

    def add_context(self, tokens: Sequence[int]) -> None:
        """Append tokens that are not trained."""
        self.add_reply_tokens(ReplyTokens(list(tokens), self.reply_images))

    def add_answer(self, text: str) -> None:
        """Record the text of an answer."""
        self._messages.append({"role": "assistant", "content": text})

    def add_outcome(self, reply: Reply) -> None:
        """Record the reward and the notes of an environment's reply."""
        self._reward += reply.reward or 0.0
        self._notes.update(reply.notes)

    def add_reply(self, reply: Reply) -> None:
        """Record the environment's reply to the last answer."""
        if reply.calls:
            self._messages[-1]["tool_calls"] = list(reply.calls)
        self._messages += [_bare(message) for message in reply.messages]
        if reply.text is not None:
            self._messages.append({"role": "tool", "content": reply.text})
        self.add_outcome(reply)

    def sample(self, number: int, gives_reward: bool = False) -> Sample:
        """The finished sample. gives_reward: whether the environment's reward counts."""
        notes = {**self._notes}
        if self._messages:
            notes["messages"] = self._messages
        if self.error:
            notes["error"] = self.error
        if self.untrained:
            notes["untrained"] = self.untrained
        return Sample(
            prompt=self.prompt,
            number=number,
            tokens=np.array(self._tokens, np.int64),
            sampled=np.array(self._sampled, np.bool_),
            rollout_logprobs=np.array(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
            finish=self.finish,
            turns=self.turns,
            kept_logmass=np.array(self._kept_logmass, np.float32) if self._truncated else None,
            routes=self._routes,
            rewards={"environment": self._reward} if gives_reward else {},
            trained=not (self.error or self.untrained),
            reply_images=self.reply_images,
            notes=notes,
            times=SampleTimes(calls=self._calls),
        )

    def _extend(
        self,
        tokens: Sequence[int],
        sampled: bool,
        logprobs: Sequence[float],
        versions: Sequence[int],
        kept_logmass: Sequence[float] | None,
    ) -> None:
        assert len(tokens) == len(logprobs) == len(versions)
        self._tokens += tokens
        self._sampled += [sampled] * len(tokens)
        self._logprobs += logprobs
        self._versions += versions
        self._kept_logmass += [0.0] * len(tokens) if kept_logmass is None else kept_logmass
        self._truncated = self._truncated or kept_logmass is not None


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with an empty image part for each image; the sample keeps images in `replied`."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    is_image = [isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in content]
    bare = [{"type": "image"} if image else part for part, image in zip(content, is_image, strict=True)]
    return {**message, "content": bare}


def _without_the_last(completion: Completion) -> Completion:
    """A completion without its last token."""
    mass, routes = completion.kept_logmass, completion.routes
    return replace(
        completion, tokens=completion.tokens[:-1], logprobs=completion.logprobs[:-1], finish="length",
        versions=spans_of(_token_versions(completion)[:-1]), kept_logmass=None if mass is None else mass[:-1],
        routes=None if routes is None else routes[:-1],
    )  # fmt: skip


def _token_versions(completion: Completion) -> list[int]:
    """The version of the weights that sampled each token."""
    return [version for version, count in completion.versions for _ in range(count)]
