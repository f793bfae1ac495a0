"""Parts of mixers that carry state: what ranks compute of some heads adds up to what the whole mixer gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.zoo import tiny_config
from weft.engine.selfcheck.harness import Groups, in_threads
from weft.models import hf
from weft.models.families import carries_state
from weft.models.mixer_shards import MixerShard, MixerSpec, _joined, find_mixer_spec, view
from weft.models.segments import DimSegment, TPSpec
from weft.models.state_mixers import PerDocumentMixer
from weft.ops.attention_call import Bounds, ContextRow
from weft.ops.communicator import CPAxis
from weft.ops.context import gather_documents, sum_to_tokens

# Layers with biases, which every rank would add, among them; groups of B and C, and norms, on several ranks.
MIXERS: list[tuple[str, dict[str, Any], int]] = [
    ("bamba", {"mamba_proj_bias": True}, 4), ("mamba", {"use_bias": True}, 2), ("zamba2", {"add_bias_linear": True}, 2),
    ("mamba2", {"use_bias": True}, 4), ("lfm2", {"conv_bias": True}, 2), ("falcon_h1", {"mamba_rms_norm": True}, 2),
    ("falcon_h1", {"mamba_n_groups": 2, "mamba_norm_before_gate": True, "mamba_rms_norm": True}, 4),
    ("qwen3_next", {}, 2), ("qwen3_5_text", {}, 4), ("kimi_linear", {}, 4), ("olmo_hybrid", {}, 2),
]  # fmt: skip


def mixer_of(family: str, changes: dict[str, Any]) -> nn.Module:
    """One mixer of random weights, none of which is 0 or 1."""
    model = hf.build_random(tiny_config(family, **changes), dtype=torch.float32, attention="eager", seed=0)
    mixer = next(module for module in model.modules() if carries_state(module))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return mixer.train()


def run(mixer: nn.Module, part: nn.Module, x: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(output, gradients of the whole mixer's parameters)."""
    out: Tensor = type(part).forward(part, x)
    (out * weights).sum().backward()
    gradients = {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}
    return out.detach(), gradients


@pytest.mark.parametrize(("family", "changes", "ranks"), MIXERS, ids=[f"{family} {n}" for family, _, n in MIXERS])
def test_parts_add_up(family: str, changes: dict[str, Any], ranks: int) -> None:
    mixer = mixer_of(family, changes)
    x, weights = torch.randn(2, 2, 40, 64, generator=torch.Generator().manual_seed(2))
    names = set(dict(mixer.named_parameters()))

    def on_rank(rank: int, groups: Groups) -> tuple[Tensor, dict[str, Tensor]]:
        local = copy.deepcopy(mixer)
        style = find_mixer_spec(local)
        assert style is not None and style.divides(ranks)

        def neighbours(size: int) -> Any:
            first = rank // size * size
            return groups(tuple(range(first, first + size)), rank)

        return run(local, view(local, MixerShard(style, rank, ranks, neighbours, stored=False)), x, weights)

    parts = in_threads(ranks, on_rank)
    out, gradients = run(mixer, mixer, x, weights)
    assert names == set(dict(mixer.named_parameters()))  # a view leaves its mixer as it was
    total = torch.stack([local for local, _ in parts]).sum(0)  # some elements are small sums of what cancels
    assert float((total - out).abs().max()) < 1e-4 * float(out.abs().max())
    for name, gradient in gradients.items():
        total = torch.stack([local[name] for _, local in parts if name in local]).sum(0)
        assert float((total - gradient).abs().max()) < 1e-4 * float(gradient.abs().max()), name


def test_what_no_rule_explains_is_whole() -> None:
    """A convolution of other channels than the projection's parts."""
    mixer: Any = mixer_of("bamba", {})
    assert find_mixer_spec(mixer) is not None
    mixer.conv1d.weight = nn.Parameter(mixer.conv1d.weight[:-1].detach())
    assert find_mixer_spec(mixer) is None
    assert find_mixer_spec(nn.Linear(2, 2)) is None


def test_groups_of_norms_have_to_divide_too() -> None:
    heads = DimSegment(6, 4, heads=True)
    specs = {"out_proj.weight": TPSpec(1, (heads,))}
    assert MixerSpec(specs, "out_proj").divides(2)
    assert not MixerSpec(specs, "out_proj", norms={"norm": DimSegment(3, 8, heads=True, repeat=True)}).divides(2)


SPANS = (((0, 0, 3), (1, 0, 2)), ((0, 3, 5),), ((0, 5, 9), (1, 2, 6)), ())  # of two documents, on four ranks


def test_tokens_come_together_and_go_back() -> None:
    """Token t of document d is 10 d + t; rank r adds r to its output."""

    def on_rank(rank: int, groups: Groups) -> tuple[list[float], list[float], tuple[int, ...]]:
        ranks = groups((0, 1, 2, 3), rank)
        context = ContextRow(CPAxis(rank, 1, 4, ranks, None, ranks), SPANS, ())
        local = torch.tensor([10.0 * d + t for d, start, stop in SPANS[rank] for t in range(start, stop)])
        gathered = gather_documents(local[None, :, None], context)
        back = sum_to_tokens(gathered + rank, context)
        return (
            gathered.flatten().tolist(),
            (back.flatten() - 4 * local).tolist(),
            context.shared_bounds(local.device).lengths,
        )

    for rank, (gathered, added, lengths) in enumerate(in_threads(4, on_rank)):
        assert gathered == [*map(float, range(9)), *map(float, range(10, 16))]
        assert added == [6.0] * sum(stop - start for _, start, stop in SPANS[rank])
        assert lengths == (9, 6)


def test_neighbours_are_taken_together() -> None:
    assert _joined([(0, 2), (2, 3), (7, 1)]) == [(0, 5), (7, 1)]


@pytest.mark.parametrize("cache", ["cache_params", "past_key_values"])
def test_a_packed_row_is_not_continued_from_a_cache(cache: str) -> None:
    boundary = PerDocumentMixer(nn.Identity())
    boundary.bounds = Bounds((2, 1))
    with pytest.raises(RuntimeError, match="cannot be continued from a cache"):
        boundary.forward(torch.zeros(1, 3, 4), **{cache: object()})
