"""Rewards of tokens, and the statistics that advantages share, in fp64. G: the sampled tokens of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Exact = NDArray[np.float64]
KlEstimator = Literal["k1", "k2", "k3"]

# Keep quotients finite, as in TRL: added to a standard deviation, and to the variance under its root.
BESIDE_DEVIATION, _BESIDE_VARIANCE = 1e-4, 1e-8


def token_rewards(sample: Any, keys: Any) -> Exact:
    """[G] the reward of each sampled token: the sample's reward at the last one and, if rl.kl_in is `reward`,
    -rl.kl_coef x the KL from the reference at each.

    Ouyang et al. 2022, arXiv:2203.02155, equation 2, per token, with `old` as the penalised policy.
    """
    rewards = np.zeros(sample.length)
    if keys.kl_coef > 0 and keys.kl_in == "reward":
        assert sample.old_logprobs is not None and sample.ref_logprobs is not None, (
            f"{sample.id}: no reference logprobs"
        )
        difference = sample.old_logprobs[sample.sampled].astype(np.float64) - sample.ref_logprobs[sample.sampled]
        rewards -= keys.kl_coef * kl(difference, keys.kl_estimator, keys.kl_clamp)
    if len(rewards):
        assert sample.reward is not None
        rewards[-1] += sample.reward
    return rewards


def scores(group: Any, keys: Any) -> Exact:
    """[samples] the sum of each sample's token rewards."""
    return np.array([token_rewards(sample, keys).sum() for sample in group.samples])


def kl(difference: Exact, estimator: KlEstimator, clamp: float | None = None) -> Exact:
    """KL(p || q) = E_p[d], estimated from tokens sampled from p, with d = log p - log q per token (Schulman 2020,
    http://joschu.net/blog/kl-approx.html). clamp: limit on the absolute value of each estimate.

        k1 = d                  unbiased, of high variance, often negative
        k2 = d^2 / 2            biased, never negative
        k3 = exp(-d) - 1 + d    unbiased, never negative

    These properties hold for values, in rewards and metrics. In a loss the gradient matters, which has other
    properties: see kl_loss in weft/engine/losses/policy.py.
    """
    if estimator == "k1":
        estimate = difference
    elif estimator == "k2":
        estimate = np.square(difference) / 2
    else:
        estimate = np.expm1(-difference) + difference
    return estimate if clamp is None else estimate.clip(-clamp, clamp)


def deviation(values: Exact) -> float:
    """The standard deviation with n - 1; exactly 0 for a single value or equal ones."""
    return float(values.std(ddof=1)) if len(values) > 1 and np.ptp(values) > 0 else 0.0


def centred(values: Exact) -> Exact:
    """values - mean; exactly 0 for equal values, without rounding errors."""
    return values - values.mean() if np.ptp(values) > 0 else np.zeros_like(values)


def discounted_sums(values: Exact, factor: float) -> Exact:
    """[G] out_t = values_t + factor x out_(t+1)."""
    if factor == 1:
        return values[::-1].cumsum()[::-1]
    out, following = [], 0.0
    for value in values[::-1].tolist():  # Python's floats, because numpy's scalars are slow
        following = value + factor * following
        out.append(following)
    return np.array(out[::-1], np.float64)


def whitened(estimates: Sequence[Sequence[Exact]]) -> list[list[Exact]]:
    """(value - mean) / standard deviation, over all tokens at once, with n - 1; zeros if all values are equal."""
    tokens = np.concatenate([values for group in estimates for values in group])
    if len(tokens) < 2 or np.ptp(tokens) == 0:
        return [[np.zeros_like(values) for values in group] for group in estimates]
    mean, scale = tokens.mean(), np.sqrt(tokens.var(ddof=1) + _BESIDE_VARIANCE)
    return [[(values - mean) / scale for values in group] for group in estimates]
