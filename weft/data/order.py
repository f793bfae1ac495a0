"""Which documents each optimizer step takes: pure functions of lengths, seed and config, the same on every rank."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of n documents in an epoch: a permutation that depends on n, seed and epoch alone.

    Documents are sorted by draws of random.Random.random, the one method whose sequence Python promises to keep on
    every platform and in every version.
    """
    if not shuffle:
        return list(range(n))
    return permutation(n, f"{seed}:{epoch}")


def permutation(n: int, words: str) -> list[int]:
    """A permutation of the numbers below n, drawn from these words."""
    draw = random.Random(int.from_bytes(hashlib.sha256(words.encode()).digest(), "big")).random
    keys = [draw() for _ in range(n)]
    return sorted(range(n), key=keys.__getitem__)


@dataclass(frozen=True, slots=True)
class Share:
    """One of the sources that the documents are of, in their order. weight: as in data.sources."""

    documents: int
    weight: float = 1.0

    @property
    def in_epoch(self) -> int:
        """Documents that an epoch takes: weight x documents, rounded half up, and at least one."""
        return max(1, math.floor(self.weight * self.documents + 0.5))

    def chosen(self, source: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """The indices of the source's documents that epoch 1, 2, ... takes; one may occur twice.

        The source is passed over again and again, each time in an order of its own drawn from the seed, and each epoch
        takes what follows in that sequence. So no document comes a second time before all have come once: at weight
        0.5, two epochs see every document, and at weight 1 each of them does.
        """
        first = (epoch - 1) * self.in_epoch
        out: list[int] = []
        while len(out) < self.in_epoch:
            number, place = divmod(first + len(out), self.documents)
            wanted = self.in_epoch - len(out)
            if place == 0 and wanted >= self.documents:
                out += range(self.documents)
                continue
            order = permutation(self.documents, f"{seed}:{source}:{number}") if shuffle else range(self.documents)
            out += order[place : place + wanted]
        return sorted(out) if shuffle else out


def order_of(shares: Sequence[Share], seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The documents that an epoch takes of all sources, in its order."""
    chosen: list[int] = []
    begin = 0
    for number, share in enumerate(shares):
        chosen += [begin + place for place in share.chosen(number, seed, epoch, shuffle)]
        begin += share.documents
    return [chosen[place] for place in epoch_order(len(chosen), seed, epoch, shuffle)]


@dataclass(frozen=True, slots=True)
class Step:
    """number and epoch count from 1; documents: indices into the data, in order."""

    number: int
    epoch: int
    documents: list[int]


class Steps:
    """The optimizer steps of a run. A step never straddles an epoch, so the last of an epoch may be short.

    lengths: tokens of each document. Exactly one of documents (in a step) and tokens (a step takes documents until one
    more would exceed so many; a longer document is a step of its own), and exactly one of epochs and steps (epochs
    repeat as needed), is not None. shares: the sources that the documents are of; None for one that is taken whole.
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
        shares: Sequence[Share] | None = None,
    ) -> None:
        assert len(lengths), "no documents"
        assert (documents is None) != (tokens is None) and (epochs is None) != (steps is None)
        assert all(value is None or value >= 1 for value in (documents, tokens, epochs, steps))
        self._lengths = lengths
        self._shares = shares or [Share(len(lengths))]
        assert sum(share.documents for share in self._shares) == len(lengths)
        self._in_epoch = sum(share.in_epoch for share in self._shares)
        self._documents = documents
        self._tokens = tokens
        self._seed = seed
        self._shuffle = shuffle
        self._counts: list[int] = []  # steps of each epoch dealt so far
        self.total = self._in_epochs(epochs) if epochs is not None else steps or 0

    def __len__(self) -> int:
        """The number of optimizer steps of the run."""
        return self.total

    def __iter__(self) -> Iterator[Step]:
        return self.starting_at(1)

    def starting_at(self, number: int) -> Iterator[Step]:
        """The steps from a number on, exactly as in an unbroken run; earlier epochs are counted, not dealt again."""
        epoch, first = 1, 1
        while first + self._count(epoch) <= number <= self.total:
            first += self._count(epoch)
            epoch += 1
        while first <= self.total:
            for i, documents in enumerate(self._deal(epoch)):
                if number <= first + i <= self.total:
                    yield Step(first + i, epoch, documents)
            first += self._count(epoch)
            epoch += 1

    def _in_epochs(self, epochs: int) -> int:
        if self._documents is not None:  # they are alike, and may be very many
            return epochs * self._count(1)
        return sum(self._count(epoch + 1) for epoch in range(epochs))

    def _count(self, epoch: int) -> int:
        if self._documents is not None:
            return -(-self._in_epoch // self._documents)
        while len(self._counts) < epoch:
            self._counts.append(sum(1 for _ in self._deal(len(self._counts) + 1)))
        return self._counts[epoch - 1]

    def _deal(self, epoch: int) -> Iterator[list[int]]:
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
