"""`weft verify` in 16 bits: an engine is about as far from fp32 as plain transformers are in the same dtype, and what
it loses beyond that is seen."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from weft.verify.documents import awkward_steps
from weft.verify.harness import Figure
from weft.verify.narrow import (
    NarrowResults,
    compare_as_configured,
    gradient_errors,
    judge_narrow,
    row_errors,
    share_along,
)
from weft.verify.plants import planted

Sections = dict[str, dict[str, Any]]
NEIGHBOURS = "other documents do not change, configured dtypes"
ALL = ["readout: logprob", "loss", "gradients, every parameter", "gradients of each token's row"]
BALANCED: Sections = {"model": {"router_aux_loss": "document", "router_aux_loss_coef": 0.001}}


def in_16_bits(
    path: str, mesh: str, dtype: str, sections: Sections, plant: str | None = None
) -> tuple[list[Figure], str]:
    with planted(plant):
        engine = open_engine(path, mesh, **{**sections, "fsdp": {"param_dtype": dtype, **sections.get("fsdp", {})}})
        return compare_as_configured(engine, path, awkward_steps(128)[0])


@pytest.mark.parametrize(("family", "mesh", "dtype"), pairs(
    [("llama", "2", "bf16"), ("gemma2", "1", "fp16"), ("qwen3", "cp2", "fp16"), ("gpt_oss", "tp2", "bf16"),
     ("mamba2", "1", "bf16")],
    [("deepseek_v3", "1", "bf16"), ("llama", "pp2", "fp16"), ("gemma4_text", "1", "bf16"), ("zamba2", "1", "fp16"),
     ("phi3_longrope", "tp2", "bf16"), ("jamba", "1", "bf16"), ("opt", "1", "fp16")],
))  # fmt: skip
def test_an_engine_is_as_near_to_fp32_as_plain_transformers(family: str, mesh: str, dtype: str) -> None:
    figures, remark = run(world_of(mesh), in_16_bits, saved_model(family), mesh, dtype, {})[0]
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert [figure.name for figure in figures] == [NEIGHBOURS, *(f"{quantity}, {name}" for quantity in ALL)]
    assert [figure for figure in figures if not figure.passed] == []
    assert all(figure.noise is not None and figure.value < 2 * figure.noise for figure in figures[1:]), figures
    assert "verdict: at most 4 times the difference of plain transformers in this dtype" in remark


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_auxiliary_loss_counts_in_16_bits(dtype: str) -> None:
    figures, _ = run(2, in_16_bits, saved_model("qwen3_moe"), "ep2", dtype, BALANCED)[0]
    assert figures[-1].name.startswith("scale of the auxiliary loss") and all(figure.passed for figure in figures)


def test_adapters_beside_peft() -> None:
    sections: Sections = {"lora": {"rank": 4, "targets": ("q_proj", "v_proj")}}
    figures, _ = run(1, in_16_bits, saved_model("llama"), "1", "bf16", sections)[0]
    assert len(figures) == 4 and all(figure.passed for figure in figures), figures


def test_wider_masters_than_plain_transformers_have_are_no_verdict() -> None:
    """In fp32 over bf16 masters, only isolation is judged."""
    sections: Sections = {"fsdp": {"master_dtype": "bf16"}}
    figures, remark = run(1, in_16_bits, saved_model("llama"), "1", "fp32", sections)[0]
    assert [figure.name for figure in figures] == [NEIGHBOURS] and "no verdict" in remark


# ---------------------------------------------------------------- what the figures see


def balance_is_scaled(plant: str | None) -> bool:
    figures, _ = run(1, in_16_bits, saved_model("qwen3_moe"), "1", "fp16", BALANCED, plant)[0]
    return bool(figures[-1].passed)


@cache
def with_unlikely_tokens() -> str:
    """A model to which half of the tokens are less likely than 1e-7, whatever the context."""
    folder = Path(tempfile.mkdtemp(prefix="weft-tests-")) / "model"
    shutil.copytree(saved_model("phi"), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.bias"][64:] = -13.0
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def rows_of_unlikely_tokens_are_near(plant: str | None) -> bool:
    figures, _ = run(1, in_16_bits, with_unlikely_tokens(), "1", "fp16", {}, plant)[0]
    (rows,) = [figure for figure in figures if figure.name.startswith("gradients of each token's row")]
    return bool(rows.passed)


def test_lost_parts_of_gradients_are_seen() -> None:
    true = {"a": torch.ones(8), "b": torch.full((8,), 1e-6), "c": torch.zeros(8)}
    assert gradient_errors({**true, "a": true["a"] * 1.5}, true) == pytest.approx({"a": 0.5, "b": 0.0, "c": 0.0})
    assert gradient_errors({"b": true["b"]}, true)["a"] == float("inf")
    assert gradient_errors({**true, "b": true["b"] * 2}, true)["b"] == pytest.approx(
        1e-4
    )  # of a hundredth of the largest
    assert share_along({"a": true["a"] * 0.5}, {"a": true["a"]}) == 0.5
    assert share_along({"a": torch.zeros(8)}, {"a": true["a"]}) == 0.0
    rows = torch.tensor([[1.0, 0.0], [1e-9, 0.0], [0.0, 0.0]])
    assert row_errors(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), rows) == 0.5


@pytest.mark.parametrize(("times", "passes"), [(1.0, True), (3.0, True), (5.0, False)])
def test_the_bound_is_a_multiple_of_what_plain_transformers_round_away(times: float, passes: bool) -> None:
    exact = NarrowResults([torch.zeros(100)], 1.0, {"w": torch.ones(10, 10)}, {})
    off = 0.05
    plain = replace(exact, logprobs=[torch.full((100,), off)], gradients={"w": torch.ones(10, 10) * (1 + off)})
    observed = replace(
        exact, logprobs=[torch.full((100,), times * off)], loss=1.0 + times * off,
        gradients={"w": torch.ones(10, 10) * (1 + times * off)},
    )  # fmt: skip
    figures = judge_narrow(observed, plain, exact, "float16", 1e-3, "w")
    assert len(figures) == 4 and {figure.passed for figure in figures} == {passes}


def test_what_is_no_number_fails() -> None:
    exact = NarrowResults([torch.zeros(4)], 1.0, {"w": torch.ones(2, 2)}, {})
    observed = replace(exact, gradients={"w": torch.full((2, 2), float("nan"))})
    failed = [figure.name for figure in judge_narrow(observed, exact, exact, "float16", 1e-3, "w") if not figure.passed]
    assert failed == ["gradients, every parameter, float16", "gradients of each token's row, float16"]
