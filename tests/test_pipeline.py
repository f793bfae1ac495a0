"""Pipeline parallelism."""
from __future__ import annotations
import pytest
from tests.cases import describe, parity, saved_model, world_of
from tests.pool import run

CASES = [("llama","pp2g"),("qwen3","pp2"),("gemma3_text","pp3"),("llama","pp2x2"),("qwen3","pp2xtp2"),("qwen3_moe","pp2"),("deepseek_v3","pp2x2"),("llama_tied","pp2x2x1"),("gemma3_text","pp2x2"),("falcon","pp2"),("gpt2","pp2"),("lfm2","pp2")]

@pytest.mark.parametrize(("family", "mesh"), CASES, ids=map(" ".join, CASES))
def test_steps_are_those_of_plain_transformers(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, {})[0]
    assert verdict.passed, describe(verdict)
    for f in verdict.figures: print(f)
