"""A causal function of a packed row, applied to each of its documents: weft/ops/by_document.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.ops.attention_call import Bounds
from weft.ops.by_document import by_document, grouped, groups_of

ROWS = [(5,), (1, 1), (36, 1, 24, 35), (9, 9, 9), (40, 39, 7, 7, 6, 1, 1, 1, 12), (600, 590, 30, 29, 28, 2, 1, 100)]


def sums(hidden: Tensor, position_ids: Tensor, extra: Any = None) -> tuple[Tensor, None]:
    """Causal, of tensors in several shapes; what it is given beside them stays."""
    assert hidden.shape[:2] == position_ids.shape and hidden.shape[1] > 1 and extra[0] == "as it is"
    return (hidden * extra[1]).cumsum(1) * (position_ids[..., None] + 1), None


@pytest.mark.parametrize("lengths", ROWS)
def test_each_document_has_what_it_has_alone(lengths: tuple[int, ...]) -> None:
    tokens = sum(lengths)
    inputs = [torch.randn(1, tokens, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    out, none = by_document(sums, Bounds(lengths), inputs[0], position_ids=positions, extra=("as it is", inputs[1]))
    assert none is None and out.shape == (1, tokens, 3)
    parts = [x.split(lengths, dim=1) for x in (*inputs, positions)]
    separate = torch.cat([(a * b).cumsum(1) * (p[..., None] + 1) for a, b, p in zip(*parts, strict=True)], 1)
    torch.testing.assert_close(out, separate, rtol=0, atol=1e-12)
    upstream = torch.randn_like(out)
    gradients, expected = (torch.autograd.grad(result, inputs, upstream) for result in (out, separate))
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-9)


def test_what_of_a_neighbour_is_no_number_stays_there() -> None:
    """Forward and backward, also where both are in one group."""
    hidden = torch.randn(1, 12, 2, requires_grad=True)
    spoilt = hidden + torch.where(torch.arange(12) < 6, float("nan"), 0.0)[:, None]
    bounds = Bounds((6, 5, 1))
    assert len(groups_of(bounds, hidden.device)) == 1
    out = by_document(lambda x: x.cumsum(1), bounds, spoilt)
    out[0, 6:].sum().backward()
    assert out[0, 6:].isfinite().all() and hidden.grad is not None and hidden.grad[0, 6:].isfinite().all()


def cost(lengths: tuple[int, ...], ends: list[int]) -> float:
    starts = [0, *ends[:-1]]
    return sum(32 + (1 + e - s) * max(lengths[s:e]) for s, e in zip(starts, ends, strict=True))


def test_groups_are_the_cheapest() -> None:
    """Against all ways to cut rows of nine documents."""
    rng = random.Random(0)
    for _ in range(30):
        lengths = tuple(sorted((int(rng.lognormvariate(4.5, 1.3)) + 1 for _ in range(9)), reverse=True))
        if rng.random() < 0.3:
            lengths = tuple(rng.sample(lengths, 9))
        ways = [[*(i for i in range(1, 9) if bits >> i & 1), 9] for bits in range(0, 512, 2)]
        assert cost(lengths, grouped(lengths)) == min(cost(lengths, way) for way in ways)


def test_padding_is_little_where_lengths_are_those_of_texts() -> None:
    rng = random.Random(1)
    lengths = tuple(sorted((int(rng.lognormvariate(5.5, 1.0)) + 1 for _ in range(60)), reverse=True))
    groups = groups_of(Bounds(lengths), torch.device("cpu"))
    assert sum(group.tokens for group in groups) == sum(lengths)
    assert sum(group.documents * group.longest for group in groups) < 1.35 * sum(lengths)
    assert len(groups) < 15


def test_nothing_of_the_row_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"a state mixer has no argument of shape \[1, 9, ...\]"):
        by_document(lambda x: x, Bounds((5, 4)), torch.randn(1, 5, 2))
