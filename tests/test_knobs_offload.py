"""fsdp.cpu_offload. On a CPU the policy and equal numbers can be shown; copies to an accelerator cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import describe, open_engine, parity, saved_model, world_of
from tests.pool import run
from weft.engine.contract import check_contract
from weft.objectives.cross_entropy import CrossEntropy
from weft.parallel.fsdp import fsdp_modules
from weft.report.banner import fsdp_line
from weft.verification.documents import awkward_steps
from weft.verification.observed import to_documents


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("mesh", "sections"),
    [
        ("2", {"fsdp": {"reduce": "last"}, "model": {"recompute": "full"}}),
        ("2", {"fsdp": {"prefetch": 2, "overrides": {"model.layers.0": "replicate"}}}),
        ("2x2", {"step": {"max_tokens_per_device": 61}, "optimizer": {"state_dtype": "bf16"}}),
    ],
)
def test_parity(family: str, mesh: str, sections: dict[str, Any]) -> None:
    sections = {**sections, "fsdp": {**sections.get("fsdp", {}), "cpu_offload": True}}
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def policies(path: str, offload: bool, init: str) -> tuple[set[Any], str]:
    """(whether FSDP offloads, whether it pins) of every parameter, and the line at start."""
    engine = open_engine(path, "2", fsdp={"cpu_offload": offload}, model={"init": init})
    documents, metas = to_documents(engine, awkward_steps(128)[1])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-3)
    check_contract(engine)
    assert engine.storage == torch.device("cpu")
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in fsdp_modules(engine.module)]
    owned = [p for group in groups if group is not None for p in group.fsdp_params]
    return {(p.offload_to_cpu, p.pin_memory) for p in owned}, fsdp_line(engine)


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_every_unit_has_the_policy(init: str) -> None:
    for seen, line in run(2, policies, saved_model("llama"), True, init):
        assert seen == {(True, False)}
        assert line.endswith("parameters, gradients and optimizer state on the host")
    for seen, line in run(2, policies, saved_model("llama"), False, init):
        assert seen == {(False, False)}
        assert "host" not in line
