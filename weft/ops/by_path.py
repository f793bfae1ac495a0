"""A causal function of sequences, applied to every path of the trees in a packed row (ops/segments.py).

Unfolded, every path from a root to a leaf is a document of its own, and a token has the result of the first path that
holds it. Paths that share a token agree on its result, so gradients add up in the gather of the paths' inputs.

Forked, a segment with several children runs once, and its children begin with the state at its end. That needs a
function that returns states and takes them.

T tokens of the row, U of all paths together, n sequences of at most L tokens in a batch.
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
_SHORTEST_FORK = 2  # batches are padded to two tokens, and padding changes states


@dataclass(frozen=True)
class PathRun:
    """Segments of a path, one after the other, that one sequence computes. parent: index of the run with whose final
    state it begins; -1 for none."""

    segments: tuple[int, ...]
    parent: int = -1


@dataclass(frozen=True)
class UnfoldedRow:
    """The paths of a row from roots to leaves as documents, the longest first. bounds: of these documents. tokens_U:
    the index of each of their tokens in the row. first_T: for each token of the row, its index in the first path that
    holds it."""

    bounds: Bounds
    tokens_U: Tensor
    first_T: Tensor

    def unfold(self, value: Any) -> Any:
        """`value` with [1, U, ...] in place of each tensor [1, T, ...] in it."""
        return _replaced(value, len(self.first_T), lambda tensor: tensor.index_select(1, self.tokens_U), {})

    def fold(self, output: Any) -> Any:
        """The tokens of the row, [1, T, ...], of an output [1, U, ...], or of the first of a tuple."""
        if isinstance(output, tuple):
            return (self.fold(output[0]), *output[1:])
        return output.index_select(1, self.first_T)


@dataclass(frozen=True)
class RunBatch:
    """Runs that one call computes. tokens: index of each token in the row. before: for each run, the (batch, index in
    it) of its parent; empty if the runs have none."""

    batch: DocumentBatch
    tokens: Tensor
    before: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ForkedRow:
    """The batches of a row, parents first. first_T: for each token of the row, its index in the first batch that holds
    it, counted over all batches' tokens without padding."""

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
    """The forked row of these bounds, computed once per row; None if no fork would save anything."""
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
    """The results of `function` for every token of the row: a tensor [1, T, ...], or a tuple of one and Nones.

    function: (states of n sequences or None, *args, **kwargs) -> (output [n, L, ...] or a tuple of it and Nones, final
    states). state_of: the states of sequences, each an index in such states. Tensors [1, T, ...] of the arguments are
    cut into batches.
    """
    tokens, states, results, output = len(row.first_T), list[State](), list[Tensor](), None
    for run_batch in row.batches:
        tokens_of_batch, batch = run_batch.tokens, run_batch.batch

        def part(tensor: Tensor, tokens_of_batch: Tensor = tokens_of_batch, batch: DocumentBatch = batch) -> Tensor:
            return batch.unfold(tensor[0].index_select(0, tokens_of_batch))

        before = state_of([(states[n], index) for n, index in run_batch.before]) if run_batch.before else None
        positional, keywords = _replaced((args, kwargs), tokens, part, {})
        output, state = function(before, *positional, **keywords)
        states.append(state)
        results.append(batch.fold(output[0] if isinstance(output, tuple) else output))
    folded = torch.cat(results).index_select(0, row.first_T)[None]
    return (folded, *[None] * (len(output) - 1)) if isinstance(output, tuple) else folded


# ---------------------------------------------------------------- which tokens run together


def runs_of(segments: Segments, forks: Collection[int]) -> list[PathRun]:
    """The runs of all leaves and forks, parents first. forks: segments whose final state starts their children."""
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
    """Segments at whose end a fork saves more than the additional call costs."""
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
            before = tuple(index_of[run.parent] for run in chosen) if depth else ()
            batches.append(RunBatch(batch_of(lengths, device), _tokens_of(chosen, segments, device)[0], before))
            order += chosen
    return ForkedRow(batches, _tokens_of(order, segments, device)[1])


def _batches(
    numbers: Sequence[int], runs: Sequence[PathRun], segments: Segments, forks: Collection[int]
) -> list[list[int]]:
    """Runs that are computed together: at forks those of equal length, because padding would change their states."""
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
    """([tokens of all runs] index of each in the row; [T] index of the row's tokens among them, the first of each)."""
    tokens = segments.tokens_of([segment for run in runs for segment in run.segments])
    first_T = torch.from_numpy(np.unique(tokens.numpy(), return_index=True)[1])
    return on_device(tokens, device), on_device(first_T, device)


def _replaced(value: Any, tokens: int, change: Callable[[Tensor], Tensor], changed: dict[int, Tensor]) -> Any:
    """`value` with every tensor [1, tokens, ...] in it changed, each only once."""
    if isinstance(value, dict):
        return {name: _replaced(item, tokens, change, changed) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_replaced(item, tokens, change, changed) for item in value)
    if not is_of_tokens(value, tokens):
        return value
    if id(value) not in changed:
        changed[id(value)] = change(value)
    return changed[id(value)]
