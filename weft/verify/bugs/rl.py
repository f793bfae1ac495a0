"""Bugs of reinforcement learning: the distribution of logprobs, and the samples and tokens that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.inference.types import Flags, Floats, Sample, SampleGroup
from weft.verify.bugs import GRADIENTS, Original, Plant, bug

UPDATE = "tests/parity/test_policy_parity.py: the update of grpo is that of plain PyTorch"


@bug(
    "B23", "weft.models.train_module:chunked_readouts",
    "logprobs are recomputed without the temperature that tokens were sampled with",
    caught_by=UPDATE, issue="huggingface/trl#3029", needs="rollout.temperature other than 1",
)  # fmt: skip
def temperature_left_out(plant: Plant, original: Original, *args: Any, temperature: float, **kwargs: Any) -> Any:
    plant.hits += temperature != 1
    return original(*args, temperature=1.0, **kwargs)


@bug(
    "B26", "weft.rl.advantages:advantages",
    "samples that only fill a batch count in the mean of their group",
    caught_by=UPDATE, issue="verl-project/verl#5969", needs="samples without a reward",
)  # fmt: skip
def fillers_in_the_mean(plant: Plant, original: Original, groups: Sequence[SampleGroup], config: Any) -> Any:
    fillers = [sample for group in groups for sample in group.samples if not sample.counts]
    plant.hits += len(fillers)
    values = [(sample.reward, sample.trained) for sample in fillers]
    for sample in fillers:
        sample.reward, sample.trained = 0.0, True
    metrics = original(groups, config)
    for sample, (reward, trained) in zip(fillers, values, strict=True):
        sample.reward, sample.trained = reward, trained
    return metrics


@bug(
    "B9", "weft.rl.documents:trained_tokens",
    "what an environment wrote between two turns is trained like what the policy drew",
    caught_by=UPDATE, issue="OpenRLHF/OpenRLHF#973", needs="samples of several turns",
)  # fmt: skip
def environment_trained(plant: Plant, original: Original, sample: Sample) -> Flags:
    drawn: Flags = original(sample)
    between = drawn | (np.arange(len(drawn)) >= drawn.argmax())
    plant.hits += bool((between != drawn).any())
    return between


@bug(
    "B55", "weft.rl.corrections:comparable",
    "tokens are drawn with top_p below 1, and their logprobs are compared with those of the whole vocabulary",
    caught_by=GRADIENTS, issue="", needs="rollout.top_p below 1, and rl.epochs above 1",
)  # fmt: skip
def truncation_ignored(plant: Plant, original: Original, sample: Sample) -> Floats:
    plant.hits += sample.kept_logmass is not None and bool((sample.kept_logmass[sample.sampled] < 0).any())
    return sample.rollout_logprobs
