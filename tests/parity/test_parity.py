"""However a step is cut, loss, gradients and weights are those of one plain process (`weft verify`'s measure)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.support.cases import describe, pairs, parity, saved_model, world_of
from tests.support.pool import run
from tests.support.zoo import OWN_ATTENTION_FAMILIES, PARITY_FAMILIES
from weft.verify.harness import Verdict


def check(family: str, mesh: str, sections: dict[str, dict[str, Any]], steps: int = 2, **changes: Any) -> None:
    """steps: see `parity_of_two_steps`."""
    verdict = run(world_of(mesh), parity, saved_model(family, **changes), mesh, sections, "cpu", steps)[0]
    assert verdict.passed, describe(verdict)


MESHES = ["1", "2", "3", "4", "2x2"]
MORE_FAMILIES = [
    "falcon", "llama4_text", "gpt2", "phi", "mixtral", "glm4_moe", "olmo2", "phi3_longrope", "gemma4_text",
    "opt", "phimoe", "jetmoe",
]  # fmt: skip
# Whose layers carry state: pairs of a family and a mesh.
STATEFUL = [
    ("lfm2", "3"), ("lfm2_moe", "2"), ("qwen3_next", "2"), ("qwen3_5_text", "1"), ("nemotron_h", "3"),
    ("falcon_h1", "1"), ("bamba", "1"), ("jamba", "2"), ("granitemoehybrid", "2x2"), ("zamba2", "1"),
    ("olmo_hybrid", "1"), ("kimi_linear", "2"), ("minimax", "1"), ("mamba", "3"), ("mamba2", "1"),
    ("recurrent_gemma", "2"),
]  # fmt: skip
CASES = [
    *((family, mesh) for family in PARITY_FAMILIES for mesh in MESHES), *((f, "2") for f in MORE_FAMILIES), *STATEFUL,
]  # fmt: skip


def tables() -> list[Any]:
    """Every family on one mesh and every mesh with two families; the other pairs are for `make verify-all`."""
    pairs = [(f, m, (n + 2 * k) % len(MESHES)) for n, f in enumerate(PARITY_FAMILIES) for k, m in enumerate(MESHES)]
    return [pytest.param(f, m, marks=() if index == 0 else pytest.mark.table) for f, m, index in pairs]


@pytest.mark.covers("model.path")
@pytest.mark.parametrize(("family", "mesh"), tables())
def test_families(family: str, mesh: str) -> None:
    check(family, mesh, {})


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_more_families(family: str) -> None:
    check(family, "2", {})


@pytest.mark.parametrize("family", OWN_ATTENTION_FAMILIES)
def test_families_with_attention_of_their_own(family: str) -> None:
    check(family, "2", {})


@pytest.mark.parametrize(("family", "mesh"), STATEFUL)
def test_families_that_carry_state(family: str, mesh: str) -> None:
    check(family, mesh, {})


@pytest.mark.parametrize(("family", "mesh"), pairs([("mamba", "2"), ("lfm2", "1")], [("jamba", "1")]))
def test_state_in_layers_that_are_recomputed(family: str, mesh: str) -> None:
    """The bounds of mamba come by an argument of their own."""
    check(family, mesh, {"model": {"recompute": "full"}})


# Every pair of values of the five switches occurs in some row; reduce tells most where gradients cross two axes.
SWITCHES = [
    # mesh,  reshard, reduce,   recompute, tied,  budget
    ("2x2", True, "every", "none", False, 61),
    ("2x2", True, "scatter", "full", True, 256),
    ("2x2", True, "last", "none", True, 61),
    ("2x2", False, "every", "full", True, 61),
    ("2x2", False, "scatter", "none", False, 61),
    ("2x2", False, "last", "full", False, 256),
    ("4", 2, "every", "full", True, 256),
    ("4", 2, "scatter", "none", True, 61),
    ("4", 2, "last", "full", False, 61),
    ("2x1", True, "scatter", "none", False, 61),
]


EVERY_VALUE = (1, 2, 5, 6, 7, 9)  # rows that have each value of each switch


def switches() -> list[Any]:
    """Each row of EVERY_VALUE with one family of two; the other pairs are for `make verify-all`."""
    rows = [(f, n, (n + k) % 2) for k, f in enumerate(("llama", "qwen3_moe")) for n in range(len(SWITCHES))]
    return [
        pytest.param(
            f, SWITCHES[n], id="-".join(map(str, (f, *SWITCHES[n]))),
            marks=pytest.mark.table if odd or n not in EVERY_VALUE else (),
        )
        for f, n, odd in rows
    ]  # fmt: skip


@pytest.mark.covers("step.max_tokens_per_device")
@pytest.mark.parametrize(("family", "row"), switches())
def test_switches(family: str, row: tuple[str, bool | int, str, str, bool, int]) -> None:
    mesh, reshard, reduce, recompute, tied, budget = row
    sections: dict[str, dict[str, Any]] = {
        "fsdp": {"reshard_after_forward": reshard, "reduce": reduce},
        "model": {"recompute": recompute},
        "step": {"max_tokens_per_device": budget},
    }
    check(family, mesh, sections, tie_word_embeddings=tied)


@pytest.mark.covers("step.padding")
@pytest.mark.parametrize(
    ("family", "shapes"),
    pairs([("llama", "buckets"), ("llama", "fixed"), ("lfm2", "buckets")], [("stablelm", "fixed")]),
)
def test_padded_shapes(family: str, shapes: str) -> None:
    check(family, "2", {"step": {"padding": shapes}})


@pytest.mark.covers("optimizer.name")
@pytest.mark.parametrize(
    "optimizer", [{"name": "sgd", "lr": 1.0}, {"name": "sgd", "momentum": 0.9}, {"max_grad_norm": 0.05}]
)
def test_optimizers(optimizer: dict[str, Any]) -> None:
    check("llama", "2x2", {"optimizer": optimizer}, steps=3)


def parity_sharing_rows(path: str) -> Verdict | None:
    with mock.patch("weft.engine.step_plan.plan.position_limit", return_value=None):
        return parity(path, "1", {"step": {"max_tokens_per_device": 256}})


def test_long_documents_of_longrope_need_rows_of_their_own() -> None:
    verdict = run(1, parity_sharing_rows, saved_model("phi3_longrope"))[0]
    assert "gradients, every parameter" in verdict.failed
