"""The score head of a critic or a reward model, which replaces the head of logits: its settings, parameter names and
initial values."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from weft.models import hf
from weft.models.facts import find_facts
from weft.models.train_module import TrainModule
from weft.parallel.shards.boxes import Box, shard_of

First = Literal["zeros", "normal", "transformers"]


@dataclass(frozen=True)
class ScoreSpec:
    """A linear head with `labels` numbers per token.

    first: initial weight if the files have none: zeros; `normal`, with variance 1 / (H + 1) (Stiennon et al. 2020,
    arXiv:2009.01325); or as the family's class in transformers initialises it. task: the kind of class in transformers;
    a critic may use either. end_marked: the last token of a document only marks that the token before is scored; no
    forward reads it.
    """

    labels: int = 1
    first: First = "zeros"
    task: hf.ScoreTask = "either"
    end_marked: bool = False


def score_of(path: str, labels: int | None = None, task: hf.ScoreTask = "either") -> ScoreSpec | None:
    """The head of the model at `path`, if it is a classifier. labels, task: of an adapter that adds a score head."""
    config = hf.read_config(path)
    if labels is None and not hf.classifies(config):
        return None
    return ScoreSpec(labels or config.num_labels, task=task)


def score_head_names(model: PreTrainedModel) -> set[str]:
    """Names of the head's parameters in a model with scores."""
    head = find_facts(model).head
    return {f"{head}.{name}" for name, _ in model.get_submodule(head).named_parameters()}


@torch.no_grad()
def fill_score_head(module: TrainModule, fresh: Collection[str] | None, first: First, seed: int) -> None:
    """Fill this rank's shards of the head by ScoreSpec.first; equal on every mesh.

    fresh: parameters that the files lacked; None if there were no files.
    """
    drawn: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if name in fresh if fresh is not None else name.startswith(f"{module.facts.head}."):
            shape, shard = tuple(parameter.shape), shard_of(parameter)
            values = torch.zeros(shape)
            if first == "normal" and len(shape) == 2:
                generator = torch.Generator().manual_seed(seed)
                values = torch.randn(shape, generator=generator) / math.sqrt(shape[1] + 1)
            elif first == "transformers":
                drawn = drawn or hf.first_linear(module.hf_model, module.head.labels, module.head.width, seed)
                values = drawn[name.rpartition(".")[2]]
            shard.values.copy_(values[shard.box.within(Box.from_shape(shape))])
