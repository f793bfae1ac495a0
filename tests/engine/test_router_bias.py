"""model.router_bias_rate: correction biases move by the choices of the whole step, on any mesh, and are saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import lines, process
from weft.engine.batch.document import Document
from weft.engine.experts import check_biases, find_biases
from weft.engine.losses.base import CrossEntropy
from weft.engine.selfcheck import architecture
from weft.errors import UserError
from weft.models import families, hf
from weft.models.experts import _ZeroWithoutRows, find_experts
from weft.models.families import Family

RATE = 0.01
LENGTHS = (30, 7, 19, 12, 44)


def documents(step: int) -> list[Document]:
    generator = torch.Generator().manual_seed(step)
    return [Document(torch.randint(0, 96, (n,), generator=generator), torch.ones(n)) for n in LENGTHS]


def moved(path: str, mesh: str, steps: int, sections: dict[str, Any]) -> dict[str, Tensor]:
    """The biases of this rank's layers after some steps."""
    engine = open_engine(path, mesh, **{**sections, "model": {"router_bias_rate": RATE, **sections.get("model", {})}})
    for step in range(steps):
        engine.evaluate(*engine.plan_step(documents(step + 7)), CrossEntropy())  # which is not of the step
        engine.accumulate(*engine.plan_step(documents(step)), CrossEntropy())
        engine.apply(1e-3)
    return {name: bias.clone() for name, bias in find_biases(engine.module).items()}


def count(total_E: Tensor, experts: object, args: tuple[Tensor, ...]) -> None:
    total_E += args[1].flatten().bincount(minlength=len(total_E))


def moved_in_transformers(path: str) -> dict[str, Tensor]:
    """After one step, by the choices of transformers' own forward of each document; a last token predicts nothing."""
    model = hf.model_class(hf.read_config(path)).from_pretrained(path, dtype=torch.float32)
    counts = {name: torch.zeros(layer.num_experts) for name, layer in find_experts(model).items()}
    for name, layer in find_experts(model).items():
        layer.register_forward_pre_hook(partial(count, counts[name]))
    for document in documents(0):
        model(input_ids=document.tokens[:-1][None])
    pairs = zip(find_biases(model).items(), counts.values(), strict=True)
    return {name: bias + RATE * (chosen.mean() - chosen).sign().view_as(bias) for (name, bias), chosen in pairs}


@pytest.mark.covers("model.router_bias_rate")
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "minimax_m2", "lfm2_moe"])
def test_a_step_moves_biases_by_its_choices(family: str) -> None:
    path = saved_model(family)
    expected = moved_in_transformers(path)
    (biases,) = run(1, moved, path, "1", 1, {})
    assert biases.keys() == expected.keys() and expected
    assert all(torch.allclose(biases[name], bias) for name, bias in expected.items())
    assert any(len(bias.unique()) > 1 for bias in expected.values())


def moved_in_padded_rows(path: str) -> dict[str, Tensor]:
    architecture.forget_checks()  # of the packed family, by an earlier test in this process
    with mock.patch.dict(families.FAMILIES, glm4_moe=Family(layout="padded")):
        engine = open_engine(path, "1")
        plan, _ = engine.plan_step(documents(0))
        assert engine.built.layout == "padded" and any(len(row) > 1 for rows in plan.rows for row in rows)
        result = moved(path, "1", 1, {})
    architecture.forget_checks()
    return result


def test_padding_between_documents_is_no_choice_of_experts() -> None:
    """No shipped family with such routers is padded; one that a check finds to leak in rows would be."""
    path = saved_model("glm4_moe")
    expected = moved_in_transformers(path)
    (biases,) = run(1, moved_in_padded_rows, path)
    assert all(torch.allclose(biases[name], bias) for name, bias in expected.items())


SMALL_ROWS = {"step": {"max_tokens_per_device": 64}}
MESHES: dict[str, dict[str, Any]] = {
    "3": {}, "4ep2": {"model": {"recompute": "full"}}, "2xtp2": SMALL_ROWS, "pp2": SMALL_ROWS,
    "2xcp2": {"step": {"max_tokens_per_device": 24}},
}  # fmt: skip


@pytest.mark.parametrize("mesh", pairs([("4ep2",), ("2xtp2",), ("pp2",), ("2xcp2",)], [("3",)]))
def test_no_mesh_changes_them(mesh: str) -> None:
    path = saved_model("glm4_moe")
    (expected,) = run(1, moved, path, "1", 3, {})
    biases = [item for rank in run(world_of(mesh), moved, path, mesh, 3, MESHES[mesh]) for item in rank.items()]
    assert {name for name, _ in biases} == expected.keys()
    assert all(torch.equal(bias, expected[name]) for name, bias in biases)


def test_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    sections = {"model": {"router_bias_rate": RATE}, "checkpoint": {"every": 2}}
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    process(uninterrupted, "2", sections=sections, family="glm4_moe")
    process(parts, "2", steps=4, sections=sections, family="glm4_moe")
    process(parts, "2", resume=True, sections=sections, family="glm4_moe")
    assert lines(uninterrupted) == lines(parts)
    weights = [load_file(folder / "checkpoints" / "latest" / "model.safetensors") for folder in (uninterrupted, parts)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    biases = [tensor for name, tensor in weights[0].items() if name.endswith("e_score_correction_bias")]
    assert biases and any(len(bias.unique()) > 1 for bias in biases)


def opened(path: str) -> None:
    open_engine(path, "1", model={"router_bias_rate": RATE})


def test_a_family_without_them_is_refused() -> None:
    with pytest.raises(
        AssertionError, match=r"model\.router_bias_rate: the routers of mixtral have no correction biases"
    ):
        run(1, opened, saved_model("mixtral"))


def test_biases_of_experts_whose_choices_are_not_counted_are_refused() -> None:
    """Choices are seen where experts go through transformers' interface."""
    experts = nn.Module()
    experts.down_proj, experts.num_experts = nn.Parameter(torch.zeros(2, 4, 3)), 2
    block = nn.ModuleDict({"experts": experts})
    block.register_buffer("e_score_correction_bias", torch.zeros(2))
    layers = nn.ModuleList([block])
    with pytest.raises(UserError, match="the routers of toy have no correction biases"):
        check_biases(layers, "toy")
    experts.has_gate, experts.is_transposed = True, False
    check_biases(layers, "toy")


def test_gradients_of_experts_without_rows_are_0_whatever_a_kernel_leaves_there() -> None:
    weight = torch.ones(3, 2, 2, requires_grad=True)
    upstream = torch.stack([torch.full((2, 2), value) for value in (5.0, float("nan"), 7.0)])
    (gradient,) = torch.autograd.grad(_ZeroWithoutRows.apply(weight, torch.tensor([1, 1, 4])), weight, upstream)
    assert gradient[:, 0, 0].tolist() == [5.0, 0.0, 7.0]
