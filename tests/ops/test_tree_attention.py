"""Attention over trees of segments by log-sum-exp: weft/ops/tree_attention.py, beside attention of each path alone."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.attention_call import Bounds, Call
from weft.ops.segments import ROOT, Segments
from weft.ops.tree_attention import attend_trees


def forest(seed: int) -> Segments:
    """A random forest of up to 12 segments, neighbours of one length among them, with padding behind."""
    rng = random.Random(seed)
    lengths, parents = [rng.choice([1, 2, 5, 9]) for _ in range(rng.randrange(1, 12))], [ROOT]
    for index in range(1, len(lengths)):
        path, node = [index - 1, ROOT], index - 1
        while (node := parents[node]) != ROOT:
            path.append(node)
        parents.append(rng.choice(path))
    return Segments((*lengths, 3), (*parents, ROOT), tuple(range(len(lengths))))


def by_paths(call: Call, segments: Segments) -> Tensor:
    """Each segment's queries over all of its path, by torch."""
    parts = []
    for segment, length in enumerate(segments.lengths):
        places = segments.path_tokens(segment)
        q, k, v = (x[:, :, places] for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scaling)[:, :, -length:])
    return torch.cat(parts, 2)


@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (6, 2)])
def test_each_segment_sees_its_path_and_itself(heads: int, keys: int) -> None:
    for seed in range(25):
        segments = forest(seed)
        tokens = sum(segments.lengths)
        torch.manual_seed(seed)
        tensors = [torch.randn(1, n, tokens, 8, dtype=torch.float64, requires_grad=True) for n in (heads, keys, keys)]
        bounds = Bounds(segments.lengths, segments=segments)
        call = Call(*tensors, bounds, scaling=0.3, window=None, softcap=None, sinks_H=None)
        out, expected = attend_trees(call), by_paths(call, segments)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        upstream = torch.randn_like(out)
        for gradient, reference in zip(
            *(torch.autograd.grad(o, tensors, upstream) for o in (out, expected)), strict=True
        ):
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-11)
