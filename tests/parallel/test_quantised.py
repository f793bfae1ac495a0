"""Quantised bases: adapters train as over the same rounded base in one process, and bytes do not depend on the mesh."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.support.cases import describe, open_engine, parity, saved_model, world_of
from tests.support.pool import run
from weft.errors import UserError
from weft.ops import nf4
from weft.parallel import quantise
from weft.verify.peft_reference import nf4_and_back, rounded_base
from weft.verify.plants import planted

EXPERTS = ("all-linear", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Widths of which tp takes halves in whole blocks of 64.
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
WIDE_EXPERTS: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}


def base_in_nf4(**changes: Any) -> dict[str, Any]:
    return base_in("nf4", **changes)


def base_in(form: str, **changes: Any) -> dict[str, Any]:
    return {"lora": {"rank": 4, "base": form, **changes}}


@pytest.mark.covers("lora.base")
@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    [
        ("llama", "1", base_in_nf4()),
        pytest.param("llama", "2x2", base_in_nf4(), marks=pytest.mark.table),
        ("llama", "tp2", base_in_nf4()),
        ("llama", "pp2z", base_in_nf4(modules_to_save=("layers.1.mlp.up_proj",))),
        pytest.param("llama", "cp2u2", {**base_in_nf4(), "model": {"recompute": "selective"}}, marks=pytest.mark.table),
        ("qwen3_moe", "ep2", base_in_nf4(targets=EXPERTS)),
        pytest.param("qwen3_moe", "ep2xtp2", base_in_nf4(targets=EXPERTS), marks=pytest.mark.table),
        ("deepseek_v3", "2", {**base_in_nf4(), "model": {"recompute": "full"}}),
        ("llama", "tp2", base_in("int8")),
        ("llama", "3", base_in("fp8")),
        pytest.param("llama", "tp2", base_in("fp8"), marks=pytest.mark.table),
        pytest.param("llama", "pp2", base_in("int8"), marks=pytest.mark.table),
        pytest.param("qwen3_moe", "ep2", base_in("fp8", targets=EXPERTS), marks=pytest.mark.table),
        pytest.param("qwen3_moe", "ep2xtp2", base_in("int8", targets=EXPERTS), marks=pytest.mark.table),
        pytest.param("qwen3_5_text", "2", base_in_nf4(), marks=pytest.mark.table),
    ],
)
def test_parity(family: str, mesh: str, sections: dict[str, Any]) -> None:
    """With peft over a base that other code has rounded. The base is compared bit for bit."""
    changes = {"llama": WIDE, "qwen3_moe": WIDE_EXPERTS, "deepseek_v3": {"moe_intermediate_size": 128}}.get(family, {})
    verdict = run(world_of(mesh), parity, saved_model(family, **changes), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def bytes_of_base(path: str, mesh: str, form: str = "nf4") -> dict[str, Any]:
    """Name -> the weight that its bytes say, whole; the memory of a rank; the most that was read at once."""
    read: list[int] = []
    fill_box = quantise.fill_box

    def watched(local: torch.Tensor, *arguments: Any) -> None:
        read.append(local.numel())
        fill_box(local, *arguments)

    # Slabs of a few rows, which end inside of blocks of 128.
    with mock.patch.object(quantise, "fill_box", watched), mock.patch.object(quantise, "_SLAB", 5000):
        engine = open_engine(path, mesh, **base_in(form))
    stored = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in (
            (n, p.to_local() if hasattr(p, "to_local") else p) for n, p in engine.module.named_parameters()
        )
        if name.endswith(("_codes", "_scales"))
    )
    stand_ins = [weight for weight in engine.module.quantised.values() if weight is not None]
    shared = sum(part.nbytes for weight in stand_ins for part in weight.shared)
    weights = {name: tensor for name, tensor in engine.tensors() if name in engine.module.quantised_shapes}
    return {"weights": weights, "stored": stored + shared, "read": max(read, default=0)}


def test_bytes_do_not_depend_on_the_mesh() -> None:
    """They are those of one process, and take 0.53 bytes an element; a rank reads its rows of one weight at a time."""
    path = saved_model("llama", **WIDE)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    for mesh in ("1", "3", "tp2"):
        for facts in run(world_of(mesh), bytes_of_base, path, mesh):
            elements = sum(weight.numel() for weight in facts["weights"].values())
            assert facts["stored"] <= 0.53 * elements / world_of(mesh) * (
                1.2 if mesh == "3" else 1
            )  # rows do not divide
            largest = max(weight.numel() for weight in facts["weights"].values())
            assert facts["read"] <= largest / world_of(mesh) * (1.2 if mesh == "3" else 1)
            for name, weight in facts["weights"].items():
                assert torch.equal(weight, nf4_and_back(plain.get_parameter(name).detach())), name


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_blocks_that_shards_cut_have_the_scales_of_one_process(form: str) -> None:
    """tp cuts the 320 inputs of down_proj, and FSDP its 192 outputs, inside of blocks of 128."""
    path = saved_model("llama", hidden_size=192, intermediate_size=320)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    for mesh in ("1", "3", "tp2"):
        for facts in run(world_of(mesh), bytes_of_base, path, mesh, form):
            for name, weight in facts["weights"].items():
                expected = rounded_base(plain.get_parameter(name).detach(), form, (128, 128))
                assert torch.equal(weight, expected), (mesh, name)
            elements = sum(weight.numel() for weight in facts["weights"].values())
            assert facts["stored"] <= 1.03 * elements / world_of(mesh) + 0.02 * elements


def chosen(path: str, plant: str | None) -> set[str]:
    with planted(plant):
        return set(open_engine(path, "1", **base_in_nf4()).module.quantised_shapes)


def layers_are_chosen(plant: str | None) -> bool:
    """Linear layers of the decoder and experts, but no router and no gate of a shared expert."""
    path = saved_model("qwen2_moe", hidden_size=128, moe_intermediate_size=128, shared_expert_intermediate_size=128)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    linear = {
        f"{name}.weight"
        for name, child in model.model.layers.named_modules(prefix="model.layers")
        if type(child) is nn.Linear and not name.endswith("shared_expert_gate")
    }
    fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    assert any("gate_proj" in name for name in linear) and fused
    layers: set[str] = run(1, chosen, path, plant)[0]
    return layers == linear | fused


def test_linear_layers_and_experts_are_quantised_and_nothing_else() -> None:
    assert layers_are_chosen(None)


def refused(path: str, mesh: str) -> str:
    with pytest.raises(UserError) as error:
        open_engine(path, mesh, **base_in_nf4())
    return str(error.value)


def test_a_cut_inside_a_block_is_refused_with_sizes_that_go() -> None:
    message = run(2, refused, saved_model("llama", **{**WIDE, "intermediate_size": 192}), "tp2")[0]
    assert "mesh.tp would split the 192 inputs of model.layers.0.mlp.down_proj.weight" in message
    assert "Set mesh.tp to one of 1, 3, or lora.base=compute" in message
    assert "rows of a multiple of 64 elements" in run(1, refused, saved_model("gpt2"), "1")[0]


@pytest.mark.parametrize("shape", [(3, 64), (40, 192), (4, 24, 128)])
def test_two_implementations_agree(shape: tuple[int, ...]) -> None:
    """The stored bytes and the reference's levels; an element is within half the widest gap of its block's scale."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = nf4.quantise(weight)
    scale_codes, groups = nf4.quantise_scales(scales)
    index = torch.arange(scales.numel()).view(scales.shape)
    stored = nf4.dequantise(codes, nf4.dequantise_scales(scale_codes, groups, index), torch.float32)
    assert torch.equal(stored, nf4_and_back(weight))
    assert codes.numel() * 2 == weight.numel() and codes.dtype == scale_codes.dtype == torch.uint8
    blocks = (stored - weight).abs().unflatten(-1, (-1, 64)).amax(-1)
    assert (blocks <= 0.17 * scales).all()


def test_the_mean_of_scales_does_not_depend_on_the_order_of_sums() -> None:
    """A CUDA device, and a CPU with other threads, add up in another order."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(100_000, generator=generator).exp()
    orders = [scales[torch.randperm(len(scales), generator=generator)] for _ in range(20)]
    one_by_one = [
        np.add.accumulate(shuffled.numpy())[-1] for shuffled in orders
    ]  # torch sums in other blocks on other CPUs
    assert len(set(one_by_one)) > 1
    mean = nf4.quantise_scales(scales)[1].mean
    assert all(nf4.quantise_scales(shuffled)[1].mean == mean for shuffled in orders)


def test_zeros_stay_zeros() -> None:
    codes, scales = nf4.quantise(torch.zeros(2, 64))
    scale_codes, groups = nf4.quantise_scales(scales)
    assert not nf4.dequantise(
        codes, nf4.dequantise_scales(scale_codes, groups, torch.arange(2).view(2, 1)), torch.float32
    ).any()
