"""Applies a causal function of sequences to every document of a packed row separately.

Neighbouring documents of similar length run as one right-padded batch. The result of a causal function for a token does
not depend on later tokens, so padding is exact.

Shapes: n documents of at most L tokens in a batch, T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from weft.ops.attention_call import Bounds

# Overheads, in units of the cost of one token: CALL for each call, _STEP for each token of the longest document,
# because many functions loop over the sequence in Python. Measured on a CPU (docs/benchmarks/hybrids.md), where half or
# double the values make no difference.
CALL, _STEP = 32, 1
_SHORTEST = 2  # the least batch length: some models treat a single token as a decoding step


@dataclass(frozen=True)
class DocumentBatch:
    """Neighbouring documents that run as one batch.

    documents: n. longest: L. tokens: their total, without padding. places: [tokens] index of each token in the
    flattened [n, L], or None if all documents have length L.
    """

    documents: int
    longest: int
    tokens: int
    places: Tensor | None

    def unfold(self, tokens: Tensor) -> Tensor:
        """[tokens, ...] -> [n, L, ...], with zeros after each document."""
        if self.places is not None:
            zeros = tokens.new_zeros(self.documents * self.longest, *tokens.shape[1:])
            tokens = zeros.index_copy(0, self.places, tokens)
        return tokens.unflatten(0, (self.documents, self.longest))

    def fold(self, batch: Tensor) -> Tensor:
        """[n, L, ...] -> [tokens, ...]."""
        flat = batch.flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)


def by_document(function: Callable[..., Any], bounds: Bounds, *args: Any, **kwargs: Any) -> Any:
    """The results of `function` for each document, concatenated to a row: a tensor [1, T, ...]. If `function` returns a
    tuple, the result is a tuple of that tensor and Nones.

    Arguments of shape [1, T, ...] are split into documents. Other arguments are passed unchanged. Raises RuntimeError
    if no argument has that shape."""
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
    """Splits arguments at the borders of groups. A tensor that occurs several times is split once."""

    def __init__(self, tokens: int, sizes: list[int]) -> None:
        self._tokens, self._sizes = tokens, sizes
        self._parts: dict[int, tuple[Tensor, ...]] = {}

    def group_arguments(self, value: Any, index: int, unfold: Callable[[Tensor], Tensor]) -> Any:
        """The arguments of group `index`: `value`, in which each tensor over tokens is replaced by the group's part."""
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
    """Whether `value` is a tensor of shape [1, tokens, ...], or a tuple that contains one."""
    if isinstance(value, tuple):
        return any(is_of_tokens(item, tokens) for item in value)
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, tokens)


def _device(tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and is_of_tokens(value, tokens):
            return value.device
    raise RuntimeError(
        f"a state mixer has no argument of shape [1, {tokens}, ...], so weft cannot split its row of {tokens} tokens "
        "into documents; please report the model"
    )


# ---------------------------------------------------------------- grouping documents into batches


def groups_of(bounds: Bounds, device: torch.device) -> list[DocumentBatch]:
    """The batches of a row, computed once per row."""
    if "groups" not in bounds.cache:
        ends = [0, *grouped(bounds.lengths)]
        lengths = [bounds.lengths[start:end] for start, end in pairwise(ends)]
        bounds.cache["groups"] = [batch_of(group_lengths, device) for group_lengths in lengths]
    return bounds.cache["groups"]


def grouped(lengths: tuple[int, ...]) -> list[int]:
    """The index of the document after each group's last document. lengths: of the row's documents.

    Dynamic programming finds the grouping of least cost. Neighbours of equal length are always in one group.
    """
    runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]
    best, cut = [0.0], [0]
    for end in range(1, len(runs) + 1):
        lowest_cost, first, longest, documents = float("inf"), 0, 0, 0
        for start in range(end - 1, -1, -1):
            longest, documents = max(longest, runs[start][0]), documents + runs[start][1]
            cost = CALL + (_STEP + documents) * longest
            if cost >= lowest_cost:  # the cost only grows with earlier documents
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
