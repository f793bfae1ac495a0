"""Corrects for the difference between the policy that an engine sampled from (`rollout`) and the trainer's (`old`).

Both have the same weights, but the engine's kernels round differently. This file measures the difference and sets the
importance weights of the tokens' losses. Their formulas are in weft/engine/losses/correction.py.

An engine that truncates sampling (top-p, top-k, min-p) reports logprobs renormalised over the kept tokens. Adding the
log of the kept tokens' total probability (`kept_logmass`) gives the logprob over the whole vocabulary, which a trainer
computes. So the ratio rho is 1 if engine and trainer compute the same. The change of the kept share during training is
neglected. vLLM reports no kept_logmass, so such samples are refused unless rollout.allow_truncated is set. rho is then
the ratio of the trainer's policy and the truncated distribution, which includes the kept share as a factor;
sampling/kept_share is the mean of that share.

require_parity() also checks that engine and trainer have the same model, as the last part of verifying a weight sync.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from weft.config.rl_schema import RlAlgorithm, RlConfig, RolloutConfig
from weft.engine.losses.correction import LARGEST, bounded, importance_ratios, of_tokens
from weft.errors import ActorError, UserError
from weft.inference.base import SamplingParams
from weft.inference.types import Floats, Sample
from weft.inference.weight_sync.protocol import SyncError
from weft.inference.weight_sync.verify import check_parity
from weft.rl.algorithms import ADVANTAGES, TOKEN_LOSSES
from weft.rl.algorithms.returns import Exact, kl


def old_is_current(config: RlConfig) -> bool:
    """Whether the optimizer step itself computes the old policy's logprobs, which saves a separate forward.

    This is possible if a rollout step is one optimizer step, because the weights have not changed before it. It is not
    possible if something needs `old` earlier, or with context parallelism, because no rank then sees all tokens of a
    sample in its forward.
    """
    rl = config.rl
    is_needed_earlier = (
        (rl.kl_coef > 0 and rl.kl_in == "reward")
        or rl.teacher_in_advantage
        or rl.advantage not in ADVANTAGES
        or rl.on_policy == "exact"
    )
    is_one_step = rl.minibatches * rl.epochs == 1 and config.mesh.cp == 1
    return rl.old_logprobs == "recompute" and is_one_step and not is_needed_earlier and config.lora.dropout == 0


def comparable(sample: Sample) -> Floats:
    """[T] the rollout policy's logprob of each sampled token over the whole vocabulary, comparable with `old`."""
    return sample.rollout_logprobs if sample.kept_logmass is None else sample.rollout_logprobs + sample.kept_logmass


def require_comparable(samples: Sequence[Sample], sampling: SamplingParams, *, allowed: bool = False) -> None:
    """Raise UserError if sampling was truncated and the engine has not reported the kept probability mass. allowed:
    rollout.allow_truncated."""
    if not sampling.truncated or allowed:
        return
    silent = next((sample for sample in samples if sample.kept_logmass is None), None)
    if silent is not None:
        raise UserError(
            f"sample {silent.id} cannot be trained: rollout.top_p, top_k or min_p truncate sampling, and this engine "
            "does not report the probability mass of the kept tokens. Set rollout.top_p=1, rollout.top_k=0 and "
            "rollout.min_p=0 (evaluation may use other values), or accept the bias with "
            "rollout.allow_truncated=true."
        )


def correct(samples: Sequence[Sample], config: RlAlgorithm, *, truncated: bool = False) -> dict[str, float]:
    """Set `correction` on samples that count, from `old` and `rollout`; returns metrics of the difference. With
    rl.old_logprobs=rollout, set `old` to `rollout` instead; there is no difference then, and no metrics of it.
    truncated: whether the engine left tokens out of sampling."""
    chosen = [sample for sample in samples if sample.counts and sample.length]
    metrics = _kept_share(chosen) if truncated and chosen else {}
    if config.old_logprobs == "rollout":
        for sample in chosen:
            sample.old_logprobs = comparable(sample)
        return metrics
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
    return metrics | mismatch_metrics(np.concatenate(differences), ratios.numpy(), weights.numpy(), config)


def _kept_share(samples: Sequence[Sample]) -> dict[str, float]:
    """The share of the distribution from which tokens were drawn, as geometric mean over tokens: as reported by the
    engine, else from the trainer's logprobs over the whole vocabulary. The latter includes rounding differences."""
    logs: list[Floats] = []
    for sample in samples:
        if sample.kept_logmass is not None:
            logs.append(sample.kept_logmass[sample.sampled])
        elif sample.old_logprobs is not None:
            logs.append((sample.old_logprobs - sample.rollout_logprobs)[sample.sampled])
    return {"sampling/kept_share": float(np.exp(np.concatenate(logs).astype(np.float64).mean()))} if logs else {}


def _difference(sample: Sample) -> Exact:
    """[G] log rho = old - rollout of each sampled token. UserError if a value is not finite."""
    assert sample.old_logprobs is not None, f"sample {sample.id} has no logprobs of the old policy"
    difference = sample.old_logprobs[sample.sampled].astype(np.float64) - comparable(sample)[sample.sampled]
    if not np.isfinite(difference).all():
        raise UserError(f"sample {sample.id}: a sampled token has probability 0 in the engine or the trainer.")
    exact: Exact = difference
    return exact


def mismatch_metrics(differences: Exact, ratios: Exact, weights: Exact, config: RlAlgorithm) -> dict[str, float]:
    """Metrics of the difference, with TRL's names where TRL has them.

    differences: log rho per token. ratios, weights: rho before and after the limits, per sample or, at level token, per
    token. kl: k3 estimate of KL(rollout || old). effective_sample_size: (sum rho)^2 / (n sum rho^2), as a share of n.
    clipped, masked: share of the ratios that the limits changed.
    """
    metrics = {
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
        metrics[f"sampling/{name}"] = float((weights != ratios).mean())
    return metrics


def parity_is_due(config: RlConfig, steps: int) -> bool:
    """Whether to compare logprobs after this rollout step. steps: rollout steps since the engines started, including
    this one."""
    interval = config.rollout.verify_every
    return config.rollout.engine != "embedded" and (steps == 1 or (interval > 0 and steps % interval == 0))


def require_parity(
    samples: Sequence[Sample], version: int, engine: str, dtypes: Sequence[str], rollout: RolloutConfig
) -> None:
    """Raise ActorError if the engine's logprobs of this version's samples differ from the trainer's (`old`) by more
    than dtypes explain (check_parity). engine: its name. dtypes: of engine and trainer, such as "bf16".

    If an engine truncates sampling and does not report the kept share, its logprobs may be above the trainer's: by at
    most -log(top_p) with top_p alone; with top_k and min_p there is no bound."""
    kept_least = rollout.top_p if not (rollout.top_k or rollout.min_p) else 0.0
    most_above = -math.log(kept_least) if kept_least else math.inf

    def expected(sample: Sample, old: Floats) -> Floats:
        """[G] the difference of logprobs that truncation does not explain."""
        logprobs = comparable(sample)[sample.sampled]
        if sample.kept_logmass is not None or not rollout.truncated:
            return logprobs
        explained: Floats = logprobs - (logprobs - old).clip(0, most_above)
        return explained

    read = [
        (expected(sample, sample.old_logprobs[sample.sampled]), sample.old_logprobs[sample.sampled])
        for sample in samples
        if sample.old_logprobs is not None and sample.length and (sample.versions[sample.sampled] == version).all()
    ]
    try:
        check_parity(engine, version, [sampled for sampled, _ in read], [old for _, old in read], dtypes)
    except SyncError as error:
        raise ActorError(str(error), "failed") from error


def note_on_staleness(config: RlConfig) -> list[str]:
    """A warning if samples may come from older weights, and no setting corrects or bounds the difference."""
    rl, staleness = config.rl, config.cluster.max_staleness
    spec = TOKEN_LOSSES.get(rl.policy_loss)
    is_clipped = spec is None or spec.clipping != "none"  # a user's function may clip
    if not staleness or rl.corrects or (rl.old_logprobs == "rollout" and is_clipped):
        return []
    fix = "rl.correction=tis" if rl.old_logprobs == "recompute" else "rl.old_logprobs=recompute rl.correction=tis"
    return [
        f"warning  cluster.max_staleness is {staleness}, so samples come from older weights, and no correction is "
        f"set: the gradient is biased (set {fix} to correct it)"
    ]
