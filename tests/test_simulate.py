"""A simulated step beside the same step on real ranks: what each rank holds, and every collective with its bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests import pool
from tests.cases import MESHES, open_engine, saved_model, world_of
from weft.config.schema import FsdpConfig, LoraConfig, MeshConfig, ModelConfig, OptimizerConfig, StepConfig
from weft.engine.config import EngineConfig
from weft.objectives.load import choose_objective
from weft.rehearsal.simulate import Work, lay_out, simulate
from weft.rehearsal.watch import Watch, held_by

WORK = Work(length=33, micro_batches=2)


def observed(path: str, mesh: str, sections: dict[str, Any], work: Work = WORK) -> dict[str, Any]:
    """A rank's second step, whose optimizer has its state from the first."""
    engine = open_engine(path, mesh, **sections)
    objective = choose_objective(None)
    for _ in range(2):
        plan, rows = lay_out(engine, work, objective)
        with Watch(engine) as watch:
            engine.accumulate(plan, rows, objective)
            held = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in held_by(engine).items()}
            engine.apply(1e-3)
    peak = watch.peak()
    return {"held": held, "peak": peak, "totals": watch.collectives.totals}


def simulated(path: str, mesh: str, sections: dict[str, Any], rank: int, work: Work = WORK) -> dict[str, Any]:
    config = EngineConfig(
        model=ModelConfig(path=path, **sections.get("model", {})),
        lora=LoraConfig(**sections.get("lora", {})),
        mesh=MeshConfig(**MESHES[mesh]),
        fsdp=FsdpConfig(**sections.get("fsdp", {})),
        step=StepConfig(**{"max_tokens_per_device": 128, **sections.get("step", {})}),
        optimizer=OptimizerConfig(**sections.get("optimizer", {})),
    )
    found = simulate(config, world_of(mesh), None, work, choose_objective(None), rank=rank)
    return {"held": found.held, "peak": found.peak, "totals": found.collectives.totals}


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    [
        ("qwen3", "2", {}),
        ("qwen3", "2x2", {"fsdp": {"reduce": "last"}}),
        ("qwen3", "tp2", {}),
        ("qwen3", "2xcp2", {}),
        ("qwen3_moe", "ep2xtp2", {"model": {"recompute": "full"}}),
        ("qwen3_moe", "pp2xep2", {"optimizer": {"state_dtype": "bf16"}}),
        ("qwen3", "pp2x2", {}),
    ],
)  # fmt: skip
def test_it(family: str, mesh: str, sections: dict[str, Any]) -> None:
    path, world = saved_model(family), world_of(mesh)
    real = pool.run(world, observed, path, mesh, sections)
    for rank in range(world):
        found = simulated(path, mesh, sections, rank)
        print(rank, real[rank]["held"], found["held"])
        print("   real", real[rank]["peak"])
        print("   simu", found["peak"])
        for kind in sorted(real[rank]["totals"].keys() | found["totals"].keys()):
            a, b = real[rank]["totals"].get(kind), found["totals"].get(kind)
            print("   ", kind, a, b, "" if a == b else "<<<<<<<")
