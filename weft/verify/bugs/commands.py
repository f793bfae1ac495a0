"""Bugs of single commands: preference tuning, distillation, reward models, reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.losses.base import Batch, LossOutput
from weft.engine.losses.preference.answers import Pairs
from weft.inference.types import Flags, Floats, Sample, SampleGroup
from weft.ops.divergence import Terms
from weft.verify.bugs import GRADIENTS, Original, Plant, bug

# ---------------------------------------------------------------- preferences

PREFERENCES = "preferences: gradients, every parameter"
PREFERENCES_MICRO = "preferences: gradients, many micro-batches"
REFERENCE = "preferences: reference logprobs"


@bug(
    "B34", "weft.recipes.answers:mismatched_kl",
    "KTO's z is the mean of one micro-batch, not of the step",
    caught_by=PREFERENCES, issue="huggingface/trl#2153", needs="preference.loss=kto",
)  # fmt: skip
def kl_of_a_micro_batch(
    plant: Plant, original: Original, config: Any, engine: Any, reference: Any, data: Any, indices: Sequence[int]
) -> float:
    plant.hit()
    return float(original(config, engine, reference, data, indices[: len(indices) // 2]))


@bug(
    "B34", "weft.engine.losses.preference.formulas:sft",
    "cross entropy in a mix of losses is averaged over each micro-batch",
    caught_by=PREFERENCES_MICRO, issue="huggingface/trl#2175", needs="preference.loss with sft",
)  # fmt: skip
def nll_of_a_micro_batch(plant: Plant, original: Original, pairs: Pairs) -> Tensor:
    plant.hits += len(pairs.chosen) > 0
    return -pairs.chosen / pairs.chosen_tokens.mean()


@bug(
    "B34", "weft.engine.losses.preference.objective:PreferenceLoss.begin",
    "AOT compares pairs in the order of the data, without sorting a step's log ratios",
    caught_by=PREFERENCES, issue="huggingface/trl#2175", needs="preference.loss with aot",
)  # fmt: skip
def aot_by_micro_batch(plant: Plant, original: Original, self: Any, step: Any) -> None:
    original(self, step)
    if not self.whole_step:
        return
    plant.hits += len(step.chosen) > 1
    half, positions = len(step.chosen) // 2, torch.stack([step.chosen, step.rejected])
    for part in (slice(0, half), slice(half, None)) if half else ():  # each half is sorted separately
        policy = step.policy[positions[:, part]].requires_grad_()
        measured = self._measure(policy, torch.arange(len(step.chosen))[part])
        (self._factors[positions[:, part]],) = torch.autograd.grad(measured["loss"].sum(), policy)


@bug(
    "B35", "weft.recipes.reference_sums:ReferenceSums.read",
    "preference.ld_alpha weights the policy's tokens, but not the cached reference's",
    caught_by=REFERENCE, issue="huggingface/trl#7084", needs="preference.ld_alpha",
)  # fmt: skip
def reference_without_tail_weights(
    plant: Plant, original: Original, self: Any, documents: Sequence[Document]
) -> Tensor:
    plain = [replace(d, weights=(d.weights != 0).float()) for d in documents]
    plant.hits += any(not torch.equal(a.weights, b.weights) for a, b in zip(plain, documents, strict=True))
    sums: Tensor = original(self, plain)
    return sums


@bug(
    "B35", "weft.recipes.reference_sums:ReferenceSums.sums_of",
    "a row that is missing in the reference's cache counts as 0",
    caught_by=REFERENCE, issue="huggingface/trl#5563", needs="a loss that reads a reference",
)  # fmt: skip
def missing_rows_are_zero(plant: Plant, original: Original, self: Any, name: str, indices: Sequence[int]) -> Tensor:
    sums: Tensor = original(self, name, indices)
    plant.hit()
    return torch.where(torch.arange(len(sums)) == 1, torch.zeros_like(sums), sums)


# ---------------------------------------------------------------- distillation

DISTILLED = "distillation: gradients, every parameter"
DISTILLED_MICRO = "distillation: gradients, many micro-batches"
LISTED = "tests/parity/test_distill_parity.py: a step with lists of likely tokens is that of plain PyTorch"


@bug(
    "B38", "weft.engine.losses.distillation:DistillationLoss.__call__",
    "distillation is averaged over each micro-batch, regardless of its number of trained tokens",
    caught_by=DISTILLED_MICRO, issue="verl-project/verl#7225", needs="micro-batches of unlike sizes",
)  # fmt: skip
def distilled_by_micro_batch(plant: Plant, original: Original, self: Any, batch: Batch) -> LossOutput:
    return plant.averaged(original(self, batch), float(batch.weights_N.sum()))


@bug(
    "B38", "weft.engine.losses.distillation:DistillationLoss.normaliser",
    "distillation is divided by the number of all tokens, including prompts",
    caught_by=DISTILLED, issue="huggingface/trl#6452", needs="tokens without a loss weight",
)  # fmt: skip
def prompts_in_the_count(plant: Plant, original: Original, self: Any, plan: Any) -> float:
    plant.hits += plan.totals.tokens != original(self, plan)
    return float(plan.totals.tokens)


@bug(
    "B37", "weft.ops.divergence:terms_of",
    "the gradient of distillation also flows through the teacher's logits, as if they were the student's",
    caught_by=DISTILLED, issue="radixark/miles#1966",
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
    "a teacher's most likely tokens are compared without a bin for all others, so the sum is not a divergence",
    caught_by=LISTED, issue="", needs="a teacher given by lists",
)  # fmt: skip
def no_tail(plant: Plant, original: Original, self: Any, *arguments: Any) -> Any:
    log_p, log_q, has_tail = original(self, *arguments)
    plant.hit()
    absent = torch.full_like(log_p[:, -1:], -1e4)
    return torch.cat([log_p[:, :-1], absent], 1), torch.cat([log_q[:, :-1], absent], 1), has_tail


@bug(
    "B36", "weft.rl.teacher:add_teacher_advantages",
    "the advantage is the KL from the teacher at a token's position, for any sampled token, so the expected "
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


# ---------------------------------------------------------------- reward models

PREFERRED = "tests/parity/test_reward_parity.py: steps of pairs are those of transformers' classifier"


@bug(
    "B56", "weft.engine.scores:with_end_mark",
    "the score of an answer is read at the padding token after it",
    caught_by=PREFERRED, issue="huggingface/transformers#35352",
)  # fmt: skip
def score_at_padding(plant: Plant, original: Original, tokens: Tensor) -> Tensor:
    plant.hit()
    result: Tensor = original(torch.cat([tokens, tokens.new_zeros(1)]))
    return result


@bug(
    "B56", "weft.engine.scores:with_end_mark",
    "the score of an answer is read one token too early, before its last token",
    caught_by=PREFERRED, issue="EleutherAI/gpt-neox#1285",
)  # fmt: skip
def score_one_token_early(plant: Plant, original: Original, tokens: Tensor) -> Tensor:
    plant.hits += len(tokens) > 1
    result: Tensor = original(tokens[: max(1, len(tokens) - 1)])
    return result


@bug(
    "B57", "weft.engine.losses.reward:BradleyTerryLoss.__call__",
    "the margin of a pair is added to the difference of its scores instead of subtracted",
    caught_by="scores: gradients, every parameter", issue="", needs="reward.loss=bradley_terry",
)  # fmt: skip
def margin_added(plant: Plant, original: Original, self: Any, batch: Batch) -> LossOutput:
    plant.hits += bool(batch.arrays["margin"].any())
    arrays = {**batch.arrays, "margin": -batch.arrays["margin"]}
    result: LossOutput = original(self, replace(batch, arrays=arrays))
    return result


@bug(
    "B34", "weft.engine.losses.reward:BradleyTerryLoss.__call__",
    "the loss of pairs is averaged over each micro-batch, regardless of its number of answers",
    caught_by="scores: gradients, many micro-batches", issue="huggingface/trl#4104",
    needs="micro-batches with unlike numbers of answers",
)  # fmt: skip
def pairs_by_micro_batch(plant: Plant, original: Original, self: Any, batch: Batch) -> LossOutput:
    return plant.averaged(original(self, batch), len(batch.weights_N))


# ---------------------------------------------------------------- reinforcement learning

UPDATE = "tests/parity/test_policy_parity.py: the update of grpo is that of plain PyTorch"


@bug(
    "B23", "weft.models.train_module:chunked_readouts",
    "logprobs are recomputed without the sampling temperature",
    caught_by=UPDATE, issue="huggingface/trl#3029", needs="rollout.temperature other than 1",
)  # fmt: skip
def temperature_left_out(plant: Plant, original: Original, *args: Any, temperature: float, **kwargs: Any) -> Any:
    plant.hits += temperature != 1
    return original(*args, temperature=1.0, **kwargs)


@bug(
    "B26", "weft.rl.advantages:advantages",
    "samples that only fill a batch are included in the mean of their group",
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
    "tokens that an environment wrote between two turns are trained like the policy's tokens",
    caught_by=UPDATE, issue="OpenRLHF/OpenRLHF#973", needs="samples of several turns",
)  # fmt: skip
def environment_trained(plant: Plant, original: Original, sample: Sample) -> Flags:
    drawn: Flags = original(sample)
    between = drawn | (np.arange(len(drawn)) >= drawn.argmax())
    plant.hits += bool((between != drawn).any())
    return between


@bug(
    "B55", "weft.rl.corrections:comparable",
    "tokens are sampled with top_p below 1, but their logprobs are compared with those of the full vocabulary",
    caught_by=GRADIENTS, issue="", needs="rollout.top_p below 1, and rl.epochs above 1",
)  # fmt: skip
def truncation_ignored(plant: Plant, original: Original, sample: Sample) -> Floats:
    plant.hits += sample.kept_logmass is not None and bool((sample.kept_logmass[sample.sampled] < 0).any())
    return sample.rollout_logprobs
