"""Samples of reinforcement learning for tests: a prompt of three tokens, then what the policy drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.config.rl_schema import DataConfig, ModelConfig, RlAlgorithm, RlConfig, RolloutConfig
from weft.inference.types import Prompt, Sample, SampleGroup
from weft.rl.algorithms import ALGORITHMS
from weft.rl.colocation import DeviceSharing

PROMPT = (5, 6, 7)


def algorithm(name: str = "grpo", **keys: Any) -> RlAlgorithm:
    """The keys of `rl` with a preset, as they are when a config with that rl.algorithm is read."""
    preset = {leaf: tuple(v) if isinstance(v, list) else v for leaf, v in ALGORITHMS[name].preset.items()}
    return RlAlgorithm(**{"reward": ("math",), "algorithm": name, **preset, **keys})


def rl_config(rl: RlAlgorithm, **rollout: Any) -> RlConfig:
    return RlConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), rl=rl, rollout=RolloutConfig(**rollout))


def sharing(engine: Any) -> DeviceSharing:
    """Of an engine with devices of its own."""
    return DeviceSharing(engine, [])


def sample(
    number: int, tokens: int, reward: float | None, *, index: int = 0, gaps: Sequence[int] = (), **arrays: Any
) -> Sample:
    """A sample that drew `tokens` tokens. gaps: places among them that an environment wrote. arrays: [tokens] each."""
    length = len(PROMPT) + tokens
    sampled = np.array([False] * len(PROMPT) + [position not in gaps for position in range(tokens)])
    drawn_sample = Sample(
        Prompt(index, 0, PROMPT, "p"), number, np.arange(length) % 100 + 5, sampled, np.zeros(length, np.float32),
        np.zeros(length, np.int32), "end", reward=reward,
    )  # fmt: skip
    for name, values in arrays.items():
        if isinstance(values, Sequence) and not isinstance(values, str):
            values = np.array([0.0] * len(PROMPT) + list(values), np.float32)
        setattr(drawn_sample, name, values)
    return drawn_sample


def group(rewards: Sequence[float | None], lengths: Sequence[int] = (), index: int = 0) -> SampleGroup:
    sizes = lengths or [2] * len(rewards)
    samples = [sample(n, size, r, index=index) for n, (size, r) in enumerate(zip(sizes, rewards, strict=True))]
    return SampleGroup(samples[0].prompt, samples)
