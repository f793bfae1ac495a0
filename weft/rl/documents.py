"""Samples as documents of optimizer steps, and groups dealt to them.

How a step's loss is made of its tokens' (rl.aggregation) lies in the documents' weights and in the normaliser
(weft/objectives/policy.py), which the whole step has in common, so that no cut of the step can change it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.config.rl_schema import RlConfig
from weft.engine.document import Document
from weft.engine.replay import aligned
from weft.rl.corrections import comparable
from weft.rl.types import Flags, Floats, Group, Sample


def documents_of(samples: Sequence[Sample], config: RlConfig) -> list[Document]:
    """A document of each sample that is trained, in their order: there may be none.

    Left out are samples that do not count, those without a token of the policy's, and with rl.mask_truncated those that
    ended at their longest. Weights are 0 where nothing was sampled.
    """
    chosen = [sample for sample in samples if is_trained(sample, config)]
    if not chosen:
        return []
    tokens = _column([sample.tokens for sample in chosen], np.int64)
    weights = _column(_weights([sample.sampled for sample in chosen], config), np.float32)
    columns = {name: _column(arrays, np.float32) for name, arrays in _arrays(chosen, config).items()}
    return [
        Document(
            tokens=tokens[place],
            weights=weights[place],
            arrays={name: column[place] for name, column in columns.items()},
            routes=None if sample.routes is None else aligned(sample.routes, len(sample)),
            source=f"sample {sample.id}" + (f" ({sample.prompt.source})" if sample.prompt.source else ""),
        )
        for place, sample in enumerate(chosen)
    ]


def is_trained(sample: Sample, config: RlConfig) -> bool:
    """Whether a sample becomes a document."""
    masked = config.rl.mask_truncated and sample.finish == "length"
    return sample.counts and sample.length > 0 and not masked


def _arrays(samples: Sequence[Sample], config: RlConfig) -> dict[str, list[Floats]]:
    """What the losses read of each token: what all samples have."""
    known, corrects = samples[0].old is not None, config.rl.corrects
    found: dict[str, list[Floats | None]] = {
        "old_logprob": [sample.old for sample in samples],
        "advantage": [sample.advantages for sample in samples],
        "correction": [sample.correction if known and corrects else None for sample in samples],
        "rollout_logprob": [None if known or not corrects else comparable(sample) for sample in samples],
        "reference_logprob": [sample.reference for sample in samples],
        "old_value": [sample.values for sample in samples],
        "return": [sample.returns for sample in samples],
    }
    there: dict[str, list[Floats]] = {}
    for name, arrays in found.items():
        having = [array for array in arrays if array is not None]
        assert len(having) in (0, len(samples)), f"{name} of {len(having)} of {len(samples)} samples"
        if having:
            there[name] = having
    assert "advantage" in there, "samples without advantages are not ready to be trained"
    return there


def _weights(sampled: Sequence[Flags], config: RlConfig) -> list[Floats]:
    """[T] of a sampled token 1; 1 / G of G with sequence_mean; 1 / rollout.max_new_tokens with sequence_sum."""
    if config.rl.aggregation == "sequence_mean":
        return [flags * np.float32(1.0 / np.count_nonzero(flags)) for flags in sampled]
    weight = 1.0 / config.rollout.max_new_tokens if config.rl.aggregation == "sequence_sum" else 1.0
    return [flags * np.float32(weight) for flags in sampled]


def _column(arrays: Sequence[NDArray[Any]], dtype: type) -> tuple[Tensor, ...]:
    """The same as tensors, which lie in one: samples may be short and many."""
    joined: NDArray[Any] = np.concatenate(arrays).astype(dtype, copy=False)
    parts: tuple[Tensor, ...] = torch.from_numpy(joined).split([len(array) for array in arrays])
    return parts


def deal(groups: Sequence[Group], updates: int, seed: int) -> list[list[Group]]:
    """The groups of each optimizer step, shuffled by the seed: each whole and once, in steps that differ by one group
    at most. Fewer groups than steps make fewer steps."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    updates = min(updates, len(order))
    return [order[update::updates] for update in range(updates)]
