"""Pipeline parallelism."""
from __future__ import annotations
import pytest
from tests.cases import describe, parity, saved_model, world_of
from tests.pool import run

CASES = [("llama", "pp2")]

@pytest.mark.parametrize(("family", "mesh"), CASES, ids=map(" ".join, CASES))
def test_steps_are_those_of_plain_transformers(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, {})[0]
    assert verdict.passed, describe(verdict)
    for f in verdict.figures: print(f)
