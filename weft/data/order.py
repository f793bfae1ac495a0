"""The documents of each optimizer step: a pure function of lengths, seed and config, equal on every rank."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of n documents in an epoch: a permutation that depends only on n, seed and epoch."""
    if not shuffle:
        return list(range(n))
    return permutation(n, f"{seed}:{epoch}")


def permutation(n: int, words: str) -> list[int]:
    """A permutation of range(n), drawn from a seed string.

    Numbers are sorted by draws of random.Random.random, the only method whose sequence Python guarantees on every
    platform and in every version.
    """
    draw = random.Random(int.from_bytes(hashlib.sha256(words.encode()).digest(), "big")).random
    keys = [draw() for _ in range(n)]
    return sorted(range(n), key=keys.__getitem__)


@dataclass(frozen=True, slots=True)
class SourceShare:
    """A source of documents, which are consecutive. documents: their number. weight: as in data.sources."""

    documents: int
    weight: float = 1.0

    @property
    def in_epoch(self) -> int:
        """Number of documents in an epoch: weight x documents, rounded half up, at least one."""
        return max(1, math.floor(self.weight * self.documents + 0.5))

    def chosen(self, source: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """Indices of the source's documents in an epoch (1, 2, ...). An index may occur more than once.

        The source is an endless sequence of passes, each in an order drawn from the seed. Each epoch reads the next
        part of that sequence. So no document is repeated before all have been read: at weight 0.5, two epochs read
        every document once; at weight 1, each epoch does.
        """
        first = (epoch - 1) * self.in_epoch
        out: list[int] = []
        while len(out) < self.in_epoch:
            number, offset = divmod(first + len(out), self.documents)
            missing = self.in_epoch - len(out)
            if offset == 0 and missing >= self.documents:
                out += range(self.documents)
                continue
            order = permutation(self.documents, f"{seed}:{source}:{number}") if shuffle else range(self.documents)
            out += order[offset : offset + missing]
        return sorted(out) if shuffle else out


def order_of(shares: Sequence[SourceShare], seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Indices of an epoch's documents from all sources, in the order of training."""
    chosen: list[int] = []
    begin = 0
    for number, share in enumerate(shares):
        chosen += [begin + index for index in share.chosen(number, seed, epoch, shuffle)]
        begin += share.documents
    return [chosen[index] for index in epoch_order(len(chosen), seed, epoch, shuffle)]


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The documents of an optimizer step. number and epoch count from 1. documents: indices into the data, in order."""

    number: int
    epoch: int
    documents: list[int]


class StepSampler:
    """The optimizer steps of a run. A step never spans two epochs, so the last step of an epoch may be short.

    lengths: tokens of each document. documents or tokens: the size of a step, as a number of documents or as a largest
    number of tokens (a longer document gets a separate step). epochs or steps: the length of the run; epochs repeat
    until `steps` is reached. Exactly one of each pair is not None. shares: the sources of the documents; None for one
    source of weight 1. example_ends: if examples (such as pairs) have several documents, the number of documents up to
    the end of each example; then documents, tokens and shares count examples, and a step has all documents of its
    examples, in order.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        documents: int | None,
        tokens: int | None = None,
        epochs: int | None,
        steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shares: Sequence[SourceShare] | None = None,
        example_ends: Sequence[int] | None = None,
    ) -> None:
        if example_ends is not None:
            firsts = [0, *example_ends[:-1]]
            lengths = [sum(lengths[i] for i in range(*span)) for span in zip(firsts, example_ends, strict=True)]
        self._example_ends = example_ends
        assert len(lengths), "no documents"
        assert (documents is None) != (tokens is None) and (epochs is None) != (steps is None)
        assert all(value is None or value >= 1 for value in (documents, tokens, epochs, steps))
        self._lengths = lengths
        self._shares = shares or [SourceShare(len(lengths))]
        assert sum(share.documents for share in self._shares) == len(lengths)
        self._in_epoch = sum(share.in_epoch for share in self._shares)
        self._documents = documents
        self._tokens = tokens
        self._seed = seed
        self._shuffle = shuffle
        self._counts: list[int] = []  # steps of each epoch computed so far
        if epochs is None:
            self.total = steps or 0
        elif documents is not None:  # all epochs have the same number of steps, and there may be very many epochs
            self.total = epochs * self._count(1)
        else:
            self.total = sum(self._count(epoch + 1) for epoch in range(epochs))

    def __len__(self) -> int:
        """The number of optimizer steps of the run."""
        return self.total

    def __iter__(self) -> Iterator[SampledStep]:
        return self.starting_at(1)

    def starting_at(self, number: int) -> Iterator[SampledStep]:
        """The steps from step `number` on, exactly as in an uninterrupted run."""
        epoch, first = 1, 1
        while first + self._count(epoch) <= number <= self.total:
            first += self._count(epoch)
            epoch += 1
        while first <= self.total:
            for i, documents in enumerate(self.cut_epoch(epoch)):
                if number <= first + i <= self.total:
                    yield SampledStep(first + i, epoch, self.documents_of(documents))
            first += self._count(epoch)
            epoch += 1

    def documents_of(self, examples: list[int]) -> list[int]:
        """The documents of these examples, in order."""
        ends = self._example_ends
        if ends is None:
            return examples
        return [i for example in examples for i in range(ends[example - 1] if example else 0, ends[example])]

    @property
    def in_epoch(self) -> int:
        """The number of steps in the first epoch, even if the run ends earlier."""
        return self._count(1)

    def _count(self, epoch: int) -> int:
        if self._documents is not None:
            return -(-self._in_epoch // self._documents)
        while len(self._counts) < epoch:
            self._counts.append(sum(1 for _ in self.cut_epoch(len(self._counts) + 1)))
        return self._counts[epoch - 1]

    def cut_epoch(self, epoch: int) -> Iterator[list[int]]:
        order = order_of(self._shares, self._seed, epoch, self._shuffle)
        if self._documents is not None:
            for start in range(0, len(order), self._documents):
                yield order[start : start + self._documents]
            return
        assert self._tokens is not None
        step: list[int] = []
        tokens = 0
        for i in order:
            if step and tokens + self._lengths[i] > self._tokens:
                yield step
                step, tokens = [], 0
            step.append(i)
            tokens += self._lengths[i]
        yield step
