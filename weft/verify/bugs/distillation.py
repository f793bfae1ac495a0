"""Bugs of distillation: what a loss is divided by, and where its gradient goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.losses.base import Batch, LossOutput
from weft.inference.types import Sample
from weft.ops.divergence import Terms
from weft.verify.bugs import GRADIENTS, Original, Plant, bug

EVERY = "distillation: gradients, every parameter"
MICRO = "distillation: gradients, many micro-batches"
LISTED = "tests/parity/test_distill_parity.py: a step with lists of likely tokens is that of plain PyTorch"


@bug(
    "B38", "weft.engine.losses.distillation:DistillationLoss.__call__",
    "distillation is averaged over each micro-batch, however many tokens it trains",
    caught_by=MICRO, issue="verl-project/verl#7225", needs="micro-batches of unlike sizes",
)  # fmt: skip
def distilled_by_micro_batch(plant: Plant, original: Original, self: Any, batch: Batch) -> LossOutput:
    return plant.averaged(original(self, batch), float(batch.weights_N.sum()))


@bug(
    "B38", "weft.engine.losses.distillation:DistillationLoss.normaliser",
    "distillation is divided by all tokens, those of prompts included",
    caught_by=EVERY, issue="huggingface/trl#6452", needs="tokens without a loss weight",
)  # fmt: skip
def prompts_in_the_count(plant: Plant, original: Original, self: Any, plan: Any) -> float:
    plant.hits += plan.totals.tokens != original(self, plan)
    return float(plan.totals.tokens)


@bug(
    "B37", "weft.ops.divergence:terms_of",
    "the gradient of distillation also flows through the teacher's logits, as if they were the student's",
    caught_by=EVERY, issue="radixark/miles#1966",
)  # fmt: skip
def gradient_into_the_teacher(plant: Plant, original: Original, name: str, beta: float) -> Terms:
    terms: Terms = original(name, beta)

    def leaking(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        q, difference = log_q.exp(), log_q - log_p
        values, slope = terms(log_p, log_q)
        plant.hit()
        return values, torch.add(slope, q * difference)  # the derivative of q (log q - log p) by log q

    return leaking


@bug(
    "B43", "weft.ops.divergence:_ListReader.bins",
    "a teacher's likeliest tokens are compared without a bin for all others, so that the sum is no divergence",
    caught_by=LISTED, issue="", needs="a teacher that is known by lists",
)  # fmt: skip
def no_tail(plant: Plant, original: Original, self: Any, *arguments: Any) -> Any:
    log_p, log_q, has_tail = original(self, *arguments)
    plant.hit()
    absent = torch.full_like(log_p[:, -1:], -1e4)
    return torch.cat([log_p[:, :-1], absent], 1), torch.cat([log_q[:, :-1], absent], 1), has_tail


@bug(
    "B36", "weft.rl.teacher:add_teacher_advantages",
    "the KL from the teacher at a token's position is its advantage, whatever token was drawn, so that the expected "
    "gradient is zero",
    caught_by=GRADIENTS, issue="radixark/miles#2362", needs="rl.teacher_in=advantage",
)  # fmt: skip
def divergence_as_advantage(plant: Plant, original: Original, samples: Sequence[Sample], config: Any) -> Any:
    before = [None if sample.advantages is None else sample.advantages.copy() for sample in samples]
    metrics = original(samples, config)
    for sample, advantages in zip(samples, before, strict=True):
        if advantages is not None and sample.counts and sample.length:
            assert sample.teacher_logprobs is not None and sample.old_logprobs is not None
            difference = sample.teacher_logprobs - sample.old_logprobs
            sample.advantages = advantages - config.teacher_coef * (np.expm1(difference) - difference)
            plant.hit()
    return metrics
