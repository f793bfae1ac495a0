"""`weft plan`: what it says of memory and of what travels, beside what real ranks hold and send."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.cases import MESHES, engine_config, open_engine, saved_model, world_of
from tests.pool import run
from weft.config.mesh import MeshSizes, resolve_mesh
from weft.config.schema import MeshConfig
from weft.objectives.cross_entropy import CrossEntropy
from weft.rehearsal.blueprint import Blueprint
from weft.rehearsal.held import Held, Holdings, Place
from weft.rehearsal.rows import RowFacts, plan_rows
from weft.rehearsal.simulate import Step, plan_of, rows_of, watched_step
from weft.rehearsal.traffic import transfers
from weft.verification.documents import awkward_steps
from weft.verification.observed import to_documents


def sizes_of(mesh: str) -> MeshSizes:
    return resolve_mesh(MeshConfig(**MESHES[mesh]), world_of(mesh))


def blueprint(family: str, mesh: str, sections: dict[str, Any], **changes: Any) -> Blueprint:
    return Blueprint(engine_config(saved_model(family, **changes), mesh, **sections), "cpu", None)


# ---------------------------------------------------------------- what ranks hold


def counted(path: str, mesh: str, sections: dict[str, Any]) -> tuple[int, int, int]:
    """(weights, gradients, optimizer state): the bytes on this rank after a step's backward and update."""
    engine = open_engine(path, mesh, **sections)
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    for last in (False, True):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        if not last:
            engine.apply(1e-3)
    assert engine.optimizer is not None
    parameters = list(engine.module.parameters())
    states = [v.to_local() for s in engine.optimizer.state.values() for k, v in s.items() if k != "step"]
    gradients = [p.grad.to_local() for p in parameters if p.grad is not None]
    return tuple(sum(t.nbytes for t in found) for found in ([p.to_local() for p in parameters], gradients, states))  # type: ignore[return-value]


def bytes_of(held: Held) -> tuple[int, int, int]:
    return held.weights, held.gradients, held.optimizer


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "changes"),
    [
        ("llama", "1", {}, {}),
        ("llama", "3", {"model": {"freeze": ("*.mlp",)}, "optimizer": {"state_dtype": "bf16"}}, {}),
        ("qwen3_moe", "2x2", {"fsdp": {"overrides": {"*.self_attn": "replicate", "*.mlp.gate": 2}}}, {}),
        ("llama_tied", "tp4", {"optimizer": {"name": "sgd", "momentum": 0.9}}, {"vocab_size": 130}),
        ("qwen3", "2xtp2", {"lora": {"rank": 4}}, {"vocab_size": 131}),
        ("qwen3_moe", "3ep3", {}, {"num_experts": 5}),
        ("qwen3_moe", "4ep2", {"lora": {"rank": 3, "targets": ("*.experts.*", "*.q_proj")}}, {}),
        ("gpt_oss", "ep2xtp2", {"fsdp": {"param_dtype": "bf16"}}, {}),
        ("llama_tied", "pp2x2", {}, {"num_hidden_layers": 3}),
        ("deepseek_v3", "pp2xcp2", {}, {}),
        ("qwen3_moe", "pp2xep2xtp2", {}, {}),
    ],
)
def test_what_each_rank_holds_is_counted_to_the_byte(
    family: str, mesh: str, sections: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = blueprint(family, mesh, sections, **changes)
    sizes = sizes_of(mesh)
    holdings = Holdings(model, sizes)
    model.check(sizes)
    there = run(world_of(mesh), counted, saved_model(family, **changes), mesh, sections)
    foreseen = [bytes_of(holdings.of(Place.of(sizes, rank))) for rank in range(sizes.world)]
    assert foreseen == there
    heaviest = holdings.heaviest()
    assert heaviest.resident == max(map(sum, there))


# ---------------------------------------------------------------- what travels

PARTS = {
    "dp_shard": "fsdp", "dp_shard x cp": "fsdp", "same experts": "expert shards", "cp (ring)": "cp",
    "cp (ulysses)": "cp",
}  # fmt: skip
SMALL = 4096  # bytes of metrics, norms, counts of rows and log-sum-exps, which are not foreseen
Totals = dict[tuple[int, str], int]


def sent(path: str, mesh: str, sections: dict[str, Any], lengths: list[int]) -> Totals:
    """(ranks, operation) -> bytes, of the collectives of a real rank's step."""
    engine = open_engine(path, mesh, **sections)
    step = Step(lengths, CrossEntropy())
    plan = plan_of(engine, step)
    _, watch = watched_step(engine, plan, rows_of(engine, plan, step), step.objective)
    found: Totals = defaultdict(int)
    for kind, total in watch.collectives.totals.items():
        found[kind.ranks, kind.operation] += total.bytes
    return dict(found)


def foreseen(model: Blueprint, sizes: MeshSizes, rank: int, lengths: list[int]) -> Totals:
    held = Holdings(model, sizes).of(Place.of(sizes, rank))
    load = RowFacts.of(model, plan_rows(model, sizes, lengths)).load
    found: dict[tuple[int, str], float] = defaultdict(float)
    for one in transfers(model, sizes, held, load, recompute=model.config.model.recompute == "full"):
        found[2 if one.kind == "send" else one.size, one.kind] += one.payload * one.calls
    return {key: round(value) for key, value in found.items()}


RECOMPUTE = {"model": {"recompute": "full"}}


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "lengths", "changes"),
    [
        ("llama", "3", {"fsdp": {"reduce": "last"}}, [65] * 9, {}),
        ("llama_tied", "2x2", {"lora": {"rank": 4}}, [65] * 8, {}),
        ("llama", "2xtp2", RECOMPUTE, [65] * 8, {}),
        ("gemma3", "tp2", RECOMPUTE, [65] * 4, {}),
        ("falcon", "tp2", {}, [65] * 4, {}),
        ("llama", "cp2", {}, [201] * 2, {}),
        ("llama", "cp2u2", RECOMPUTE, [201] * 2, {}),
        ("qwen3_moe", "4ep2", RECOMPUTE, [65] * 8, {"num_experts": 4}),
        ("llama_tied", "pp2x2", {}, [65] * 8, {}),
    ],
)
def test_bytes_that_travel_are_those_of_real_ranks(
    family: str, mesh: str, sections: dict[str, Any], lengths: list[int], changes: dict[str, Any]
) -> None:
    """Each kind of collective to the byte, but for what is small."""
    model, sizes = blueprint(family, mesh, sections, **changes), sizes_of(mesh)
    path = saved_model(family, **changes)
    for rank, there in enumerate(run(world_of(mesh), sent, path, mesh, sections, lengths)):
        expected = foreseen(model, sizes, rank, lengths)
        there = {key: size for key, size in there.items() if key[1] != "receive"}
        for key in {*expected, *there}:
            allowed = SMALL if key[1] != "all-to-all" else SMALL + 0.05 * there.get(key, 0)
            assert expected.get(key, 0) == pytest.approx(there.get(key, 0), abs=allowed), (rank, key, expected, there)
