"""The teacher of rl.teacher: a frozen model in the trainer's ranks that reads the policy's samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.config.rl_schema import RlAlgorithm
from weft.engine.engine import Engine
from weft.engine.losses.distillation import DistillationLoss
from weft.engine.teachers import teacher_head
from weft.inference.types import Sample
from weft.ops import divergence


def teacher_loss(config: RlAlgorithm, teacher: Engine, policy: Engine, temperature: float) -> DistillationLoss:
    """The loss of rl.teacher_in=loss, between distributions of logits / temperature. Collective."""
    head = teacher_head(teacher, policy)
    heads = [] if head is None else [head]
    terms = divergence.terms_of(config.teacher_divergence, config.teacher_beta)
    return DistillationLoss(terms, heads, temperature=temperature)


def add_teacher_advantages(samples: Sequence[Sample], config: RlAlgorithm) -> dict[str, float]:
    """Add rl.teacher_coef x (log q(y) - log p(y)) to the advantage of each sampled token y, q being the teacher and p
    the old policy; returns metrics.

    Its negative mean over tokens drawn from p estimates KL(p || q). As advantages, which have no gradient, these
    numbers give a policy gradient whose expectation is that of -KL(p || q) at the token's position. The KL itself as an
    advantage would teach nothing: it does not depend on the token, so that E[A grad log p] = 0.
    """
    counted = [sample for sample in samples if sample.counts and sample.length]
    ratios, teacher_sum, advantage_sum = [], 0.0, 0.0
    for sample in counted:
        assert sample.old_logprobs is not None and sample.teacher_logprobs is not None and sample.advantages is not None
        ratio = (sample.teacher_logprobs - sample.old_logprobs)[sample.sampled]
        advantage_sum += float(np.abs(sample.advantages[sample.sampled]).sum(dtype=np.float64))
        teacher_sum += config.teacher_coef * float(np.abs(ratio).sum(dtype=np.float64))
        sample.advantages[sample.sampled] += np.float32(config.teacher_coef) * ratio
        ratios.append(ratio)
    if not ratios:
        return {}
    estimate = -float(np.concatenate(ratios).mean(dtype=np.float64))
    return (
        {"teacher/kl": estimate, "teacher/share": teacher_sum / (teacher_sum + advantage_sum)}
        if teacher_sum
        else {"teacher/kl": estimate}
    )
