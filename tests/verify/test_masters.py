"""`weft verify` of what rounds in an optimizer's step: steps from equal gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from weft.verify.documents import awkward_steps
from weft.verify.harness import Figure
from weft.verify.masters import compare_steps
from weft.verify.plants import planted

BF16 = {"fsdp": {"master_dtype": "bf16"}}
CASES: dict[str, dict[str, Any]] = {
    "stochastic": {**BF16, "optimizer": {"rounding": "stochastic"}},
    "kahan int8": {**BF16, "optimizer": {"rounding": "kahan", "state_dtype": "int8"}},
    "nearest": BF16,
    "nearest fp32": {**BF16, "optimizer": {"state_dtype": "fp32"}},
    "int8": {"optimizer": {"state_dtype": "int8"}},
    "bf16 state": {"optimizer": {"state_dtype": "bf16"}},
    "lion": {"optimizer": {"name": "lion"}},
    "lion bf16": {**BF16, "optimizer": {"name": "lion"}},
    "adafactor bf16": {**BF16, "optimizer": {"name": "adafactor"}},
    "muon bf16": {**BF16, "optimizer": {"name": "muon"}},
    "sgd bf16": {**BF16, "optimizer": {"name": "sgd", "momentum": 0.9}},
    "radam bf16": {**BF16, "optimizer": {"name": "torch.optim.RAdam"}},
    "adapters over nf4": {**BF16, "optimizer": {"rounding": "stochastic"}, "lora": {"rank": 8, "base": "nf4"}},
}
MESHES = ("llama", "1"), ("llama", "2"), ("llama", "tp2"), ("llama_tied", "pp2"), ("qwen3_moe", "ep2")
SUITE = [
    ("stochastic", "llama", "tp2"), ("kahan int8", "qwen3_moe", "ep2"), ("lion", "llama", "tp2"),
    ("muon bf16", "llama_tied", "pp2"), ("adapters over nf4", "llama", "2"),
]  # fmt: skip
TABLE = [(name, *where) for name in CASES for where in MESHES if (name, where[1]) != ("adapters over nf4", "tp2")]


def steps(family: str, mesh: str, sections: dict[str, Any], plant: str | None = None) -> list[Figure]:
    figures: list[Figure] = run(world_of(mesh), _steps, saved_model(family), mesh, sections, plant)[0]
    return figures


def _steps(path: str, mesh: str, sections: dict[str, Any], plant: str | None) -> list[Figure]:
    with planted(plant):
        return compare_steps(open_engine(path, mesh, **sections), path, awkward_steps(128)[:3], 1e-3)


def steps_are_those_of_one_process(plant: str | None) -> bool:
    return all(figure.passed for figure in steps("llama", "1", CASES["stochastic"], plant))


@pytest.mark.parametrize(("name", "family", "mesh"), pairs(SUITE, [case for case in TABLE if case not in SUITE]))
def test_steps_from_equal_gradients_are_those_of_one_process(name: str, family: str, mesh: str) -> None:
    assert [figure for figure in steps(family, mesh, CASES[name]) if not figure.passed] == []


@pytest.mark.parametrize(
    ("plant", "name"),
    [("bits-by-local-place", "stochastic"), ("muon-of-shards", "muon bf16"), ("codes-by-shard", "kahan int8")],
)
def test_bugs_of_shards_are_seen(plant: str, name: str) -> None:
    failed = [figure.name for figure in steps("llama", "2", CASES[name], plant) if not figure.passed]
    assert "masters in bfloat16: weights that differ" in failed
