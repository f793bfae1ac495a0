"""Rollouts: a group of samples for each prompt, in one turn or in a conversation with an environment.

Samples are token sequences: sampled tokens are kept as sampled, never decoded and tokenised again, and an environment's
replies are appended as tokens that are not trained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from weft.data.image_files import PromptImages
from weft.data.messages import IMAGE_PARTS
from weft.inference.base import Completion, Request, RolloutEngine, SamplingParams, seed_of, spans_of
from weft.inference.types import Prompt, Sample, SampleGroup, shown
from weft.launch.summary import Phases
from weft.rl.environments.base import Reply
from weft.rl.environments.episodes import EnvironmentFailure, EnvironmentSession, Episodes, ReplyTokens
from weft.rl.prompts import PromptStream


async def rollout_group(
    prompt: Prompt,
    count: int,
    engine: RolloutEngine,
    sampling: SamplingParams,
    episodes: Episodes | None,
    seed: int,
    label: str = "",
) -> SampleGroup:
    """`count` samples of a prompt. Without an environment they are one request, so an engine computes the prompt once.

    seed: of the run. A sample's seed depends only on it, the prompt's id, the sample's number and the turn. label:
    prefix of the id, so that evaluation and training have different seeds.
    """
    # A sampled placeholder ends an answer, because it has no image.
    sampling = replace(sampling, ends=(*sampling.ends, *prompt.placeholders)) if prompt.placeholders else sampling
    if episodes is not None:
        numbers = range(count)
        plays = (episode(prompt, number, engine, sampling, episodes, seed, label) for number in numbers)
        return SampleGroup(prompt, list(await asyncio.gather(*plays)))
    name = label + prompt.id
    seeds = tuple(seed_of(seed, name, number) for number in range(count))
    return group_of(prompt, await engine.generate(Request(name, prompt.tokens, seeds, sampling, prompt.images)))


def group_of(prompt: Prompt, completions: Sequence[Completion]) -> SampleGroup:
    """A group of single-turn samples from the completions of a prompt."""
    samples = []
    for number, completion in enumerate(completions):
        transcript = TrajectoryBuilder(prompt)
        transcript.add_completion(completion)
        samples.append(transcript.sample(number))
    return SampleGroup(prompt, samples)


async def episode(
    prompt: Prompt,
    number: int,
    engine: RolloutEngine,
    sampling: SamplingParams,
    episodes: Episodes,
    seed: int,
    label: str = "",
) -> Sample:
    """One sample: a conversation with a new environment.

    The conversation ends when the environment is done, after rl.max_turns answers, when an answer does not end by
    itself, or when a reply leaves no room for another token (finish `length`; Episodes.max_completion_tokens). If the
    environment's code fails, the sample is not trained, and its notes have the `error`.
    """
    transcript = TrajectoryBuilder(prompt)
    environment = await episodes.open()
    try:
        await environment.start(prompt)
        while True:
            turn, name = transcript.turns, label + prompt.id
            max_tokens = episodes.max_completion_tokens(prompt, transcript.reply_images)
            turn_sampling = replace(sampling, max_new_tokens=max_tokens - transcript.length)
            seeds = (seed_of(seed, name, number, turn),)
            request = Request(
                f"{name}/{number} turn {turn + 1}", transcript.tokens, seeds, turn_sampling, transcript.images
            )
            (completion,) = await engine.generate(request)
            transcript.add_completion(completion)
            if transcript.untrained:
                break
            text, ended = _decode_answer(completion, sampling, episodes.chats.tokenizer)
            transcript.add_answer(text)
            if completion.finish != "end":
                break
            reply = await environment.step(text, completion.tokens)
            transcript.add_reply(reply)
            if reply.done or transcript.turns == episodes.max_turns:
                break
            following = episodes.reply_tokens(prompt, reply, ended, transcript.reply_images)
            if transcript.length + len(following.tokens) >= episodes.max_completion_tokens(
                prompt, following.reply_images
            ):
                transcript.finish = "length"
                break
            transcript.add_reply_tokens(following)
    except EnvironmentFailure as error:
        transcript.error = str(error)
    finally:
        await _close(environment, transcript)
    return transcript.sample(number, episodes.kind.gives_reward)


async def rewarded_groups(
    prompts: Sequence[Prompt],
    generate: Callable[[Prompt], Awaitable[SampleGroup]],
    reward: Callable[[SampleGroup], Awaitable[None]],
    phases: Phases,
) -> list[SampleGroup]:
    """A group per prompt. Each is scored as soon as it is complete, while others are still being generated.

    phases: `generate` gets the seconds until the last group is complete, `reward` the seconds after that.
    """
    began = drawn = time.perf_counter()

    async def generate_and_reward(prompt: Prompt) -> SampleGroup:
        nonlocal drawn
        group = await generate(prompt)
        drawn = time.perf_counter()
        await reward(group)
        return group

    groups = await asyncio.gather(*(generate_and_reward(prompt) for prompt in prompts))
    phases.add({"generate": drawn - began, "reward": time.perf_counter() - drawn})
    return list(groups)


async def groups_to_train(
    stream: PromptStream, roll: Callable[[Sequence[Prompt]], Awaitable[list[SampleGroup]]], rounds: int
) -> tuple[list[SampleGroup], int]:
    """The groups of a rollout step, and the number of groups that were left out (rl.dynamic_sampling).

    A group whose rewards are all equal is replaced by a group of the stream's next prompt, in at most `rounds` rounds.
    If groups are still missing then, those set aside first are used after all. roll: generates and scores groups, in
    prompt order. The choice depends only on rewards, not on timing, so runs are reproducible.
    """
    chosen: list[SampleGroup] = []
    aside: list[SampleGroup] = []
    for _ in range(rounds + 1):
        for group in await roll(stream.take(stream.per_step - len(chosen))):
            (chosen if group.has_signal or rounds == 0 else aside).append(group)
        if len(chosen) == stream.per_step:
            break
    missing = stream.per_step - len(chosen)
    return chosen + aside[:missing], len(aside) - missing


async def _close(environment: EnvironmentSession, transcript: TrajectoryBuilder) -> None:
    try:
        await environment.close()
    except EnvironmentFailure as error:
        transcript.error = transcript.error or str(error)


def _decode_answer(
    completion: Completion, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, bool]:
    """The text of an answer without its end token, and whether it has one."""
    tokens = completion.tokens
    ended = bool(tokens) and tokens[-1] in sampling.ends
    return str(tokenizer.decode(list(tokens[:-1] if ended else tokens))), ended


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
            completion, self.untrained = _without_the_last(completion), "it drew a token that stands for an image"
        self._extend(completion.tokens, True, completion.logprobs, _token_versions(completion), completion.kept_logmass)
        if completion.routes is not None:
            # An engine sends the routes of all tokens so far; keep the routes that earlier answers were sampled with.
            num_known = 0 if self._routes is None else len(self._routes)
            routes = (
                completion.routes if num_known == 0 else np.concatenate([self._routes, completion.routes[num_known:]])
            )
            self._routes = routes
        self.finish, self.turns = completion.finish, self.turns + 1

    def add_reply_tokens(self, following: ReplyTokens) -> None:
        """Append the tokens of a reply, which the policy did not sample."""
        count = len(following.tokens)
        self._extend(following.tokens, False, [0.0] * count, [-1] * count, None)
        self.reply_images = following.reply_images

    def add_answer(self, text: str) -> None:
        """Record the text of an answer."""
        self._messages.append({"role": "assistant", "content": text})

    def add_reply(self, reply: Reply) -> None:
        """Record the environment's reply to the last answer."""
        if reply.calls:
            self._messages[-1]["tool_calls"] = list(reply.calls)
        self._messages += [_bare(message) for message in reply.messages]
        if reply.text is not None:
            self._messages.append({"role": "tool", "content": reply.text})
        self._reward += reply.reward or 0.0
        self._notes.update(reply.notes)

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
    """A message with a bare part in place of each image; the sample keeps images in `replied`."""
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
