"""A causal function of the paths of a row's trees, unfolded and by forks of states: weft/ops/by_path.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.ops.attention_call import Bounds
from weft.ops.by_document import by_document
from weft.ops.by_path import by_forks, forked_row, forks_of, runs_of, unfolded_row
from weft.ops.segments import ROOT, Segments

CPU = torch.device("cpu")
# One prefix with siblings; depth 3, two forks of one length at the same depth, a fork of one token, plain documents and
# padding.
FORESTS = [
    Segments((90, 7, 7, 3, 1), (ROOT, 0, 0, 0, 0), (1, 2, 3, 4, 0)),
    Segments(
        (70, 70, 9, 13, 70, 2, 8, 1, 5, 6, 70, 4, 3, 30, 2),
        (ROOT, 0, 1, 1, 0, 4, 4, ROOT, 7, 7, ROOT, 10, 10, ROOT, ROOT),
        (2, 3, 5, 6, 8, 9, 11, 12, 13, 0, 1),
    ),
]


def sums(before: Tensor | None, hidden: Tensor, extra: Any) -> tuple[tuple[Tensor, None], Tensor]:
    """Sums along sequences, which begin with the states before them."""
    assert extra[0] == "as it is" and hidden.shape[1] > 1
    result = (hidden * extra[1]).cumsum(1)
    result = result if before is None else result + before[:, None]
    return (result, None), result[:, -1]


def joined(chosen: Sequence[tuple[Tensor, int]]) -> Tensor:
    return torch.stack([states[index] for states, index in chosen])


@pytest.mark.parametrize("segments", FORESTS)
@pytest.mark.parametrize("forked", [False, True])
def test_each_token_has_what_it_has_in_its_documents(segments: Segments, forked: bool) -> None:
    tokens = sum(segments.lengths)
    inputs = [torch.randn(1, tokens, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    bounds, extra = Bounds(segments.lengths, segments=segments), ("as it is", inputs[1])
    if forked:
        row = forked_row(bounds, CPU)
        assert row is not None
        out, none = by_forks(sums, joined, row, inputs[0], extra=extra)
    else:
        unfolded = unfolded_row(bounds, CPU)
        (hidden,), keywords = unfolded.unfold(((inputs[0],), {"extra": extra}))
        out, none = unfolded.fold(
            by_document(lambda x, extra: sums(None, x, extra)[0], unfolded.bounds, hidden, **keywords)
        )
    assert none is None and out.shape == (1, tokens, 3)
    product, separate = (inputs[0] * inputs[1])[0], torch.empty(tokens, 3, dtype=torch.float64)
    for segment in range(len(segments.lengths)):
        places = segments.path_tokens(segment)
        separate = separate.index_put((places,), product[places].cumsum(0))
    torch.testing.assert_close(out[0], separate, rtol=0, atol=1e-11)
    upstream = torch.randn_like(separate)
    gradients, references = (torch.autograd.grad(result, inputs, upstream) for result in (out[0], separate))
    for gradient, expected in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-9)


def test_forks_are_where_they_save_tokens() -> None:
    assert forks_of(FORESTS[0]) == {0}
    assert forks_of(FORESTS[1]) == {0, 1, 4, 10}  # one token before the siblings at 7 is not worth a call
    runs = runs_of(FORESTS[1], {0, 1, 4, 10})
    assert [run.segments for run in runs if run.parent == ROOT] == [(0,), (7, 8), (7, 9), (10,), (13,), (14,)]
    assert forked_row(Bounds((3, 4), segments=Segments((3, 4), (ROOT, ROOT), (0, 1))), CPU) is None


def test_random_forests() -> None:
    rng = random.Random(0)
    for _ in range(50):
        count = rng.randrange(2, 14)
        lengths = tuple(rng.choice([1, 2, 33, 80, 80]) for _ in range(count))
        parents = [ROOT]
        for index in range(1, count):  # depth first: the parent is the segment before, or one of its ancestors
            path, node = [index - 1], index - 1
            while (node := parents[node]) != ROOT:
                path.append(node)
            parents.append(rng.choice([*path, ROOT]))
        segments = Segments(lengths, tuple(parents), tuple(range(count)))
        hidden, bounds = torch.randn(1, sum(lengths), 2, dtype=torch.float64), Bounds(lengths, segments=segments)
        expected = torch.empty(sum(lengths), 2, dtype=torch.float64)
        for segment in range(count):
            expected[segments.path_tokens(segment)] = hidden[0, segments.path_tokens(segment)].cumsum(0)
        row, extra = forked_row(bounds, CPU), ("as it is", 1.0)
        if row is not None:
            torch.testing.assert_close(by_forks(sums, joined, row, hidden, extra=extra)[0][0], expected)
        unfolded = unfolded_row(bounds, CPU)
        out = by_document(lambda x: x.cumsum(1), unfolded.bounds, unfolded.unfold(hidden))
        torch.testing.assert_close(unfolded.fold(out)[0], expected)
