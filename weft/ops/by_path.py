"""Applies a causal function of sequences to every path of the trees in a packed row (ops/segments.py), in two ways.

Unfolded: every path from a root to a leaf runs as a separate document. Paths that share a token compute equal results
for it, so the result of the first such path is used. The backward of the gather of inputs sums the gradients of paths.

Forked: a segment with several children runs once, and its children start from its final state. The function must accept
and return states.

T tokens of the row, U tokens of all paths together, n sequences of at most L tokens in a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.ops.attention_call import Bounds
from weft.ops.by_document import CALL, DocumentBatch, batch_of, grouped, is_of_tokens
from weft.ops.segments import Segments, on_device

State = TypeVar("State")
_SHORTEST_FORK = 2  # batches are padded to at least two tokens, and padding would change a final state


@dataclass(frozen=True)
class PathRun:
    """Consecutive segments of a path that are processed as one sequence (a run). parent: index of the run whose final
    state is this run's first state; -1 for none."""

    segments: tuple[int, ...]
    parent: int = -1


@dataclass(frozen=True)
class UnfoldedRow:
    """The paths of a row, from roots to leaves, as documents, the longest first.

    bounds: of these documents. tokens_U: index in the row of each of their tokens. first_T: for each token of the row,
    its first index among the U tokens.
    """

    bounds: Bounds
    tokens_U: Tensor
    first_T: Tensor

    def unfold(self, value: Any) -> Any:
        """`value`, in which each tensor [1, T, ...] is replaced by its tokens in paths, [1, U, ...]."""
        return _replaced(value, len(self.first_T), lambda tensor: tensor.index_select(1, self.tokens_U), {})

    def fold(self, output: Any) -> Any:
        """The row's tokens [1, T, ...] of an output [1, U, ...]. Of a tuple, only the first element is folded."""
        if isinstance(output, tuple):
            return (self.fold(output[0]), *output[1:])
        return output.index_select(1, self.first_T)


@dataclass(frozen=True)
class RunBatch:
    """Runs that one call computes. tokens: index of each token in the row. parents: for each run, (batch, index in the
    batch) of its parent; empty if the runs have no parents."""

    batch: DocumentBatch
    tokens: Tensor
    parents: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ForkedRow:
    """The batches of a row, parents first. first_T: for each token of the row, its first index among the tokens of all
    batches, without padding."""

    batches: list[RunBatch]
    first_T: Tensor


def unfolded_row(bounds: Bounds, device: torch.device) -> UnfoldedRow:
    """The unfolded row of these bounds, computed once per row."""
    if "unfolded" not in bounds.cache:
        assert bounds.segments is not None
        segments = bounds.segments
        runs = sorted(runs_of(segments, ()), key=lambda run: -_length(run, segments))
        lengths = tuple(_length(run, segments) for run in runs)
        row = UnfoldedRow(Bounds.packed(lengths, device), *_tokens_of(runs, segments, device))
        bounds.cache["unfolded"] = row
    result: UnfoldedRow = bounds.cache["unfolded"]
    return result


def forked_row(bounds: Bounds, device: torch.device) -> ForkedRow | None:
    """The forked row of these bounds, computed once per row. None if no fork would save time."""
    if "forked" not in bounds.cache:
        assert bounds.segments is not None
        forks = forks_of(bounds.segments)
        bounds.cache["forked"] = _forked_row(bounds.segments, forks, device) if forks else None
    result: ForkedRow | None = bounds.cache["forked"]
    return result


def by_forks(
    function: Callable[..., tuple[Any, State]],
    state_of: Callable[[Sequence[tuple[State, int]]], State],
    row: ForkedRow,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The results of `function` for every token of the row: a tensor [1, T, ...], or a tuple of that tensor and Nones.

    function: (first states of n sequences or None, *args, **kwargs) -> (output, final states of the sequences). The
    output is a tensor [n, L, ...], or a tuple of it and Nones. state_of: combines the states of sequences, given as
    (final states of a batch, index in the batch), into the states of a new batch. Arguments of shape [1, T, ...] are
    split into batches.
    """
    tokens, states, results, output = len(row.first_T), list[State](), list[Tensor](), None
    for run_batch in row.batches:
        tokens_of_batch, batch = run_batch.tokens, run_batch.batch

        def select(tensor: Tensor, tokens_of_batch: Tensor = tokens_of_batch, batch: DocumentBatch = batch) -> Tensor:
            return batch.unfold(tensor[0].index_select(0, tokens_of_batch))

        first_states = state_of([(states[n], index) for n, index in run_batch.parents]) if run_batch.parents else None
        positional, keywords = _replaced((args, kwargs), tokens, select, {})
        output, state = function(first_states, *positional, **keywords)
        states.append(state)
        results.append(batch.fold(output[0] if isinstance(output, tuple) else output))
    folded = torch.cat(results).index_select(0, row.first_T)[None]
    return (folded, *[None] * (len(output) - 1)) if isinstance(output, tuple) else folded


# ---------------------------------------------------------------- grouping tokens into runs and batches


def runs_of(segments: Segments, forks: Collection[int]) -> list[PathRun]:
    """The runs that end at leaves and forks, parents first. forks: segments whose children start from their final
    state."""
    inner, numbers, runs = set(segments.parents), dict[int, int](), list[PathRun]()
    for last in range(len(segments.lengths)):
        if last in inner and last not in forks:
            continue
        chain = [last]
        while (parent := segments.parents[chain[-1]]) >= 0 and parent not in forks:
            chain.append(parent)
        numbers[last] = len(runs)
        runs.append(PathRun(tuple(reversed(chain)), numbers.get(parent, -1)))
    return runs


def forks_of(segments: Segments) -> frozenset[int]:
    """The segments after which a fork saves more than its additional call costs."""
    children, chains, forks = defaultdict[int, int](int), list[int](), set[int]()
    for parent in segments.parents:
        children[parent] += 1
    for segment, (length, parent) in enumerate(zip(segments.lengths, segments.parents, strict=True)):
        chains.append(length + (chains[parent] if parent >= 0 and parent not in forks else 0))
        saved = (children.get(segment, 0) - 1) * chains[segment]
        if saved >= 2 * CALL and chains[segment] >= _SHORTEST_FORK:
            forks.add(segment)
    return frozenset(forks)


def _forked_row(segments: Segments, forks: frozenset[int], device: torch.device) -> ForkedRow:
    runs = runs_of(segments, forks)
    depths = list[int]()
    for run in runs:
        depths.append(0 if run.parent < 0 else depths[run.parent] + 1)
    batches, order, index_of = list[RunBatch](), list[PathRun](), dict[int, tuple[int, int]]()
    for depth in range(max(depths) + 1):
        at_depth = [number for number, its_depth in enumerate(depths) if its_depth == depth]
        for numbers in _batches(at_depth, runs, segments, forks):
            index_of |= {number: (len(batches), index) for index, number in enumerate(numbers)}
            chosen = [runs[number] for number in numbers]
            lengths = tuple(_length(run, segments) for run in chosen)
            parents = tuple(index_of[run.parent] for run in chosen) if depth else ()
            batches.append(RunBatch(batch_of(lengths, device), _tokens_of(chosen, segments, device)[0], parents))
            order += chosen
    return ForkedRow(batches, _tokens_of(order, segments, device)[1])


def _batches(
    numbers: Sequence[int], runs: Sequence[PathRun], segments: Segments, forks: Collection[int]
) -> list[list[int]]:
    """The runs of each batch. Runs that end at forks must have equal lengths, because padding would change their final
    states."""
    at_forks, result = defaultdict[int, list[int]](list), list[list[int]]()
    leaves = []
    for number in numbers:
        if runs[number].segments[-1] in forks:
            at_forks[_length(runs[number], segments)].append(number)
        else:
            leaves.append(number)
    leaves.sort(key=lambda number: -_length(runs[number], segments))
    ends = [0, *grouped(tuple(_length(runs[number], segments) for number in leaves))]
    result += at_forks.values()
    result += [leaves[start:end] for start, end in pairwise(ends)]
    return result


def _length(run: PathRun, segments: Segments) -> int:
    return sum(segments.lengths[segment] for segment in run.segments)


def _tokens_of(runs: Sequence[PathRun], segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """([tokens of all runs] index of each token in the row, [T] first index of each token of the row among these)."""
    tokens = segments.tokens_of([segment for run in runs for segment in run.segments])
    first_T = torch.from_numpy(np.unique(tokens.numpy(), return_index=True)[1])
    return on_device(tokens, device), on_device(first_T, device)


def _replaced(value: Any, tokens: int, change: Callable[[Tensor], Tensor], changed: dict[int, Tensor]) -> Any:
    """`value`, in which every tensor [1, tokens, ...] is replaced by change(tensor). `changed` caches the results."""
    if isinstance(value, dict):
        return {name: _replaced(item, tokens, change, changed) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_replaced(item, tokens, change, changed) for item in value)
    if not is_of_tokens(value, tokens):
        return value
    if id(value) not in changed:
        changed[id(value)] = change(value)
    return changed[id(value)]
