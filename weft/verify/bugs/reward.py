"""Bugs of reward models: where a score is read, which answer is preferred, and what a loss is divided by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.engine.losses.base import Batch, LossOutput
from weft.verify.bugs import Original, Plant, bug

PREFERRED = "tests/parity/test_reward_parity.py: steps of pairs are those of transformers' classifier"


@bug(
    "B56", "weft.engine.scores:with_end_mark",
    "the score of an answer is read at the token of padding behind it",
    caught_by=PREFERRED, issue="huggingface/transformers#35352",
)  # fmt: skip
def score_at_padding(plant: Plant, original: Original, tokens: Tensor) -> Tensor:
    plant.hit()
    result: Tensor = original(torch.cat([tokens, tokens.new_zeros(1)]))
    return result


@bug(
    "B56", "weft.engine.scores:with_end_mark",
    "the score of an answer is read one token too early, before its last",
    caught_by=PREFERRED, issue="EleutherAI/gpt-neox#1285",
)  # fmt: skip
def score_one_token_early(plant: Plant, original: Original, tokens: Tensor) -> Tensor:
    plant.hits += len(tokens) > 1
    result: Tensor = original(tokens[: max(1, len(tokens) - 1)])
    return result


@bug(
    "B57", "weft.engine.losses.reward:BradleyTerryLoss.__call__",
    "the margin of a pair is added to the difference of its scores instead of taken off",
    caught_by="scores: gradients, every parameter", issue="", needs="reward.loss=bradley_terry",
)  # fmt: skip
def margin_added(plant: Plant, original: Original, self: Any, batch: Batch) -> LossOutput:
    plant.hits += bool(batch.arrays["margin"].any())
    arrays = {**batch.arrays, "margin": -batch.arrays["margin"]}
    result: LossOutput = original(self, replace(batch, arrays=arrays))
    return result


@bug(
    "B34", "weft.engine.losses.reward:BradleyTerryLoss.__call__",
    "the loss of pairs is averaged over each micro-batch, however many answers it has",
    caught_by="scores: gradients, many micro-batches", issue="huggingface/trl#4104",
    needs="micro-batches with unlike numbers of answers",
)  # fmt: skip
def pairs_by_micro_batch(plant: Plant, original: Original, self: Any, batch: Batch) -> LossOutput:
    return plant.averaged(original(self, batch), len(batch.weights_N))
