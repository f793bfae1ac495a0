"""The head of a critic: names of its parameters, and initial values if the source has none."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch
from transformers import PreTrainedModel

from weft.models.facts import find_facts
from weft.models.train_module import TrainModule
from weft.parallel.shards.boxes import Box, shard_of

First = Literal["zeros", "normal"]


def value_head_names(model: PreTrainedModel) -> set[str]:
    """Names of the head's parameters in a model with one number per token."""
    head = find_facts(model, values=True).head
    return {f"{head}.{name}" for name, _ in model.get_submodule(head).named_parameters()}


@torch.no_grad()
def fill_value_head(module: TrainModule, fresh: Collection[str] | None, first: First, seed: int) -> None:
    """Fill this rank's shards of the head: zeros, or a weight drawn from the seed with variance 1 / (H + 1) (Stiennon
    et al. 2020, arXiv:2009.01325) and a bias of zero; the same on every mesh.

    fresh: parameters that the files lacked; None if there were no files.
    """
    for name, parameter in module.named_parameters():
        if name in fresh if fresh is not None else name.startswith(f"{module.facts.head}."):
            shape, shard = tuple(parameter.shape), shard_of(parameter)
            values = torch.zeros(shape)
            if first == "normal" and len(shape) == 2:
                generator = torch.Generator().manual_seed(seed)
                values = torch.randn(shape, generator=generator) / math.sqrt(shape[1] + 1)
            shard.values.copy_(values[shard.box.within(Box.from_shape(shape))])
