"""Trees of families whose layers carry state, route tokens to experts, or take images."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.parity.test_trees import of_trees
from tests.support.cases import describe, pairs, saved_model, world_of
from tests.support.pool import run

STATES = [("qwen3_5_text", "1"), ("bamba", "2"), ("lfm2", "cp2u2"), ("qwen3_next", "tp2")]
MORE_STATES = [
    ("lfm2", "pp2"), ("mamba", "1"), ("mamba2", "2"), ("jamba", "2"), ("falcon_h1", "tp2"), ("nemotron_h", "ep2"),
    ("granitemoehybrid", "2"), ("zamba2", "1"), ("olmo_hybrid", "1"), ("kimi_linear", "1"), ("minimax", "1"),
    ("recurrent_gemma", "1"), ("lfm2_moe", "2"), ("bamba", "cp2u2"), ("qwen3_5_text", "2xtp2"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh"), pairs(STATES, MORE_STATES))
def test_layers_that_carry_state(family: str, mesh: str) -> None:
    check(family, mesh, {}, lasting_states(family))


EXPERTS = [("qwen3_moe", "ep2", "document"), ("deepseek_v3", "ep2", None)]
MORE_EXPERTS = [
    ("qwen3_moe", "2", "step"), ("gpt_oss", "1", None), ("qwen3_moe", "2xcp2", "document"),
    ("qwen3_moe", "pp2", "document"), ("qwen3_moe", "pp2", "step"), ("qwen3_moe", "ep2xcp2", "step"),
    ("qwen3_moe", "1", None), ("mixtral", "2xep2", "document"), ("gpt_oss", "ep2xtp2", "step"),
    ("deepseek_v3", "tp2", None), ("jamba", "2", "document"),
]  # fmt: skip


@pytest.mark.covers("model.router_aux_loss")
@pytest.mark.parametrize(("family", "mesh", "loss"), pairs(EXPERTS, MORE_EXPERTS))
def test_experts_and_their_auxiliary_losses(family: str, mesh: str, loss: str | None) -> None:
    check(family, mesh, {} if loss is None else {"model": {"router_aux_loss": loss, "router_aux_loss_coef": 0.1}})


@cache
def lasting_states(family: str) -> str:
    """The family's small model with states that last for some tokens: its random ones are forgotten at once, so that a
    state which is not forked would hardly show."""
    folder = Path(saved_model(family))
    changed = folder.with_name(f"{family}-lasting")
    shutil.copytree(folder, changed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor.fill_(-2.0)
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    return str(changed)


def check(family: str, mesh: str, sections: dict[str, dict[str, Any]], path: str = "") -> None:
    ((verdict, rows), *_) = run(world_of(mesh), of_trees, path or saved_model(family), mesh, sections)
    assert verdict is not None and verdict.passed, describe(verdict)
    assert rows > 0
