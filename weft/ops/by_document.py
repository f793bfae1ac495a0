"""A causal function of sequences, applied separately to every document of a packed row.

Neighbours of similar length run as one right-padded batch. A causal function's result for a token does not depend on
later tokens, so padding is exact. n documents of at most L tokens in a group, T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from weft.ops.attention_call import Bounds

# Costs besides the tokens of a batch, in tokens: of a call, and of each token of the longest document, because many
# functions loop over the sequence in Python. Measured on a CPU (docs/benchmarks/hybrids.md); half or twice as much
# makes no difference there.
CALL, _STEP = 32, 1
_SHORTEST = 2  # some models treat a single token as a decoding step


@dataclass(frozen=True)
class DocumentBatch:
    """Neighbouring documents that run as one batch. tokens: in all, without padding. places: [tokens] index of each
    token in the flattened [n, L]; None if all documents have length L."""

    documents: int
    longest: int
    tokens: int
    places: Tensor | None

    def unfold(self, part: Tensor) -> Tensor:
        """[tokens, ...] -> [n, L, ...], with zeros after each document."""
        if self.places is not None:
            zeros = part.new_zeros(self.documents * self.longest, *part.shape[1:])
            part = zeros.index_copy(0, self.places, part)
        return part.unflatten(0, (self.documents, self.longest))

    def fold(self, batch: Tensor) -> Tensor:
        """[n, L, ...] -> [tokens, ...]."""
        flat = batch.flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)


def by_document(function: Callable[..., Any], bounds: Bounds, *args: Any, **kwargs: Any) -> Any:
    """The results of `function` for each document, joined to a row: a tensor [1, T, ...], or a tuple of one and Nones.

    Arguments with a token dimension, [1, T, ...], are cut into documents; others are passed on unchanged.
    """
    tokens = sum(bounds.lengths)
    groups = groups_of(bounds, _device(tokens, args, kwargs))
    split = _Split(tokens, [group.tokens for group in groups])
    results = []
    for index, group in enumerate(groups):
        positional, keywords = (split.group_arguments(value, index, group.unfold) for value in (args, kwargs))
        out = function(*positional, **keywords)
        results.append(group.fold(out[0] if isinstance(out, tuple) else out))
    row = (results[0] if len(results) == 1 else torch.cat(results))[None]
    return (row, *[None] * (len(out) - 1)) if isinstance(out, tuple) else row


class _Split:
    """Cuts arguments at the borders of groups, each tensor only once."""

    def __init__(self, tokens: int, sizes: list[int]) -> None:
        self._tokens, self._sizes = tokens, sizes
        self._parts: dict[int, tuple[Tensor, ...]] = {}

    def group_arguments(self, value: Any, index: int, unfold: Callable[[Tensor], Tensor]) -> Any:
        """The arguments of group `index`: `value`, with the group's part in place of each tensor over tokens."""
        if isinstance(value, dict):
            return {name: self.group_arguments(item, index, unfold) for name, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self.group_arguments(item, index, unfold) for item in value)
        if not is_of_tokens(value, self._tokens):
            return value
        if id(value) not in self._parts:
            self._parts[id(value)] = value[0].split(self._sizes)
        return unfold(self._parts[id(value)][index])


def is_of_tokens(value: Any, tokens: int) -> bool:
    """Whether a tensor, or any of a tuple, is [1, tokens, ...]."""
    if isinstance(value, tuple):
        return any(is_of_tokens(item, tokens) for item in value)
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, tokens)


def _device(tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and is_of_tokens(value, tokens):
            return value.device
    raise RuntimeError(f"nothing that a mixer receives is of the {tokens} tokens of its row")


# ---------------------------------------------------------------- which documents are one batch


def groups_of(bounds: Bounds, device: torch.device) -> list[DocumentBatch]:
    """The groups of a row, computed once per row."""
    if "groups" not in bounds.cache:
        ends = [0, *grouped(bounds.lengths)]
        lengths = [bounds.lengths[start:end] for start, end in pairwise(ends)]
        bounds.cache["groups"] = [batch_of(group_lengths, device) for group_lengths in lengths]
    return bounds.cache["groups"]


def grouped(lengths: tuple[int, ...]) -> list[int]:
    """Where groups end, counted in documents: the cheapest cut of a row between documents of different lengths, by
    dynamic programming."""
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    best, cut = [0.0], [0]
    for end in range(1, len(runs) + 1):
        lowest_cost, first, longest, documents = float("inf"), 0, 0, 0
        for start in range(end - 1, -1, -1):
            longest, documents = max(longest, runs[start][0]), documents + runs[start][1]
            cost = CALL + (_STEP + documents) * longest
            if cost >= lowest_cost:  # earlier documents only add to it
                break
            if best[start] + cost < lowest_cost:
                lowest_cost, first = best[start] + cost, start
        best.append(lowest_cost)
        cut.append(first)
    ends, end = [], len(runs)
    while end:
        ends.append(sum(count for _, count in runs[:end]))
        end = cut[end]
    return ends[::-1]


def batch_of(lengths: tuple[int, ...], device: torch.device) -> DocumentBatch:
    """Documents of these lengths as one batch."""
    longest = max(_SHORTEST, *lengths)
    if min(lengths) == longest:
        return DocumentBatch(len(lengths), longest, sum(lengths), None)
    counts = torch.tensor(lengths)
    document = torch.arange(len(lengths)).repeat_interleave(counts)
    within = torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]
    places = document * longest + within
    if device.type != "cpu":
        places = places.pin_memory().to(device, non_blocking=True)
    return DocumentBatch(len(lengths), longest, sum(lengths), places)
