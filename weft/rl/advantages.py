"""Advantages: how much better than expected each sampled token was, from the rewards of groups of samples.

An estimator takes groups of samples that all count. For each sample it returns a number, or an array [G] for its G
sampled tokens, in order. Results do not depend on how samples are distributed over ranks or optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft.config.presets import ADVANTAGES
from weft.config.rl_schema import RlAlgorithm, RlConfig
from weft.errors import UserError
from weft.importing import import_named
from weft.inference.types import Sample, SampleGroup, samples_of
from weft.rl.corrections import Exact, kl

Estimates = Sequence[Sequence[float | Exact]]
Estimator = Callable[[Sequence[SampleGroup], RlAlgorithm], Estimates]

# Keep quotients finite, as in TRL: added to a standard deviation, and to the variance under its root.
_BESIDE, _INSIDE = 1e-4, 1e-8


def advantages(groups: Sequence[SampleGroup], config: RlAlgorithm) -> dict[str, float]:
    """Set the advantages of all samples, and their `returns` with gae; returns metrics of rewards and values.

    Samples that have no reward or are not trained get advantages of zero and are left out of all means.
    """
    for group in groups:
        for sample in group.samples:
            sample.advantages = np.zeros(len(sample), np.float32)
    compared = [SampleGroup(group.prompt, [s for s in group.samples if s.counts]) for group in groups]
    compared = [group for group in compared if group.samples]
    if not compared:
        return {}
    for group, estimates in zip(compared, choose_estimator(config.advantage)(compared, config), strict=True):
        for sample, estimate in zip(group.samples, estimates, strict=True):
            _set(sample, estimate, config.advantage)
    return reward_metrics(compared) | value_metrics(compared)


def value_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """critic/explained_variance: 1 - Var(R - V) / Var(R) over sampled tokens, with returns R and values V. It is 1 for
    a perfect critic and 0 for a constant one. Empty without a critic, or if all returns are equal."""
    known = [
        (sample.returns[sample.sampled], sample.values[sample.sampled])
        for group in groups
        for sample in group.samples
        if sample.returns is not None and sample.values is not None
    ]
    if not known:
        return {}
    returns, values = (np.concatenate(column).astype(np.float64) for column in zip(*known, strict=True))
    if not len(returns) or np.ptp(returns) == 0:
        return {}
    return {"critic/explained_variance": float(1 - (returns - values).var() / returns.var())}


def choose_estimator(name: str) -> Estimator:
    """One of weft's estimators, or the user's at an import path. UserError if the path does not name a callable."""
    if name in _ESTIMATORS:
        return _ESTIMATORS[name]
    found = import_named(name, "rl.advantage")
    if not callable(found):
        raise UserError(f"rl.advantage: {name} is no function of (groups, config).")
    own: Estimator = found
    return own


def _set(sample: Sample, estimate: Any, name: str) -> None:
    values = np.asarray(estimate, np.float64)
    if values.shape not in ((), (sample.length,)) or not np.isfinite(values).all():
        raise UserError(
            f"rl.advantage: {name} must give sample {sample.id} one finite number, or {sample.length} of them, one for "
            f"each token that the policy drew; it gave {estimate!r}."
        )
    assert sample.advantages is not None
    sample.advantages[sample.sampled] = values


# ---------------------------------------------------------------- rewards


def token_rewards(sample: Sample, config: RlAlgorithm) -> Exact:
    """[G] the reward of each sampled token: the sample's reward at the last one and, if rl.kl_in is `reward`,
    -rl.kl_coef x the KL from the reference at each.

    Ouyang et al. 2022, arXiv:2203.02155, equation 2, per token, with `old` as the penalised policy.
    """
    rewards = np.zeros(sample.length)
    if config.kl_coef > 0 and config.kl_in == "reward":
        assert sample.old_logprobs is not None and sample.ref_logprobs is not None, (
            f"sample {sample.id} has no reference logprobs"
        )
        difference = sample.old_logprobs[sample.sampled].astype(np.float64) - sample.ref_logprobs[sample.sampled]
        rewards -= config.kl_coef * kl(difference, config.kl_estimator, config.kl_clamp)
    if len(rewards):
        assert sample.reward is not None
        rewards[-1] += sample.reward
    return rewards


def scores(group: SampleGroup, config: RlAlgorithm) -> Exact:
    """[samples] the sum of each sample's token rewards."""
    return np.array([token_rewards(sample, config).sum() for sample in group.samples])


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
    rewards = [np.array([s.reward for s in group.samples], np.float64) for group in groups]
    found = {
        "reward": float(np.concatenate(rewards).mean()),
        "reward_std": float(np.mean([_deviation(r) for r in rewards])),
        "frac_reward_zero_std": float(np.mean([not group.has_signal for group in groups])),
    }
    samples = samples_of(groups)
    for name in sorted({name for sample in samples for name in sample.rewards}):
        known = np.array([r for r in (s.rewards.get(name) for s in samples) if r is not None], np.float64)
        if len(known):
            found |= {f"rewards/{name}/mean": float(known.mean()), f"rewards/{name}/std": _deviation(known)}
    return found


def _deviation(values: Exact) -> float:
    """The standard deviation with n - 1; exactly 0 for a single value or equal ones."""
    return float(values.std(ddof=1)) if len(values) > 1 and np.ptp(values) > 0 else 0.0


def _centred(values: Exact) -> Exact:
    """The values minus their mean; exactly 0 for equal values, where rounding could leave a rest."""
    return values - values.mean() if np.ptp(values) > 0 else np.zeros_like(values)


# ---------------------------------------------------------------- estimators


def grpo(groups: Sequence[SampleGroup], config: RlAlgorithm) -> Estimates:
    """(r - mean) / (std + 1e-4) over the group (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); std with n - 1.

    rl.advantage_norm: `batch` divides by the standard deviation of all rewards of the step (Lite PPO,
    arXiv:2508.08221); `none` does not divide (Dr. GRPO, arXiv:2503.20783, section 3.1).
    """
    found = [scores(group, config) for group in groups]
    divisors = [1.0] * len(found)
    if config.advantage_norm == "group":
        divisors = [_deviation(r) + _BESIDE for r in found]
    elif config.advantage_norm == "batch":
        divisors = [_deviation(np.concatenate(found)) + _BESIDE] * len(found)
    return [list(_centred(r) / divisor) for r, divisor in zip(found, divisors, strict=True)]


def rloo(groups: Sequence[SampleGroup], config: RlAlgorithm) -> Estimates:
    """r - mean of the group's other rewards, which equals n / (n - 1) x (r - mean of all n) (Kool et al. 2019; Ahmadian
    et al. 2024, arXiv:2402.14740, section 3.3)."""
    found = [scores(group, config) for group in groups]
    return [list(_centred(r) * (len(r) / max(1, len(r) - 1))) for r in found]


def reinforce_plus_plus(groups: Sequence[SampleGroup], config: RlAlgorithm) -> Estimates:
    """Reward-to-go of each token, whitened over all tokens of the step (Hu et al. 2025, arXiv:2501.03262)."""
    returns = [[_to_go(token_rewards(sample, config), config.gamma) for sample in group.samples] for group in groups]
    return _whitened(returns)


def reinforce_plus_plus_baseline(groups: Sequence[SampleGroup], config: RlAlgorithm) -> Estimates:
    """r - mean of the group, whitened over all tokens of the step (Hu et al. 2025, arXiv:2501.03262, section 3.3)."""
    centred = [_centred(scores(group, config)) for group in groups]
    return _whitened(
        [
            [np.full(sample.length, value) for sample, value in zip(group.samples, values, strict=True)]
            for group, values in zip(groups, centred, strict=True)
        ]
    )


def gae(groups: Sequence[SampleGroup], config: RlAlgorithm) -> Estimates:
    """Sum over k of (gamma lambda)^k delta_(t+k), with delta_t = r_t + gamma V_(t+1) - V_t (Schulman et al. 2015,
    arXiv:1506.02438, equation 16).

    V_t is the critic's value before token t is sampled, and 0 after the last token. Tokens of an environment are
    skipped: t + 1 is the next sampled token. Also sets sample.returns to advantage + V. With rl.advantage_norm=batch,
    advantages are whitened over the step afterwards.
    """
    found: list[list[Exact]] = []
    for group in groups:
        found.append([])
        for sample in group.samples:
            assert sample.values is not None, f"sample {sample.id} has no values"
            values = sample.values[sample.sampled].astype(np.float64)
            following = np.append(values[1:], 0.0)[: len(values)]
            deltas = token_rewards(sample, config) + config.gamma * following - values
            estimate = _to_go(deltas, config.gamma * config.gae_lambda)
            sample.returns = np.zeros(len(sample), np.float32)
            sample.returns[sample.sampled] = estimate + values
            found[-1].append(estimate)
    return _whitened(found) if config.advantage_norm == "batch" else found


def _to_go(values: Exact, factor: float) -> Exact:
    """[G] discounted sums: out_t = values_t + factor x out_(t+1)."""
    if factor == 1:
        return values[::-1].cumsum()[::-1]
    out, ahead = [], 0.0
    for value in values[::-1].tolist():  # Python's floats, because numpy's scalars are slow
        ahead = value + factor * ahead
        out.append(ahead)
    return np.array(out[::-1], np.float64)


def _whitened(found: Sequence[Sequence[Exact]]) -> list[list[Exact]]:
    """(value - mean) / standard deviation, over all tokens at once, with n - 1; zeros if all values are equal."""
    tokens = np.concatenate([values for group in found for values in group])
    if len(tokens) < 2 or np.ptp(tokens) == 0:
        return [[np.zeros_like(values) for values in group] for group in found]
    mean, scale = tokens.mean(), np.sqrt(tokens.var(ddof=1) + _INSIDE)
    return [[(values - mean) / scale for values in group] for group in found]


_ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
}
assert set(_ESTIMATORS) == set(ADVANTAGES)
