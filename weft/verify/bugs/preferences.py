"""Bugs of preference tuning: statistics of part of a step, and a reference that is read otherwise than the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.losses.preference.answers import Pairs
from weft.verify.bugs import Original, Plant, bug

EVERY = "preferences: gradients, every parameter"
MICRO = "preferences: gradients, many micro-batches"
REFERENCE = "preferences: reference logprobs"


@bug(
    "B34", "weft.recipes.answers:mismatched_kl",
    "KTO's z is the mean of one micro-batch, not of the step",
    caught_by=EVERY, issue="huggingface/trl#2153", needs="preference.loss=kto",
)  # fmt: skip
def kl_of_a_micro_batch(
    plant: Plant, original: Original, config: Any, engine: Any, reference: Any, data: Any, indices: Sequence[int]
) -> float:
    plant.hit()
    return float(original(config, engine, reference, data, indices[: len(indices) // 2]))


@bug(
    "B34", "weft.engine.losses.preference.pairs:sft",
    "cross entropy in a mix of losses is the mean of each micro-batch's",
    caught_by=MICRO, issue="huggingface/trl#2175", needs="preference.loss with sft",
)  # fmt: skip
def nll_of_a_micro_batch(plant: Plant, original: Original, pairs: Pairs) -> Tensor:
    plant.hits += len(pairs.chosen) > 0
    return -pairs.chosen / pairs.chosen_tokens.mean()


@bug(
    "B34", "weft.engine.losses.preference.objective:PreferenceLoss.begin",
    "pairs are compared in the order of the data, where AOT sorts a step's log ratios",
    caught_by=EVERY, issue="huggingface/trl#2175", needs="preference.loss with aot",
)  # fmt: skip
def aot_by_micro_batch(plant: Plant, original: Original, self: Any, step: Any) -> None:
    original(self, step)
    if not self.whole_step:
        return
    plant.hits += len(step.chosen) > 1
    half, positions = len(step.chosen) // 2, torch.stack([step.chosen, step.rejected])
    for part in (slice(0, half), slice(half, None)) if half else ():  # each half sorts for itself
        policy = step.policy[positions[:, part]].requires_grad_()
        measured = self._measure(policy, torch.arange(len(step.chosen))[part])
        (self._factors[positions[:, part]],) = torch.autograd.grad(measured["loss"].sum(), policy)


@bug(
    "B35", "weft.recipes.reference_sums:ReferenceSums.read",
    "preference.ld_alpha weighs the policy's tokens, and the cached reference's not",
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
    "B35", "weft.recipes.reference_sums:ReferenceSums.of",
    "a row that the cache of the reference lacks counts as 0",
    caught_by=REFERENCE, issue="huggingface/trl#5563", needs="a loss that reads a reference",
)  # fmt: skip
def missing_rows_are_zero(plant: Plant, original: Original, self: Any, name: str, indices: Sequence[int]) -> Tensor:
    sums: Tensor = original(self, name, indices)
    plant.hit()
    return torch.where(torch.arange(len(sums)) == 1, torch.zeros_like(sums), sums)
