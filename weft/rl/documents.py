"""Samples as training documents, and the groups of each optimizer step.

The documents' weights and the normaliser of the whole step (weft/engine/losses/policy.py) express rl.loss_aggregation,
so the loss does not depend on how a step is divided into micro-batches and over ranks.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.config.rl_schema import RlConfig
from weft.data.image_opener import ImageOpener
from weft.engine.batch.document import Document, MeasuredDocuments, Measures
from weft.engine.batch.media import Media
from weft.engine.batch.prefixes import Beginning, TokenKeys, beginnings_of, token_keys
from weft.engine.batch.replay import align_routes
from weft.inference.types import Flags, Floats, Prompt, Sample, SampleGroup
from weft.rl.corrections import comparable


class _Samples(MeasuredDocuments):
    """Documents of samples; their arrays are built on demand. weights: per sample, the loss weight of a sampled token;
    other tokens have weight 0. routed: whether documents get the routes of samples. opener: opens the images."""

    def __init__(
        self, samples: Sequence[Sample], weights: Sequence[np.float32], routed: bool, opener: ImageOpener | None
    ) -> None:
        self.samples, self._weights, self._routed, self._opener = samples, weights, routed, opener

    def __len__(self) -> int:
        return len(self.samples)

    def measures(self) -> Measures:
        counts = np.array([np.count_nonzero(trained_tokens(sample)[1:]) for sample in self.samples], np.int64)
        images = [sample.images for sample in self.samples]
        return Measures(
            length=np.array([len(sample) for sample in self.samples], np.int64),
            # Equals the sum of `counts` equal fp32 weights in fp64, because every partial sum is exact there.
            weight=counts.astype(np.float64) * np.array(self._weights, np.float64),
            loss_tokens=counts,
            routed=np.array([self._routed and sample.routes is not None for sample in self.samples], np.bool_),
            patches=np.array([shown.patches if shown else 0 for shown in images], np.int64),
            pairs=np.array([shown.pairs if shown else 0 for shown in images], np.int64),
            videos=np.zeros(len(images), np.bool_),
        )

    def groups(self) -> list[int | None]:
        """Samples of one prompt are a group: their shared prefixes are forwarded once."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault(sample.prompt.id, len(numbers)) for sample in self.samples]

    def beginnings(self, indices: Sequence[int], placeholders: Sequence[int] = ()) -> dict[int, Beginning]:
        """The controller's notes; computed for samples without notes."""
        if any(self.samples[index].beginnings is None for index in indices):
            return sample_beginnings({index: self.samples[index] for index in indices}, placeholders, self._routed)
        noted = {index: (self.samples[index].beginnings or {}).get(self._routed) for index in indices}
        return {index: beginning for index, beginning in noted.items() if beginning is not None}

    def source(self, index: int) -> str:
        sample = self.samples[index]
        return f"sample {sample.id}" + (f" ({sample.prompt.source})" if sample.prompt.source else "")

    def build(self, index: int) -> Document:
        return self.take([index])[index]

    def take(self, indices: Sequence[int]) -> dict[int, Document]:
        chosen = [self.samples[index] for index in indices]
        if not chosen:
            return {}
        tokens = _column([sample.tokens for sample in chosen], np.int64)
        weighed = [trained_tokens(self.samples[index]) * self._weights[index] for index in indices]
        weights = _column(weighed, np.float32)
        columns = {name: _column(arrays, np.float32) for name, arrays in self.arrays(chosen).items()}
        groups = self.groups()
        return {
            index: Document(
                tokens=tokens[position],
                weights=weights[position],
                arrays={name: column[position] for name, column in columns.items()},
                routes=self._routes(chosen[position]),
                source=self.source(index),
                media=self._media(chosen[position]),
                group=groups[index],
            )
            for position, index in enumerate(indices)
        }

    def arrays(self, samples: Sequence[Sample]) -> dict[str, list[Floats]]:
        """Per-token arrays for losses: name -> one array [T] per sample."""
        return {}

    def _media(self, sample: Sample) -> Media | None:
        images = sample.images
        if images is None:
            return None
        assert self._opener is not None, "samples with images need an opener"
        return self._opener(images)

    def _routes(self, sample: Sample) -> Tensor | None:
        return align_routes(sample.routes, len(sample)) if self._routed and sample.routes is not None else None


class ReadSamples(_Samples):
    """Documents for readouts. routed: whether they replay the experts that the engine chose."""

    def __init__(self, samples: Sequence[Sample], routed: bool, opener: ImageOpener | None = None) -> None:
        super().__init__(samples, [np.float32(1.0)] * len(samples), routed, opener)


class TrainedSamples(_Samples):
    """One document per trained sample, in order; may be empty. places: index in `samples` of each document. masked:
    number of episodes that only rl.mask_truncated omits. branches: documents beyond the first of each episode.

    Samples that do not count or have no sampled token are omitted; with rl.mask_truncated, also samples with finish
    `length`.
    """

    def __init__(self, samples: Sequence[Sample], config: RlConfig, opener: ImageOpener | None = None) -> None:
        self.places = [index for index, sample in enumerate(samples) if is_trained(sample, config)]
        trained = [samples[index] for index in self.places]
        lengths = Counter[tuple[str, int]]()  # trained tokens of each episode, which may have several samples
        for sample in trained:
            lengths[_episode(sample)] += int(np.count_nonzero(trained_tokens(sample)))
        self.masked = len({_episode(sample) for sample in samples if sample.counts and sample.length > 0}) - len(
            lengths
        )
        self.branches = len(trained) - len(lengths)
        weights = [_weight(lengths[_episode(sample)], config) for sample in trained]
        super().__init__(trained, weights, routed=True, opener=opener)
        self.old_is_known = (
            bool(trained) and trained[0].old_logprobs is not None
        )  # else the current policy is the old policy
        self._corrects = config.rl.corrects
        counts = {key: sum(getattr(sample, key) is not None for sample in trained) for key in _LOSS_ARRAYS}
        if not (self.old_is_known and self._corrects):
            counts["correction"] = 0
        self._keys = [key for key, count in counts.items() if count]
        for key in self._keys:
            assert counts[key] == len(trained), f"{key} of {counts[key]} of {len(trained)} samples"
        assert not trained or "advantages" in self._keys, "samples without advantages are not ready to be trained"

    def arrays(self, samples: Sequence[Sample]) -> dict[str, list[Floats]]:
        """The per-token arrays for losses that every trained sample has: name -> one array [T] per sample."""
        arrays = {key: [getattr(sample, key) for sample in samples] for key in self._keys}
        if self._corrects and not self.old_is_known:
            arrays["rollout_logprobs"] = [comparable(sample) for sample in samples]
        return arrays


def note_beginnings(samples: Sequence[Sample]) -> None:
    """Set `beginnings` of samples without them, so that trainers plan trees without reading tokens and routes. Groups
    with images and without placeholders are skipped."""
    by_prompt: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.prompt.id].append(sample)
    for group in by_prompt.values():
        placeholders = group[0].prompt.placeholders
        is_complete = all(sample.beginnings is not None for sample in group)
        if is_complete or (not placeholders and any(sample.images is not None for sample in group)):
            continue
        numbered = dict(enumerate(group))
        unrouted = sample_beginnings(numbered, placeholders, routed=False)
        has_routes = any(sample.routes is not None for sample in group)
        routed = sample_beginnings(numbered, placeholders, routed=True) if has_routes else unrouted
        for index, sample in numbered.items():
            sample.beginnings = {False: unrouted.get(index), True: routed.get(index)}


def sample_beginnings(samples: Mapping[int, Sample], placeholders: Sequence[int], routed: bool) -> dict[int, Beginning]:
    """The shared prefixes of samples, by index. Samples of one prompt are a group. Other arguments: as in _keys."""
    keys = {index: _keys(sample, placeholders, routed) for index, sample in samples.items()}
    groups = {index: sample.prompt.id for index, sample in samples.items()}
    return beginnings_of(groups, {index: key for index, key in keys.items() if key is not None})


def _keys(sample: Sample, placeholders: Sequence[int], routed: bool) -> TokenKeys | None:
    """The keys of a sample's tokens. placeholders: as in token_keys. routed: whether its routes are replayed."""
    columns = []
    if routed and sample.routes is not None:
        routes = np.asarray(sample.routes)
        missing = len(sample) - len(routes)  # the last token, which no forward reads
        if missing not in (0, 1):
            return None  # align_routes names it
        columns.append(np.concatenate([routes, np.zeros_like(routes[:missing])]))
    images = ""  # samples of one prompt share its images; images of replies are a sample's own
    if sample.images is not None:
        images = f"{sample.prompt.id} " + ("" if sample.reply_images is None else str(sample.number))
    return token_keys(sample.tokens, placeholders, images.encode(), columns)


# Arrays of a sample that losses read. Either all trained samples have an array, or none has.
_LOSS_ARRAYS = ("old_logprobs", "advantages", "correction", "ref_logprobs", "values", "returns")


def build_documents(samples: Sequence[Sample], config: RlConfig) -> list[Document]:
    """All documents of TrainedSamples, built."""
    trained = TrainedSamples(samples, config)
    return list(trained.take(range(len(trained))).values())


def longest_samples(prompts: Sequence[Prompt], most_tokens: int) -> list[tuple[str, int, int]]:
    """(name, tokens, patches) of the longest possible sample of each prompt with images. most_tokens: limit on the
    tokens after a prompt."""
    return [
        (f"{prompt.source}, with rollout.max_new_tokens = {most_tokens}", len(prompt.tokens) + most_tokens,
         prompt.images.patches)
        for prompt in prompts
        if prompt.images is not None
    ]  # fmt: skip


def is_trained(sample: Sample, config: RlConfig) -> bool:
    """Whether a sample becomes a document."""
    masked = config.rl.mask_truncated and sample.finish == "length"
    return sample.counts and sample.length > 0 and not masked


def trained_tokens(sample: Sample) -> Flags:
    """[T] whether the policy sampled each token."""
    return sample.sampled


def _episode(sample: Sample) -> tuple[str, int]:
    return sample.prompt.id, sample.number


def _weight(length: int, config: RlConfig) -> np.float32:
    """The weight of each trained token: 1 / G with sequence_mean (of an episode with G = `length` trained tokens),
    1 / rollout.max_new_tokens with sequence_sum, else 1."""
    if config.rl.loss_aggregation == "sequence_mean":
        return np.float32(1.0 / length)
    return np.float32(1.0 / config.rollout.max_new_tokens if config.rl.loss_aggregation == "sequence_sum" else 1.0)


def _column(arrays: Sequence[NDArray[Any]], dtype: type) -> tuple[Tensor, ...]:
    """The arrays as tensors: views of one joined tensor, because copying many short arrays one by one is slow."""
    joined: NDArray[Any] = np.concatenate(arrays).astype(dtype, copy=False)
    parts: tuple[Tensor, ...] = torch.from_numpy(joined).split([len(array) for array in arrays])
    return parts


def deal(groups: Sequence[SampleGroup], updates: int, seed: int) -> list[list[SampleGroup]]:
    """The groups of each optimizer step, shuffled by `seed`. Each group appears once; step sizes differ by at most one
    group. With fewer groups than `updates` there are fewer steps."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    updates = min(updates, len(order))
    return [order[update::updates] for update in range(updates)]
