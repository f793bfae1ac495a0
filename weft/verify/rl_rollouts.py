"""Synthetic rollouts with edge cases, sampled by the embedded engine, for checks without user data."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch.distributed as dist

from weft.errors import UserError
from weft.inference.base import Request, SamplingParams
from weft.inference.records import read_rollouts, recorded_files
from weft.inference.types import Prompt, Sample, SampleGroup, samples_of
from weft.rl.trainer import TrainerRank
from weft.rl.trajectory import TrajectoryBuilder

# Steps of groups: (tokens of the prompt, longest completion, rewards). A sample with reward None does not count. One
# group has no signal, one has a single sample that counts, and one step has one sample, so some ranks have none.
_GROUPS = (
    ((9, 20, (1.0, 0.0, 0.5, None, 0.0)), (1, 7, (1.0, 1.0, 1.0)), (14, 1, (None, 0.3)), (5, 13, (0.0, 2.0, 0.0))),
    ((23, 17, (1.0,)),),
    ((3, 11, (0.0, 1.0)), (17, 5, (0.5, 0.0, 1.0))),
)
_MOST_GROUPS = 4  # maximum number of groups that are used of a recorded rollout step
_BETWEEN = 5  # every fifth token of a completion, except the last, counts as an environment's
NOISE = 0.25  # standard deviation of noise on logprobs, so that corrections and clips have an effect


def awkward_rollouts(trainer: TrainerRank, vocabulary: int) -> list[list[SampleGroup]]:
    """The groups of three rollout steps, sampled on the first rank from the current weights; equal on all ranks.
    Collective. vocabulary: number of tokens."""
    trainer.embedded.wake(generates=trainer.ranks.is_first)
    shared: list[list[list[SampleGroup]]] = [[]]
    if trainer.ranks.is_first:
        shared[0] = [list(_sampled(trainer, step, number, vocabulary)) for number, step in enumerate(_GROUPS)]
    dist.broadcast_object_list(shared, src=0, group=trainer.ranks.group)
    trainer.embedded.sleep()
    return shared[0]


def _sampled(
    trainer: TrainerRank, step: Sequence[tuple[int, int, Sequence[float | None]]], number: int, vocabulary: int
) -> Iterator[SampleGroup]:
    rollout, source = trainer.config.rollout, random.Random(number)
    for index, (length, longest, rewards) in enumerate(step):
        tokens = tuple(source.randrange(vocabulary) for _ in range(min(length, rollout.max_prompt_tokens)))
        prompt = Prompt(number * 10 + index, 0, tokens, "", source=f"prompt {index + 1} of step {number + 1}")
        sampling = SamplingParams(
            min(longest, rollout.max_new_tokens), rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p
        )
        (completions,) = trainer.embedded.generate([Request(prompt.id, tokens, tuple(range(len(rewards))), sampling)])
        samples = []
        for number_of_sample, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
            transcript = TrajectoryBuilder(prompt)
            transcript.add_completion(completion)
            samples.append(transcript.sample(number_of_sample))
            samples[-1].reward, samples[-1].finish = reward, "length" if number_of_sample == 1 else "end"
        yield SampleGroup(prompt, samples)


def recorded_rollouts(folder: str) -> list[list[SampleGroup]]:
    """The first groups of the first rollout steps in RUN/rollouts, with their rewards. Raises UserError if there are
    none."""
    steps = [read_rollouts(file)[:_MOST_GROUPS] for file in recorded_files(folder, "--rollouts")[: len(_GROUPS)]]
    if any(sample.branch for step in steps for sample in samples_of(step)):
        raise UserError(
            f"--rollouts {folder}: has agent episodes with several documents, which the reference of weft verify does "
            f"not support in this version: remove --rollouts, so that weft makes samples itself."
        )
    for sample in samples_of(group for step in steps for group in step):
        sample.forget_readings()
    return steps


def disturb(groups: Sequence[SampleGroup]) -> None:
    """Mark some tokens as written by an environment, and add noise to the engine's logprobs."""
    for sample in samples_of(groups):
        drawn = np.flatnonzero(sample.sampled)
        sample.sampled[drawn[_BETWEEN - 1 : -1 : _BETWEEN]] = False
        sample.rollout_logprobs = np.where(
            sample.sampled, sample.rollout_logprobs + noise(sample, "rollout"), 0
        ).astype(np.float32)


def noise(sample: Sample, name: str) -> np.ndarray:
    """[T] noise, which depends only on the sample and on `name`, an array's name."""
    seed = [sample.prompt.index, sample.number, *name.encode()]
    drawn: np.ndarray = np.random.default_rng(seed).standard_normal(len(sample)).astype(np.float32)
    return NOISE * drawn
