"""optimizer.name=muon: whole matrices on every mesh, torch.optim.Muon's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.cases import describe, open_engine, parity, saved_model, world_of
from tests.support.equal_gradients import same_on_every_mesh
from tests.support.pool import run
from weft.config.schema import OptimizerConfig
from weft.engine.optim import muon
from weft.engine.optim.optimizer import build_optimizer, set_learning_rate
from weft.parallel.shards.boxes import Box

MUON: dict[str, Any] = {"optimizer": {"name": "muon", "lr": 1e-3, "muon_lr": 2e-3}}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dense": ("llama", MUON, ("1", "2", "3", "2x2", "tp2", "cp2", "pp2")),
    "experts, tied": (
        "qwen3_moe", {"optimizer": {"name": "muon", "muon_dtype": "bf16", "muon_heads": True}}, ("1", "ep2", "ep2xtp2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_masters_and_momentum_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    family, sections, meshes = CASES[name]
    saved = same_on_every_mesh(saved_model(family), sections, meshes, tmp_path, tolerance=1e-6)
    assert any(entry.startswith("optimizer/momentum_buffer/") for entry in saved)


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
    theirs = torch.nn.Parameter(weight.detach().clone())
    keys: dict[str, Any] = {"muon_lr": 0.02, "muon_momentum": 0.9, "muon_scale": scale, "muon_dtype": "bf16"}
    config = OptimizerConfig(name="muon", lr=1e-3, weight_decay=0.1, **keys)
    vector = torch.nn.Parameter(torch.ones(5))
    boxes = {"w": [Box.from_shape(shape)]}
    ours = build_optimizer([("w", weight), ("b", vector)], config, matrices=boxes)
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=scale)
    for step in range(1, 6):
        weight.grad, vector.grad = torch.randn(shape), torch.ones(5)
        theirs.grad = weight.grad.clone()
        set_learning_rate(ours, 1e-3 / step)
        torchs.param_groups[0]["lr"] = 0.02 / step
        ours.step()
        torchs.step()
    assert (weight - theirs).abs().max() <= 1e-6
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
