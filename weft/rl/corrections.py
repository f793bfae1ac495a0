"""What becomes of the difference between the policy that an engine sampled from and the trainer with the same weights.

The engine's kernels round otherwise than the trainer's, so that samples come from a policy (`rollout`) that is not
quite the one that is trained (`old`). With rho = old / rollout of what was sampled, a token's loss times rho is what it
would be on average had the trainer sampled (importance sampling); bounded, because rho of long samples is not.

Which logprobs may be compared: an engine that leaves tokens out (top-p, top-k, min-p) says the logprob among those that
it kept. Plus the log of what they have of the whole distribution (`kept_logmass`) that is the token's logprob in the
whole distribution, which is what a trainer computes. So rho is 1 where the engine computes what the trainer does, and
ratios of current and old policy are those of whole distributions, too: that the kept tokens' share changes in training
is left out, as everywhere. Without kept_logmass nothing can be said, and truncated samples are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.config.rl_schema import RlAlgorithm
from weft.errors import UserError
from weft.rl.kl import kl
from weft.rl.types import Floats, Sample
from weft.rollout.base import Sampling

Exact = NDArray[np.float64]

# rl.correction_limits where they are null: Yao et al. 2025 (fengyao.notion.site/off-policy-rl) and, for IcePop, Ling
# Team 2025, arXiv:2510.18855.
LIMITS = {"tis": (0.0, 2.0), "mis": (0.0, 2.0), "icepop": (0.5, 5.0)}
_LARGEST = 20.0  # of |log rho|, so that no ratio is infinite


def comparable(sample: Sample) -> Floats:
    """[T] the rollout policy's logprob of each sampled token among all tokens, as the trainer computes it."""
    return sample.rollout if sample.kept_logmass is None else sample.rollout + sample.kept_logmass


def require_comparable(samples: Sequence[Sample], sampling: Sampling) -> None:
    """UserError where tokens were left out and an engine has not said how much they were."""
    if not sampling.truncated:
        return
    silent = next((sample for sample in samples if sample.kept_logmass is None), None)
    if silent is not None:
        raise UserError(
            f"sample {silent.id} cannot be trained: rollout.top_p, top_k or min_p leave tokens out, and this engine "
            "does not say how much of the distribution the others have: set rollout.top_p=1, rollout.top_k=0 and "
            "rollout.min_p=0 (evaluation may have its own)."
        )


def correct(samples: Sequence[Sample], config: RlAlgorithm) -> dict[str, float]:
    """Set the correction of samples that count, from `old` and `rollout`; the metrics of their difference.

    With rl.old_logprobs=rollout it sets `old` instead, which leaves no difference.
    """
    chosen = [sample for sample in samples if sample.counts and sample.length]
    if config.old_logprobs == "rollout":
        for sample in chosen:
            sample.old = comparable(sample)
        return {}
    if not chosen:
        return {}
    differences = [_difference(sample) for sample in chosen]
    ratios = [_ratio(difference, config) for difference in differences]
    weights = [_bounded(ratio, config) for ratio in ratios]
    if config.correction != "none":
        for sample, weight in zip(chosen, weights, strict=True):
            sample.correction = np.zeros(len(sample), np.float32)
            sample.correction[sample.sampled] = weight
    return mismatch(np.concatenate(differences), np.concatenate(ratios), np.concatenate(weights), config)


def _difference(sample: Sample) -> Exact:
    """[G] log rho of each token that the policy drew."""
    assert sample.old is not None, f"sample {sample.id} has no logprobs of the old policy"
    difference = sample.old[sample.sampled].astype(np.float64) - comparable(sample)[sample.sampled]
    if not np.isfinite(difference).all():
        raise UserError(f"sample {sample.id}: the engine or the trainer gives a token that was sampled no probability.")
    exact: Exact = difference
    return exact


def _ratio(difference: Exact, config: RlAlgorithm) -> Exact:
    """[G] rho of each token, or [1] that of the sample: prod rho (`sequence`), or (prod rho)^(1/G) (`geometric`)."""
    if config.correction_level != "token":
        total = difference.sum(keepdims=True)
        difference = total if config.correction_level == "sequence" else total / len(difference)
    exact: Exact = np.exp(difference.clip(-_LARGEST, _LARGEST))
    return exact


def _bounded(ratio: Exact, config: RlAlgorithm) -> Exact:
    """`tis` cuts a ratio at the limits (Yao et al. 2025), `mis` and `icepop` drop what is outside of them: `mis` only
    above (Liu et al. 2025, richardli.xyz/rl-collapse), `icepop` below, too (arXiv:2510.18855, section 3)."""
    if config.correction == "none":
        return np.ones_like(ratio)
    low, high = config.correction_limits or LIMITS[config.correction]
    if config.correction == "tis":
        return ratio.clip(low, high)
    return np.where((ratio < low) | (ratio > high), 0.0, ratio)


def mismatch(differences: Exact, ratios: Exact, weights: Exact, config: RlAlgorithm) -> dict[str, float]:
    """TRL's names where it has them. k3: of KL(rollout || old). effective_sample_size: (sum rho)^2 / (n sum rho^2),
    the share of the samples (tokens, at level token) that rho leaves; clipped, masked: shares that limits changed."""
    found = {
        "sampling/sampling_logp_difference/mean": float(np.abs(differences).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(differences).max()),
        "sampling/kl": float(kl(-differences.clip(-_LARGEST, _LARGEST), "k3").mean()),
        "sampling/importance_sampling_ratio/min": float(ratios.min()),
        "sampling/importance_sampling_ratio/mean": float(ratios.mean()),
        "sampling/importance_sampling_ratio/max": float(ratios.max()),
        "sampling/effective_sample_size": float(ratios.sum() ** 2 / (len(ratios) * np.square(ratios).sum())),
    }
    if config.correction != "none":
        name = "clipped" if config.correction == "tis" else "masked"
        found[f"sampling/{name}"] = float((weights != ratios).mean())
    return found
