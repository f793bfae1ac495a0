"""Samples as documents of optimizer steps, and groups dealt to them.

How a step's loss is made of its tokens' (rl.aggregation) lies in the documents' weights and in the normaliser
(weft/objectives/policy.py), which the whole step has in common, so that no cut of the step can change it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.config.rl_schema import RlConfig
from weft.engine.document import Document
from weft.engine.replay import aligned
from weft.rl.types import Flags, Group, Sample


def documents_of(samples: Sequence[Sample], config: RlConfig) -> list[Document]:
    """A document of each sample that is trained, in their order: there may be none.

    Left out are samples that do not count, those without a token of the policy's, and with rl.mask_truncated those that
    ended at their longest. Weights are 0 where nothing was sampled.
    """
    return [_document(sample, config) for sample in samples if is_trained(sample, config)]


def is_trained(sample: Sample, config: RlConfig) -> bool:
    """Whether a sample becomes a document."""
    masked = config.rl.mask_truncated and sample.finish == "length"
    return sample.counts and sample.length > 0 and not masked


def _document(sample: Sample, config: RlConfig) -> Document:
    arrays = {
        "old_logprob": sample.old,
        "advantage": sample.advantages,
        "correction": sample.correction if config.rl.corrects else None,
        "reference_logprob": sample.reference,
        "old_value": sample.values,
        "return": sample.returns,
    }
    assert sample.old is not None and sample.advantages is not None, f"sample {sample.id} is not ready to be trained"
    source = f"sample {sample.id}" + (f" ({sample.prompt.source})" if sample.prompt.source else "")
    return Document(
        tokens=torch.as_tensor(np.asarray(sample.tokens, np.int64)),
        weights=_weights(sample.sampled, config),
        arrays={name: torch.as_tensor(np.asarray(a, np.float32)) for name, a in arrays.items() if a is not None},
        routes=None if sample.routes is None else aligned(sample.routes, len(sample)),
        source=source,
    )


def _weights(sampled: Flags, config: RlConfig) -> Tensor:
    """[T] of a sampled token 1; 1 / G of G with sequence_mean; 1 / rollout.max_new_tokens with sequence_sum."""
    weight = 1.0
    if config.rl.aggregation == "sequence_mean":
        weight = 1.0 / int(sampled.sum())
    elif config.rl.aggregation == "sequence_sum":
        weight = 1.0 / config.rollout.max_new_tokens
    return torch.as_tensor(sampled).float() * weight


def deal(groups: Sequence[Group], updates: int, seed: int) -> list[list[Group]]:
    """The groups of each optimizer step, shuffled by the seed: each whole and once, in steps that differ by one group
    at most. Fewer groups than steps make fewer steps."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    updates = min(updates, len(order))
    return [order[update::updates] for update in range(updates)]
