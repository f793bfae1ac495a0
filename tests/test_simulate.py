"""A simulated step: beside the same step on real ranks, what each of them holds, has in memory and sends; beside what
`weft plan` says by arithmetic, on shapes of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import MESHES, engine_config, open_engine, saved_model, world_of
from tests.pool import run
from weft.cluster.machine import accelerator
from weft.config.mesh import resolve_mesh
from weft.config.schema import MeshConfig, ModelConfig, StepConfig
from weft.engine.config import EngineConfig
from weft.objectives.cross_entropy import CrossEntropy
from weft.rehearsal.blueprint import Blueprint
from weft.rehearsal.memory import Memory, memory_by_stage
from weft.rehearsal.observed_collectives import Kind, Total
from weft.rehearsal.observed_memory import Peak
from weft.rehearsal.rows import RowFacts, plan_rows
from weft.rehearsal.simulate import Simulated, Step, plan_of, rows_of, simulate, watched_step
from weft.rehearsal.watch import held_by

ROOT = Path(__file__).parent.parent
Seen = tuple[dict[str, int], Peak, dict[Kind, Total]]


def step_on(mesh: str, micro_batches: int) -> Step:
    """Documents of 32 read tokens that fill rows of 128 on all ranks."""
    axes = MESHES[mesh]
    data = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    return Step([33, 33, 33, 33] * data * axes.get("cp", 1) * micro_batches, CrossEntropy())


def really(path: str, mesh: str, sections: dict[str, Any], step: Step) -> Seen:
    """The second step of a real rank, whose optimizer has its state from the first."""
    engine = open_engine(path, mesh, **sections)
    for _ in range(2):
        plan = plan_of(engine, step)
        held, watch = watched_step(engine, plan, rows_of(engine, plan, step), step.objective)
    return held, watch.peak(), watch.collectives.totals


def simulated(path: str, mesh: str, sections: dict[str, Any], step: Step, rank: int) -> Seen:
    found = simulate(engine_config(path, mesh, **sections), world_of(mesh), None, step, rank=rank)
    return found.held, found.peak, found.collectives.totals


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "micro_batches"),
    [
        ("qwen3", "2x2", {"fsdp": {"reduce": "last"}, "model": {"recompute": "full"}}, 2),
        ("qwen3", "2xtp2", {"optimizer": {"state_dtype": "bf16", "ema_decay": 0.9}}, 2),
        ("llama", "tp2", {"lora": {"rank": 4}}, 2),
        ("gemma2", "2xcp2", {"fsdp": {"param_dtype": "bf16"}}, 2),
        ("llama_tied", "pp2x2", {}, 3),
    ],
)
def test_a_simulated_step_is_that_of_real_ranks(
    family: str, mesh: str, sections: dict[str, Any], micro_batches: int
) -> None:
    """To the byte: what is held, what was in memory at the fullest by class, and every collective."""
    path, world, step = saved_model(family), world_of(mesh), step_on(mesh, micro_batches)
    there = run(world, really, path, mesh, sections, step)
    for rank in {0, world - 1}:
        held, peak, totals = simulated(path, mesh, sections, step, rank)
        assert held == there[rank][0]
        assert totals == there[rank][2]
        assert (peak.classes, peak.phase, peak.micro_batch) == (
            there[rank][1].classes,
            there[rank][1].phase,
            there[rank][1].micro_batch,
        )
        assert peak.most == pytest.approx(there[rank][1].most, rel=0.15)  # messages leave a little later


def test_experts_get_as_many_tokens_together_as_on_real_ranks() -> None:
    """Which rank gets how many is the routers' choice, and a simulation's is even; all else is to the byte."""
    path, mesh, step = saved_model("qwen3_moe"), "pp2xep2", step_on("pp2xep2", 2)
    sections = {"model": {"recompute": "full"}}
    there = run(4, really, path, mesh, sections, step)
    here = [simulated(path, mesh, sections, step, rank) for rank in range(4)]
    assert [held for held, _, _ in here] == [held for held, _, _ in there]
    exchange = Kind("ep", 2, "all-to-all")
    for stage in ((0, 1), (2, 3)):
        sent = [[found[rank][2].pop(exchange) for rank in stage] for found in (here, there)]
        assert sum(one.bytes for one in sent[0]) == sum(one.bytes for one in sent[1])
        assert {one.count for of in sent for one in of} == {sent[0][0].count}
    assert [totals for _, _, totals in here] == [totals for _, _, totals in there]


def test_experts_get_equally_many_tokens() -> None:
    """Also where they do not divide by ep: a rank with more of them gets more, and sends more back."""
    step, found = step_on("3ep3", 1), []
    path = saved_model("qwen3_moe", num_experts=5)
    for rank in range(3):
        _, _, totals = simulated(path, "3ep3", {}, step, rank)
        found.append(totals[Kind("ep", 3, "all-to-all")])
    counts = {one.count for one in found}
    assert len(counts) == 1 and found[0].bytes < found[1].bytes == found[2].bytes


def kept_and_seen(path: str, sections: dict[str, Any], step: Step) -> tuple[int, int]:
    """(bytes that autograd stores in a forward, what is seen as activations) of one real rank."""
    engine = open_engine(path, "1", **sections)
    plan = plan_of(engine, step)
    rows = rows_of(engine, plan, step)
    own = {tensor.untyped_storage().data_ptr() for tensors in held_by(engine).values() for tensor in tensors}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _, watch = watched_step(engine, plan, rows, step.objective)
    for unit in watch.engine.units:
        for module in unit.modules:
            own |= {p.untyped_storage().data_ptr() for p in module.parameters()}
    gathered = watch.peak().most["gathered"]
    return sum(size for at, size in found.items() if at not in own) - gathered, watch.peak().most["activations"]


@pytest.mark.parametrize(("family", "sections"), [("qwen3", {}), ("qwen3_moe", {"fsdp": {"param_dtype": "bf16"}})])
def test_activations_are_what_autograd_keeps(family: str, sections: dict[str, Any]) -> None:
    """By its own word, of one micro-batch."""
    ((kept, seen),) = run(1, kept_and_seen, saved_model(family), sections, step_on("1", 1))
    assert seen == pytest.approx(kept, rel=0.1)


# ---------------------------------------------------------------- shapes of real models


def shape_of(model: str, layers: int, folder: Path) -> str:
    """A folder with the config of a model, cut to so many layers; its widths are what they were."""
    config = json.loads((ROOT / "examples/models" / model / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "max_window_layers": layers}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def both(config: EngineConfig, world: int, step: Step) -> list[tuple[Memory, Simulated, dict[tuple[str, str], float]]]:
    """(by arithmetic, simulated, calls by arithmetic) of the first and the last stage."""
    assumed = accelerator("h100-80gb")
    model, mesh = Blueprint(config, "cpu", assumed), resolve_mesh(config.mesh, world)
    model.check(mesh)
    rows = RowFacts.of(model, plan_rows(model, mesh, step.lengths))
    stages = memory_by_stage(model, mesh, rows)
    found = []
    for memory in {id(one): one for one in (stages[0], stages[-1])}.values():
        rank = memory.held.place.rank(mesh)
        found.append((memory, simulate(config, world, assumed, step, rank=rank), {}))
    return found


@pytest.mark.parametrize(
    ("model", "layers", "mesh", "world", "length", "sections"),
    [
        ("Qwen3-4B", 6, {"dp_shard": 8}, 8, 4096, {"recompute": "none"}),
        ("Qwen3-4B", 6, {"dp_shard": 512, "tp": 8}, 4096, 4096, {"recompute": "full"}),
        ("Qwen3-30B-A3B", 4, {"dp_shard": 16, "ep": 8}, 16, 4096, {"recompute": "full"}),
        ("Qwen3-235B-A22B", 4, {"pp": 2, "dp_shard": 4, "cp": 4, "ep": 8}, 32, 32768, {"recompute": "full"}),
    ],
)
def test_arithmetic_and_simulation_agree(
    model: str, layers: int, mesh: dict[str, int], world: int, length: int, sections: dict[str, Any], tmp_path: Path
) -> None:
    config = EngineConfig(
        model=ModelConfig(path=shape_of(model, layers, tmp_path), **sections),
        mesh=MeshConfig(**mesh),
        step=StepConfig(documents=1, max_tokens_per_device=8192),
    )
    data = world // (mesh.get("pp", 1) * mesh.get("tp", 1))
    step = Step([length] * (data * 8192 * 3 // length), CrossEntropy())
    for memory, found, _ in both(config, world, step):
        print(memory)
        print(
            {k: v / 2**30 for k, v in found.peak.classes.items()},
            {k: v / 2**30 for k, v in found.peak.most.items()},
            found.peak.phase,
            found.peak.micro_batch,
        )
        print(found.peak.total / 2**30, memory.fullest / 2**30)
