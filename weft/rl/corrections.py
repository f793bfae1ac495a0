"""Corrects for the difference between the policy that an engine sampled from (`rollout`) and the trainer's (`old`).

Both have the same weights, but the engine's kernels round differently. This file measures the difference and sets the
factors on the tokens' losses; their formulas are in weft/objectives/correction.py.

An engine that truncates sampling (top-p, top-k, min-p) reports logprobs among the kept tokens. Adding the log of their
total probability (`kept_logmass`) gives the logprob among all tokens, which is what a trainer computes. So rho is 1
where the engine computes what the trainer does. That the kept share changes in training is neglected, as everywhere.
Without kept_logmass, truncated samples are refused.

require_parity also checks that engine and trainer have the same model; it completes the verification of a weight sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from weft.config.presets import ADVANTAGES
from weft.config.rl_schema import RlAlgorithm, RlConfig
from weft.errors import ActorError, UserError
from weft.objectives.correction import LARGEST, bounded, importance_ratios, of_tokens
from weft.rollout.base import Sampling
from weft.rollout.sync.protocol import SyncError
from weft.rollout.sync.verify import check_parity
from weft.rollout.types import Floats, Sample

Exact = NDArray[np.float64]
Estimator = Literal["k1", "k2", "k3"]


def old_is_current(config: RlConfig) -> bool:
    """Whether the update itself reads the old policy's logprobs, which saves a forward.

    This is so where a rollout step is one optimizer step: nothing has changed before it. It is not so where something
    needs `old` earlier, or where documents may be cut over ranks, because no rank then sees the whole ratio of a sample
    in its own forward.
    """
    rl = config.rl
    asked = (rl.kl > 0 and rl.kl_in == "reward") or rl.advantage not in ADVANTAGES or rl.on_policy == "exact"
    once = rl.updates * rl.epochs == 1 and config.mesh.cp == 1
    return rl.old_logprobs == "recompute" and once and not asked and config.lora.dropout == 0


def comparable(sample: Sample) -> Floats:
    """[T] the rollout policy's logprob of each sampled token among all tokens, as the trainer computes it."""
    return sample.rollout if sample.kept_logmass is None else sample.rollout + sample.kept_logmass


def require_comparable(samples: Sequence[Sample], sampling: Sampling) -> None:
    """UserError where sampling was truncated and the engine has not reported the kept probability mass."""
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
    """Set the correction of samples that count, from `old` and `rollout`; returns metrics of the difference. With
    rl.old_logprobs=rollout it sets `old` to `rollout` instead, so that there is no difference."""
    chosen = [sample for sample in samples if sample.counts and sample.length]
    if config.old_logprobs == "rollout":
        for sample in chosen:
            sample.old = comparable(sample)
        return {}
    if not chosen:
        return {}
    differences = [_difference(sample) for sample in chosen]
    lengths = [len(difference) for difference in differences]
    document_N = torch.arange(len(chosen)).repeat_interleave(torch.tensor(lengths))
    ratios = importance_ratios(torch.from_numpy(np.concatenate(differences)), document_N, len(chosen), config)
    weights = bounded(ratios, config)
    if config.correction != "none":
        parts = of_tokens(weights, document_N, config).split(lengths)
        for sample, part in zip(chosen, parts, strict=True):
            sample.correction = np.zeros(len(sample), np.float32)
            sample.correction[sample.sampled] = part.numpy()
    return mismatch(np.concatenate(differences), ratios.numpy(), weights.numpy(), config)


def _difference(sample: Sample) -> Exact:
    """[G] log rho of each token that the policy drew."""
    assert sample.old is not None, f"sample {sample.id} has no logprobs of the old policy"
    difference = sample.old[sample.sampled].astype(np.float64) - comparable(sample)[sample.sampled]
    if not np.isfinite(difference).all():
        raise UserError(f"sample {sample.id}: the engine or the trainer gives a token that was sampled no probability.")
    exact: Exact = difference
    return exact


def mismatch(differences: Exact, ratios: Exact, weights: Exact, config: RlAlgorithm) -> dict[str, float]:
    """Metrics of the difference, with TRL's names where it has them.

    k3: of KL(rollout || old). effective_sample_size: (sum rho)^2 / (n sum rho^2), the share of the samples (of the
    tokens, at level token) that rho leaves. clipped, masked: shares that the limits changed.
    """
    found = {
        "sampling/sampling_logp_difference/mean": float(np.abs(differences).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(differences).max()),
        "sampling/kl": float(kl(-differences.clip(-LARGEST, LARGEST), "k3").mean()),
        "sampling/importance_sampling_ratio/min": float(ratios.min()),
        "sampling/importance_sampling_ratio/mean": float(ratios.mean()),
        "sampling/importance_sampling_ratio/max": float(ratios.max()),
        "sampling/effective_sample_size": float(ratios.sum() ** 2 / (len(ratios) * np.square(ratios).sum())),
    }
    if config.correction != "none":
        name = "clipped" if config.correction == "tis" else "masked"
        found[f"sampling/{name}"] = float((weights != ratios).mean())
    return found


def kl(difference: Exact, estimator: Estimator, clamp: float | None = None) -> Exact:
    """KL(p || q) = E_p[d] estimated from tokens that were drawn from p, with d = log p - log q of each (Schulman 2020,
    http://joschu.net/blog/kl-approx.html). clamp: how far from 0 it may be.

        k1 = d                  unbiased, of high variance, often negative
        k2 = d^2 / 2            biased, never negative
        k3 = exp(-d) - 1 + d    unbiased, never negative

    Those are values, for rewards and metrics. As a loss, whose gradient counts, they are something else: see
    weft/objectives/policy.py.
    """
    if estimator == "k1":
        found = difference
    elif estimator == "k2":
        found = np.square(difference) / 2
    else:
        found = np.expm1(-difference) + difference
    return found if clamp is None else found.clip(-clamp, clamp)


def parity_is_due(config: RlConfig, steps: int) -> bool:
    """Whether logprobs are compared after this step. steps: rollout steps since the engines started, with this one."""
    every = config.rollout.verify_every
    return config.rollout.engine != "embedded" and (steps == 1 or (every > 0 and steps % every == 0))


def require_parity(samples: Sequence[Sample], version: int, engine: str, dtypes: Sequence[str]) -> None:
    """ActorError where the engine's logprobs of samples of this version differ from the trainer's (`old`) of the same
    weights. dtypes: of engine and trainer, such as "bf16"."""
    read = [
        (comparable(sample)[sample.sampled], sample.old[sample.sampled])
        for sample in samples
        if sample.old is not None and sample.length and (sample.versions[sample.sampled] == version).all()
    ]
    try:
        check_parity(engine, version, [own for own, _ in read], [old for _, old in read], dtypes)
    except SyncError as error:
        raise ActorError(str(error), "failed") from error
