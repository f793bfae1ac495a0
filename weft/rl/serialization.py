"""A compact pickle of samples for the trainers: a few joined arrays, with only what trainers read.

Pickled one by one, 256 samples are about a thousand small arrays, with texts, columns and notes that no trainer uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.image_files import PromptImages
from weft.engine.batch.prefixes import Beginning
from weft.inference.types import Prompt, Sample
from weft.rl.documents import note_beginnings

# Arrays with one entry per token, and their dtypes in the pickle. Trainers do not use `versions`.
_BY_TOKEN = {
    "tokens": np.int32, "sampled": np.bool_, "rollout_logprobs": np.float32, "kept_logmass": np.float32,
    "old_logprobs": np.float32, "ref_logprobs": np.float32, "teacher_logprobs": np.float32, "values": np.float32,
    "advantages": np.float32, "returns": np.float32, "correction": np.float32,
}  # fmt: skip
_NO_VERSIONS = np.zeros(0, np.int32)


class SampleBatch(list[Sample]):
    """A list of samples that unpickles as a plain list, without texts, messages, notes, columns, prompt tokens, weight
    versions and the rewards of single functions."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (_pack(self),)


@dataclass(frozen=True, slots=True)
class _Column:
    """An array of each sample, joined end to end. lengths: the array's length per sample; -1 for samples without."""

    lengths: NDArray[np.int64]
    values: NDArray[Any]

    def parts(self) -> list[NDArray[Any] | None]:
        ends = np.cumsum(self.lengths.clip(min=0))
        pairs = zip(ends.tolist(), self.lengths.tolist(), strict=True)
        return [self.values[end - length : end] if length >= 0 else None for end, length in pairs]


@dataclass(frozen=True, slots=True)
class _Packed:
    """labels: per sample (index, visit and source of the prompt, number, finish, reward, trained). images: per sample,
    those of prompt and replies; a pickle holds shared objects once. routes: per sample; too large to copy into one
    array. beginnings: per sample."""

    labels: list[tuple[int, int, str, int, str, float | None, bool]]
    images: list[PromptImages | None]
    columns: dict[str, _Column]
    routes: list[Any]
    beginnings: list[dict[bool, Beginning | None] | None]


def _pack(samples: Sequence[Sample]) -> _Packed:
    note_beginnings(samples)
    labels = [
        (s.prompt.index, s.prompt.visit, s.prompt.source, s.number, s.finish, s.reward, s.trained) for s in samples
    ]
    columns = {name: _column([getattr(s, name) for s in samples], dtype) for name, dtype in _BY_TOKEN.items()}
    present = {name: column for name, column in columns.items() if column is not None}
    return _Packed(
        labels, [s.images for s in samples], present, [s.routes for s in samples], [s.beginnings for s in samples]
    )


def _column(arrays: Sequence[Any], dtype: Any) -> _Column | None:
    """The arrays joined; None if no sample has one."""
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    lengths = np.array([-1 if array is None else len(array) for array in arrays])
    return _Column(lengths, np.concatenate(present).astype(dtype, copy=False))


def _unpacked(packed: _Packed) -> list[Sample]:
    count = len(packed.labels)
    parts = {name: column.parts() for name, column in packed.columns.items()}
    arrays: list[dict[str, Any]] = [{name: values[i] for name, values in parts.items()} for i in range(count)]
    for sample_arrays, routes, beginnings in zip(arrays, packed.routes, packed.beginnings, strict=True):
        sample_arrays |= {"routes": routes, "beginnings": beginnings}
    return [
        Sample(
            prompt=Prompt(index, visit, (), "", source=source, images=images), number=number, finish=finish,
            reward=reward, trained=trained, versions=_NO_VERSIONS, **sample_arrays,
        )
        for (index, visit, source, number, finish, reward, trained), images, sample_arrays in zip(
            packed.labels, packed.images, arrays, strict=True
        )
    ]  # fmt: skip
