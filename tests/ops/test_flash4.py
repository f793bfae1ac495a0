"""ops/flash4.py with a stand-in for the package: its two functions on a CPU, in fp32, with the arguments that 4.0.0b36
has. tests/cuda/test_kernels.py runs the package itself."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.ops.test_attention import bounds_of, call_of
from tests.support.zoo import tiny_config
from weft.config.recompute import FULL, SELECTIVE
from weft.models import hf
from weft.ops import attention, recompute
from weft.ops.attention_call import Call, Traits
from weft.ops.per_document import per_document

CUDA = torch.device("cuda")


def scores_of(query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor:
    """[heads, tokens, tokens of keys], -inf where a query does not see a key."""
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * options["softmax_scale"]
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool)
    queries, keys = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    assert options["max_seqlen_q"] == max(b - a for a, b in pairwise(queries))
    assert options["max_seqlen_k"] == max(b - a for a, b in pairwise(keys))
    for document in range(len(queries) - 1):
        rows, columns = slice(*queries[document : document + 2]), slice(*keys[document : document + 2])
        place = torch.arange(columns.stop - columns.start)
        own = place[place.numel() - (rows.stop - rows.start) :, None]
        part = place > own if options["causal"] else torch.zeros(own.numel(), place.numel(), dtype=torch.bool)
        if options["window_size_left"] is not None:
            part |= place < own - options["window_size_left"]
        hidden[rows, columns] = part
    return scores.masked_fill(hidden, -math.inf)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the package's functions, as they are called."""
    names: list[str] = []

    def forward(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Any) -> tuple[Any, ...]:
        names.append("forward")
        assert return_lse and not torch.is_grad_enabled()
        scores = scores_of(query, key, options)
        values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1), None, None, None

    def backward(
        query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad: Tensor, logsumexp: Tensor, **options: Any
    ) -> tuple[Tensor, ...]:
        names.append("backward")
        groups = query.shape[1] // key.shape[1]
        weights = (scores_of(query, key, options) - logsumexp[..., None]).exp()
        grad_weights = torch.einsum("qhd,khd->hqk", grad, value.repeat_interleave(groups, 1))
        grad_scores = weights * (grad_weights - (grad * out).sum(-1).T[..., None]) * options["softmax_scale"]
        wide_key = torch.einsum("hqk,qhd->khd", grad_scores, query)
        wide_value = torch.einsum("hqk,qhd->khd", weights, grad)
        grad_query = torch.einsum("hqk,khd->qhd", grad_scores, key.repeat_interleave(groups, 1))
        return grad_query, *(x.unflatten(1, (-1, groups)).sum(2) for x in (wide_key, wide_value))

    module = ModuleType("flash_attn.cute.interface")
    module.__dict__.update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    return names


CASES = [
    ((5, 1, 9), (16, 16), None),
    ((5, 1, 9), (16, 16), 3),
    ((4, 7), (12, 20), None),  # padded to 24
    ((6,), (8, 8), 100),
]


def outputs_and_gradients(call: Call, name: str) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE)]
    run = per_document if name == "per_document" else attention.flash4
    out = run(replace(call, query_BHTD=inputs[0], key_BKTD=inputs[1], value_BKTE=inputs[2]))
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize(("lengths", "widths", "window"), CASES)
def test_it_is_per_document(
    lengths: tuple[int, ...], widths: tuple[int, int], window: int | None, calls: list[str]
) -> None:
    call = call_of(bounds_of(lengths), widths=widths, window=window)
    pairs = zip(outputs_and_gradients(call, "flash4"), outputs_and_gradients(call, "per_document"), strict=True)
    for result, expected in pairs:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize(("policy", "forwards"), [(FULL, 2), (SELECTIVE, 1)])
def test_selective_recomputation_runs_it_once(policy: Any, forwards: int, calls: list[str]) -> None:
    call = call_of(bounds_of((5, 4)))
    query = call.query_BHTD.detach().clone().requires_grad_()

    def layer(query: Tensor) -> Tensor:
        return attention.flash4(replace(call, query_BHTD=query * 2)).square()

    def context() -> Any:
        return recompute.contexts(policy)

    out = checkpoint(layer, query, use_reentrant=False, context_fn=context)
    (gradient,) = torch.autograd.grad(out.sum(), query)
    (expected,) = torch.autograd.grad(layer(query).sum(), query)
    assert calls.count("forward") == forwards + 1
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("installed", "capability", "traits", "kernel"),
    [
        ("4.0.0b36", (9, 0), Traits(128, 128), "fa4"),
        ("4.0.0b36", (10, 0), Traits(64, 64, grouped=True, window=True), "fa4"),
        ("", (9, 0), Traits(128, 128), "varlen"),
        ("4.0.0b36", (8, 0), Traits(128, 128), "varlen"),
        ("4.0.0b36", (9, 0), Traits(192, 128), "varlen"),
        ("4.0.0b36", (9, 0), Traits(128, 128, sinks=True), "flex"),
    ],
)
def test_auto_takes_it_where_it_is_installed(
    installed: str, capability: tuple[int, int], traits: Traits, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "installed_version", lambda name: installed)
    monkeypatch.setattr(attention, "device_capability", lambda device: capability)
    assert attention.choose("auto", CUDA, torch.bfloat16, traits) == kernel


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "installed_version", lambda name: "")
    monkeypatch.setattr(attention, "device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match="fa4 does not support .* Install flash-attn-4, or set model.attention=auto"):
        attention.choose("fa4", CUDA, torch.bfloat16, Traits(128, 128))
    with pytest.raises(ValueError, match="fa4 does not support .*wide. Set model.attention=auto"):  # it would not help
        attention.choose("fa4", CUDA, torch.float32, Traits(128, 128))


def test_queries_that_are_the_last_of_their_keys(calls: list[str]) -> None:
    """Parts of a document that another rank, or an earlier segment, begins."""
    whole = call_of(bounds_of((6, 5)))
    query = torch.cat([whole.query_BHTD[:, :, 2:6], whole.query_BHTD[:, :, 8:11]], 2)
    cu_keys = torch.tensor([0, 6, 11], dtype=torch.int32)
    bounds = replace(bounds_of((4, 3)), key_lengths=(6, 5), cu_keys=cu_keys)
    call = replace(whole, query_BHTD=query, bounds=bounds)
    torch.testing.assert_close(attention.flash4(call), per_document(call), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", attention.KERNELS)
def test_transformers_knows_every_kernel_by_its_name(name: str) -> None:
    """It takes a name with `flash` in it for a package that it has to import."""
    hf.register_kernels()
    hf.build_meta(tiny_config("qwen3"), dtype=torch.float32, attention=f"weft_{name}")
