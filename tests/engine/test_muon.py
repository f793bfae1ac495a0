"""optimizer.name=muon: whole matrices on every mesh, torch.optim.Muon's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cases import describe, open_engine, pairs, parity, saved_model, world_of
from tests.support.equal_gradients import gradient, same_on_every_mesh
from tests.support.pool import run
from weft.config.schema import OptimizerConfig
from weft.engine.optim import muon
from weft.engine.optim.optimizer import build_optimizer, set_learning_rate
from weft.parallel.shards.boxes import Box
from weft.recipes.verify import EPSILON

MUON: dict[str, Any] = {"optimizer": {"name": "muon", "lr": 1e-3, "muon_lr": 2e-3}}
HEADS: dict[str, Any] = {"optimizer": {**MUON["optimizer"], "muon_heads": True}}
BF16: dict[str, Any] = {"optimizer": {**MUON["optimizer"], "muon_dtype": "bf16"}}
FULL = slice(None)


@pytest.mark.parametrize(
    ("family", "changes", "sections", "meshes"),
    pairs(
        [
            ("llama", {}, MUON, ("1", "3", "2x2", "tp2", "cp2", "pp2")),
            ("llama_tied", {}, MUON, ("1", "tp2", "pp2")),
            ("qwen3_moe", {"tie_word_embeddings": True}, HEADS, ("1", "ep2", "ep2xtp2")),
        ],
        [
            ("llama", {}, MUON, ("1", "2")),
            ("llama_tied", {}, MUON, ("1", "2")),
            ("gpt2", {}, MUON, ("1", "2", "tp2", "pp2")),
            ("gpt2", {}, HEADS, ("1", "2x2", "tp2")),
            ("qwen3", {}, HEADS, ("1", "2", "tp2", "pp2")),
            ("qwen3_moe", {}, MUON, ("1", "ep2", "pp2xep2")),
        ],
    ),
)
def test_five_steps_of_a_model_are_those_of_torch_on_every_mesh(
    family: str, changes: dict[str, Any], sections: dict[str, Any], meshes: tuple[str, ...], tmp_path: Path
) -> None:
    path = saved_model(family, **changes)
    saved = same_on_every_mesh(path, sections, meshes, tmp_path, tolerance=1e-6, last=5)
    assert any(entry.startswith("optimizer/momentum_buffer/") for entry in saved)
    if sections is BF16:  # one rounding of the momentum, in another order than torch's, moves a matrix by 1e-5
        return
    weights = {name.removeprefix("weights/"): x for name, x in saved.items() if name.startswith("weights/")}
    for name, expected in torchs_weights(path, list(weights), heads=sections is HEADS).items():
        assert (weights[name] - expected).abs().max() <= 1e-6, name


def torchs_weights(path: str, names: list[str], *, heads: bool) -> dict[str, torch.Tensor]:
    """The weights after five steps of torch.optim.Muon, which takes matrices one by one, and AdamW for the others.
    names: weft's."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = {name: next(x for n, x in parameters.items() if n.endswith(_stem(name))) for name in names}
    parts = {name: matrices_of(name, x, model.config, heads=heads) for name, x in weights.items()}
    stepped = {name: [torch.nn.Parameter(x[part].clone()) for part in parts[name]] for name, x in weights.items()}
    by_adamw = {name: torch.nn.Parameter(x.clone()) for name, x in weights.items() if not parts[name]}
    muon = torch.optim.Muon([p for of_name in stepped.values() for p in of_name], adjust_lr_fn="match_rms_adamw")
    keys = OptimizerConfig(eps=EPSILON)
    muon.param_groups[0] |= {"weight_decay": keys.weight_decay, "momentum": keys.muon_momentum}
    decayed = [{"params": [p], "weight_decay": keys.weight_decay * (p.ndim > 1)} for p in by_adamw.values()]
    adamw = torch.optim.AdamW(decayed, betas=keys.betas, eps=keys.eps)
    for step in range(1, 6):
        for name, x in weights.items():
            full_gradient = gradient(name, tuple(x.shape), step)
            for part, parameter in zip(parts[name], stepped[name], strict=True):
                parameter.grad = full_gradient[part].clone()
            if name in by_adamw:
                by_adamw[name].grad = full_gradient
        muon.param_groups[0]["lr"] = 2 * 1e-2 / step  # muon_lr is twice lr
        for group in adamw.param_groups:
            group["lr"] = 1e-2 / step
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # torch's Muon always computes in bf16
            muon.step()
        adamw.step()
    for name, x in weights.items():
        for part, parameter in zip(parts[name], stepped[name], strict=True):
            x[part] = parameter.detach()
    return weights | {name: parameter.detach() for name, parameter in by_adamw.items()}


def _stem(name: str) -> str:
    """What weft's and transformers' names of a parameter both end in."""
    return name.removeprefix("base.").removeprefix("head.")


def matrices_of(name: str, x: torch.Tensor, config: Any, *, heads: bool) -> list[tuple[slice | int, ...]]:
    """Where the matrices of a parameter are; none for what AdamW steps."""
    if x.ndim < 2 or "embed" in name or "wte" in name or "wpe" in name or "head" in name:
        return []
    if x.ndim == 3:
        rows = [FULL] if "gate_up" not in name else [slice(0, x.shape[1] // 2), slice(x.shape[1] // 2, None)]
        return [(expert, part) for expert in range(len(x)) for part in rows]
    projected = [part for part in ("q_proj", "k_proj", "v_proj", "c_attn") if part in name]
    if not projected or (projected != ["c_attn"] and not heads):
        return [(FULL,)]
    width = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    size = width if heads else config.hidden_size
    if projected == ["c_attn"]:  # queries, keys and values are columns
        return [(FULL, slice(start, start + size)) for start in range(0, x.shape[1], size)]
    return [(slice(start, start + size),) for start in range(0, len(x), size)]


def in_small_rounds(path: str, mesh: str, sections: dict[str, Any]) -> Any:
    """Parity where a rank orthogonalises few matrices at a time, so that rounds overlap."""
    with mock.patch.object(muon, "_ROUND", 6000):
        return parity(path, mesh, sections)


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    [("llama", "2xtp2", {}), ("qwen3_moe", "ep2", {}), ("qwen3", "pp2", {"lora": {"rank": 4}})],
)
def test_training_is_that_of_one_process(family: str, mesh: str, sections: dict[str, Any]) -> None:
    verdict = run(world_of(mesh), in_small_rounds, saved_model(family), mesh, MUON | sections)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.covers("optimizer.muon_lr", "optimizer.muon_momentum", "optimizer.muon_scale", "optimizer.muon_dtype")
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(48, 80), (80, 48)])
def test_five_steps_are_those_of_torch(scale: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    reference = torch.nn.Parameter(weight.detach().clone())
    keys: dict[str, Any] = {"muon_lr": 0.02, "muon_momentum": 0.9, "muon_scale": scale, "muon_dtype": "bf16"}
    config = OptimizerConfig(name="muon", lr=1e-3, weight_decay=0.1, **keys)
    vector = torch.nn.Parameter(torch.ones(5))
    boxes = {"w": [Box.from_shape(shape)]}
    optimizer = build_optimizer([("w", weight), ("b", vector)], config, matrices=boxes)
    torchs = torch.optim.Muon([reference], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=scale)
    for step in range(1, 6):
        weight.grad, vector.grad = torch.randn(shape), torch.ones(5)
        reference.grad = weight.grad.clone()
        set_learning_rate(optimizer, 1e-3 / step)
        torchs.param_groups[0]["lr"] = 0.02 / step
        optimizer.step()
        torchs.step()
    assert (weight - reference).abs().max() <= 1e-6
    assert vector.detach() == pytest.approx(torch.full((5,), 1 - 1e-3 * (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5)), abs=1e-6)


def boxes_of(family: str, **keys: Any) -> dict[str, list[tuple[int, ...]]]:
    """Last two parts of a matrix's name, without the number of the layer -> the sizes of its boxes."""
    engine = open_engine(saved_model(family), "1", optimizer={"name": "muon", **keys})
    matrices = engine.built.matrices
    return {".".join(name.split(".")[-3:]): [box.size for box in boxes] for name, boxes in matrices.items()}


@pytest.mark.covers("optimizer.muon_heads")
def test_parts_of_fused_projections_experts_and_heads() -> None:
    sizes = run(1, boxes_of, "qwen3_moe")[0]
    assert sizes["mlp.experts.gate_up_proj"] == [(1, 40, 64)] * 10  # of 5 experts, gate and up
    assert sizes["mlp.experts.down_proj"] == [(1, 64, 40)] * 5
    assert not any("embed" in name or "head" in name or "norm" in name for name in sizes)
    sizes = run(1, boxes_of, "gpt2")[0]
    assert sizes["attn.c_attn.weight"] == [(64, 64)] * 3  # queries, keys and values, whose outputs are columns here
    sizes = run(1, boxes_of_heads, "qwen3")[0]
    assert sizes["self_attn.q_proj.weight"] == [(16, 64)] * 4
    assert sizes["self_attn.k_proj.weight"] == [(16, 64)] * 2
    assert sizes["self_attn.o_proj.weight"] == [(64, 64)]


def boxes_of_heads(family: str) -> dict[str, list[tuple[int, ...]]]:
    return boxes_of(family, muon_heads=True)
