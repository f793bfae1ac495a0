"""Advantages: how much better than expected each sampled token was, from the rewards of groups of samples.

An estimator takes groups of samples that all count. For each sample it returns a number, or an array [G] for its G
sampled tokens, in order. Results do not depend on how samples are distributed over ranks or optimizer steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft.config.rl_schema import RlAlgorithm, RlConfig
from weft.errors import UserError
from weft.importing import import_named
from weft.inference.types import Sample, SampleGroup, samples_of
from weft.rl.algorithms import ADVANTAGES
from weft.rl.algorithms.returns import Exact, deviation

Estimates = Sequence[Sequence[float | Exact]]
Estimator = Callable[[Sequence[SampleGroup], RlAlgorithm], Estimates]


def advantages(groups: Sequence[SampleGroup], config: RlAlgorithm) -> dict[str, float]:
    """Set the advantages of all samples, and their `returns` with gae; returns metrics of rewards and values.

    Samples without a reward or without training get advantages of zero, and no mean includes them.
    """
    for group in groups:
        for sample in group.samples:
            sample.advantages = np.zeros(len(sample), np.float32)
    compared = [SampleGroup(group.prompt, [s for s in group.episodes if s.counts]) for group in groups]
    compared = [group for group in compared if group.samples]
    if not compared:
        return {}
    branches = defaultdict[tuple[str, int], list[Sample]](list)
    for sample in samples_of(groups):
        if sample.branch and sample.counts:
            branches[sample.prompt.id, sample.number].append(sample)
    for group, estimates in zip(compared, choose_estimator(config.advantage)(compared, config), strict=True):
        for sample, estimate in zip(group.samples, estimates, strict=True):
            for part in (sample, *branches[sample.prompt.id, sample.number]):
                _set(part, estimate, config.advantage)
    return reward_metrics(compared) | value_metrics(compared)


def value_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """critic/explained_variance: 1 - Var(R - V) / Var(R) over sampled tokens, with returns R and values V. It is 1 for
    a perfect critic and 0 for a constant one. Empty without a critic, or if all returns are equal."""
    pairs = [
        (sample.returns[sample.sampled], sample.values[sample.sampled])
        for group in groups
        for sample in group.samples
        if sample.returns is not None and sample.values is not None
    ]
    if not pairs:
        return {}
    returns, values = (np.concatenate(column).astype(np.float64) for column in zip(*pairs, strict=True))
    if not len(returns) or np.ptp(returns) == 0:
        return {}
    return {"critic/explained_variance": float(1 - (returns - values).var() / returns.var())}


def choose_estimator(name: str) -> Estimator:
    """A built-in estimator, or the user's at an import path. UserError if the path does not name a callable."""
    if name in ADVANTAGES:
        return ADVANTAGES[name].estimate
    loaded = import_named(name, "rl.advantage")
    if not callable(loaded):
        raise UserError(f"rl.advantage: {name} is not a function of (groups, config).")
    estimator: Estimator = loaded
    return estimator


def _set(sample: Sample, estimate: Any, name: str) -> None:
    values = np.asarray(estimate, np.float64)
    if values.shape not in ((), (sample.length,)) or not np.isfinite(values).all():
        raise UserError(
            f"rl.advantage: {name} must return one finite number for sample {sample.id}, or {sample.length} numbers, "
            f"one for each sampled token; it returned {estimate!r}."
        )
    assert sample.advantages is not None
    sample.advantages[sample.sampled] = values


# ---------------------------------------------------------------- rewards


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """0 up to `longest - buffer` tokens, then linear down to -1 at `longest` (DAPO, arXiv:2503.14476, equation 13)."""
    return -min(max(0.0, (length - (longest - buffer)) / buffer), 1.0)


def shape_rewards(groups: Sequence[SampleGroup], config: RlConfig) -> None:
    """Add the penalty for over-long samples to their rewards, under the name `overlong`. Call before advantages()."""
    if config.rl.overlong_buffer is None:
        return
    for sample in samples_of(groups):
        if sample.reward is not None:
            part = overlong_penalty(sample.length, config.rollout.max_new_tokens, config.rl.overlong_buffer)
            sample.rewards["overlong"] = config.rl.overlong_penalty * part
            sample.reward += config.rl.overlong_penalty * part


def reward_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Metrics of rewards, under TRL's names. reward: mean over all samples. reward_std: mean over the groups' standard
    deviations."""
    rewards = [np.array(group.rewards, np.float64) for group in groups]
    metrics = {
        "reward": float(np.concatenate(rewards).mean()),
        "reward_std": float(np.mean([deviation(r) for r in rewards])),
        "frac_reward_zero_std": float(np.mean([not group.has_signal for group in groups])),
    }
    samples = [sample for group in groups for sample in group.episodes]
    for name in sorted({name for sample in samples for name in sample.rewards}):
        values = np.array([r for r in (s.rewards.get(name) for s in samples) if r is not None], np.float64)
        if len(values):
            metrics |= {f"rewards/{name}/mean": float(values.mean()), f"rewards/{name}/std": deviation(values)}
    return metrics
