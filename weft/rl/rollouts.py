"""Rollouts: a group of samples for each prompt, in one turn or in a conversation with an environment.

Samples are token sequences: sampled tokens are kept as sampled, never decoded and tokenised again, and an environment's
replies are appended as tokens that are not trained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from weft.inference.base import Completion, Generates, Request, RolloutEngine, SamplingParams, seed_of
from weft.inference.types import Prompt, Sample, SampleGroup
from weft.launch.summary import Phases
from weft.rl.agents.agents import Agents
from weft.rl.colocation import DeviceSharing
from weft.rl.environments.episodes import EnvironmentFailure, EnvironmentSession, Episodes
from weft.rl.prompts import PromptStream
from weft.rl.trajectory import TrajectoryBuilder

Prompted = TypeVar("Prompted")  # a prompt, and further data that its samples need


async def rollout_group(
    prompt: Prompt,
    count: int,
    engine: Generates,
    sampling: SamplingParams,
    episodes: Episodes | Agents | None,
    seed: int,
    label: str = "",
) -> SampleGroup:
    """`count` samples of a prompt. Without an environment they are one request, so an engine computes the prompt once.
    An agent's episode may be several samples (Sample.branch).

    seed: of the run. A sample's seed depends only on it, the prompt's id, the sample's number and the turn. label:
    prefix of the id, so that evaluation and training have different seeds.
    """
    queued = time.time()
    # A sampled placeholder ends an answer, because it has no image.
    sampling = replace(sampling, ends=(*sampling.ends, *prompt.placeholders)) if prompt.placeholders else sampling
    if isinstance(episodes, Agents):
        runs = (episodes.episode(prompt, number, engine, sampling, seed, label) for number in range(count))
        group = SampleGroup(prompt, [sample for samples in await asyncio.gather(*runs) for sample in samples])
    elif episodes is not None:
        numbers = range(count)
        plays = (episode(prompt, number, engine, sampling, episodes, seed, label) for number in numbers)
        group = SampleGroup(prompt, list(await asyncio.gather(*plays)))
    else:
        name = label + prompt.id
        seeds = tuple(seed_of(seed, name, number) for number in range(count))
        request = Request(name, prompt.tokens, seeds, sampling, prompt.images)
        group = group_of(prompt, await engine.generate(request))
    for sample in group.samples:
        times = sample.times
        times.queued = queued
        if times.ended is None and times.calls:  # no environment and no agent
            times.ended = times.calls[-1].ended
    return group


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
    engine: Generates,
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
        if (opening := await environment.start(prompt)) is not None:
            prompt = episodes.opened(prompt, opening)
            transcript = TrajectoryBuilder(prompt)
            transcript.add_outcome(opening)
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
    sample = transcript.sample(number, episodes.kind.gives_reward)
    sample.times.ended = time.time()
    return sample


class GroupStoppedError(Exception):
    """A group is no longer needed (EarlyStop)."""


class EarlyStop:
    """Stops groups that are still being generated once enough are complete (rollout.oversample). Groups call it instead
    of the engine.

    needed: number of groups that `counts` must hold for. groups: how many were stopped.
    """

    def __init__(self, engine: RolloutEngine, needed: int, counts: Callable[[SampleGroup], bool]) -> None:
        self._engine, self._needed, self._counts = engine, needed, counts
        self._is_over, self.groups = False, 0

    async def generate(self, request: Request) -> list[Completion]:
        """RolloutEngine.generate. Raises GroupStoppedError after the stop."""
        try:
            completions = [] if self._is_over else await self._engine.generate(request)
        except asyncio.CancelledError:  # of a request that no engine had begun
            if not self._is_over:
                raise
        if self._is_over:
            raise GroupStoppedError
        return completions

    async def complete(self, group: SampleGroup) -> None:
        """Note a complete group; the last that is needed ends all requests."""
        self._needed -= self._counts(group)
        if self._needed <= 0 and not self._is_over:
            self._is_over = True
            await self._engine.abort()


async def rewarded_groups(
    prompts: Sequence[Prompted],
    generate: Callable[[Prompted], Awaitable[SampleGroup]],
    reward: Callable[[SampleGroup], Awaitable[None]],
    phases: Phases,
    switch: DeviceSharing,
    stop: EarlyStop | None = None,
) -> list[SampleGroup]:
    """A group per prompt, without stopped groups. Each group is scored as soon as it is complete, while others are
    still being generated; with switch.scores_last all groups are scored when the last is complete.

    phases: `generate` gets the seconds until the last group is complete, `reward` the seconds after that.
    """
    await switch.to_generation()
    began = drawn = time.perf_counter()

    async def generate_and_reward(prompt: Prompted) -> SampleGroup | None:
        nonlocal drawn
        try:
            group = await generate(prompt)
        except GroupStoppedError:
            return None
        drawn = time.perf_counter()
        if not switch.scores_last:
            await reward(group)
        if stop is not None:
            await stop.complete(group)
        return group

    results = await asyncio.gather(*(generate_and_reward(prompt) for prompt in prompts))
    groups = [group for group in results if group is not None]
    if stop is not None:
        stop.groups = len(prompts) - len(groups)
    if switch.scores_last:
        await switch.to_scoring()
        await asyncio.gather(*(reward(group) for group in groups))
    phases.add({"generate": drawn - began, "reward": time.perf_counter() - drawn})
    return groups


async def groups_to_train(
    stream: PromptStream,
    roll: Callable[[Sequence[Prompt], int], Awaitable[list[SampleGroup]]],
    rounds: int,
    oversample: int = 0,
) -> tuple[list[SampleGroup], int]:
    """The groups of a rollout step, and the number of groups that were omitted (rl.dynamic_sampling).

    A group whose rewards are all equal is replaced by a group of the stream's next prompt, in at most `rounds` rounds.
    If groups are still missing after the last round, the first replaced groups are used. roll: generates and scores
    groups, in prompt order, given prompts and the number of groups that are needed; each round starts `oversample` more
    than that. Without these the choice depends only on rewards, not on timing, so runs are reproducible.
    """
    chosen: list[SampleGroup] = []
    aside: list[SampleGroup] = []
    for _ in range(rounds + 1):
        needed = stream.per_step - len(chosen)
        for group in await roll(stream.take(needed + oversample), needed):
            (chosen if group.has_signal or rounds == 0 else aside).append(group)
        if len(chosen) >= stream.per_step:
            break
    missing = max(0, stream.per_step - len(chosen))
    return chosen[: stream.per_step] + aside[:missing], len(aside) - missing


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
