"""Context parallelism: gradients and steps of plain transformers, wherever documents are cut."""

from __future__ import annotations

import pytest

from tests.cases import describe, parity, saved_model, world_of
from tests.pool import run

SHORT = {"step": {"max_tokens_per_device": 40}}  # of the harness's documents, most are longer
CASES = [
    ("llama", "cp2"), ("qwen3", "cp2u2"), ("gemma3_text", "cp4u2"), ("gpt_oss", "cp2xtp2"), ("qwen3_moe", "2xcp2"),
    ("deepseek_v3", "cp2u2"), ("glm4", "cp3"), ("olmo3", "cp4u2"), ("cohere2", "2x1xcp2"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh"), CASES, ids=map(" ".join, CASES))
def test_steps_are_those_of_plain_transformers(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, SHORT)[0]
    assert verdict.passed, describe(verdict)
