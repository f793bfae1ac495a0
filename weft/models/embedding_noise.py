"""Uniform noise on the embeddings of documents in training (NEFTune, arXiv:2310.05914), independent of how a step is
split.

Every number is a hash of (seed, step, index of the document in the step, index of the token, index in the embedding).
There is no generator state, so all ranks, rows and resumed runs have the same noise. T tokens of a row, H hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UserError

# splitmix64 (Steele et al. 2014). Signed multiplication modulo 2^64 gives the same bits as unsigned.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_CHUNK = 1 << 22  # numbers computed at a time: each needs several temporaries of 8 bytes


@dataclass(frozen=True)
class StepNoise:
    """The noise of a step. alpha: NEFTune's factor. seed: of the run. step: its number."""

    alpha: float
    seed: int
    step: int

    def keys(self, documents: Tensor, tokens: Tensor) -> Tensor:
        """A key for each token: int64, of the shape of both. documents: index of each token's document in the step.
        tokens: index of each token in its document."""
        step = _hashed(_hashed(torch.zeros((), dtype=torch.int64), torch.tensor(self.seed)), torch.tensor(self.step))
        return _hashed(_hashed(step, documents), tokens)


class EmbeddingNoise:
    """Adds noise to the output of a model's embedding, by a hook that works inside `adding`."""

    def __init__(self, embedding: nn.Module, ranks: int, rank: int) -> None:
        """ranks: size of the axis that may divide the tokens between layers. rank: this rank's index on it."""
        self.ranks, self.rank = ranks, rank
        self._keys_BT: Tensor | None = None
        self._sizes_BT: Tensor | None = None
        self._calls = 0
        embedding.register_forward_hook(self._add)

    @contextmanager
    def adding(self, keys_BT: Tensor, sizes_BT: Tensor) -> Iterator[None]:
        """A context in which the single call of the embedding gets noise. keys_BT: from StepNoise.keys. sizes_BT: alpha
        / sqrt(tokens of the document), 0 for padding. Raises UserError if the model does not call its embedding
        once."""
        self._keys_BT, self._sizes_BT, self._calls = keys_BT, sizes_BT, 0
        try:
            yield
        finally:
            self._keys_BT = self._sizes_BT = None
        if self._calls != 1:
            raise UserError(
                f"train.neftune_noise_alpha: this model calls its embedding {self._calls} times in a forward, not "
                "once, so the noise would not be NEFTune's. Remove this key for this family."
            )

    def _add(self, _: nn.Module, __: Any, hidden_BTH: Tensor) -> Tensor:
        keys_BT, sizes_BT = self._keys_BT, self._sizes_BT
        if keys_BT is None or sizes_BT is None:
            return hidden_BTH
        self._calls += 1
        tokens = hidden_BTH.shape[1]
        if tokens * self.ranks == keys_BT.shape[1] and self.ranks > 1:  # this rank's part of the row
            keys_BT = keys_BT.narrow(1, self.rank * tokens, tokens)
            sizes_BT = sizes_BT.narrow(1, self.rank * tokens, tokens)
        if keys_BT.shape != hidden_BTH.shape[:2]:
            raise UserError(
                f"train.neftune_noise_alpha: the embedding returns {tuple(hidden_BTH.shape)} for a row of "
                f"{tuple(keys_BT.shape)} tokens. Remove this key for this family."
            )
        noise = noise_of(keys_BT.flatten(), sizes_BT.flatten(), hidden_BTH.shape[2], hidden_BTH.dtype)
        return hidden_BTH + noise.view_as(hidden_BTH)


def noise_of(keys_T: Tensor, sizes_T: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[T, H]: uniform between -a and a, with a = sizes_T / sqrt(width)."""
    across_H = torch.arange(width, device=keys_T.device)
    out_TH = torch.empty(len(keys_T), width, dtype=dtype, device=keys_T.device)
    rows = max(1, _CHUNK // width)
    for begin in range(0, len(keys_T), rows):
        part = slice(begin, begin + rows)
        bits = _hashed(keys_T[part, None], across_H) >> 40 & 0xFFFFFF
        unit = (bits.float() + 0.5) * 2**-23 - 1.0
        out_TH[part] = (unit * (sizes_T[part, None] / math.sqrt(width))).to(dtype)
    return out_TH


def _hashed(key: Tensor, number: Tensor) -> Tensor:
    """The key of (key, number), int64."""
    mixed = key + (number + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30 & (1 << 34) - 1)) * _FIRST
    mixed = (mixed ^ (mixed >> 27 & (1 << 37) - 1)) * _SECOND
    return mixed ^ (mixed >> 31 & (1 << 33) - 1)
