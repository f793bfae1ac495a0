"""Context parallelism: gradients and steps of plain transformers, wherever documents are cut."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("sections", [
    {"model": {"recompute": "full"}, "fsdp": {"reduce": "last"}},
    {"fsdp": {"reduce": "scatter", "cpu_offload": True}},
    {"model": {"router_aux_loss": "document", "router_aux_loss_coef": 0.1}},
    {"model": {"router_aux_loss": "step", "router_aux_loss_coef": 0.1}},
    {"lora": {"rank": 4}},
], ids=["recompute and last", "scatter and offload", "experts balanced", "experts balanced by step", "lora"])  # fmt: skip
def test_with_other_knobs(sections: dict[str, Any]) -> None:
    verdict = run(2, parity, saved_model("qwen3_moe"), "cp2", SHORT | sections)[0]
    assert verdict.passed, describe(verdict)


def test_documents_that_are_padded_are_dealt_whole() -> None:
    verdict = run(2, parity, saved_model("jamba"), "cp2", {})[0]
    assert verdict.passed, describe(verdict)
