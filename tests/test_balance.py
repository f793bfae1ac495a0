"""The experts' auxiliary loss: transformers' own, document by document, whatever the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.cases import describe, open_engine, parity, saved_model, world_of
from tests.pool import run
from weft.config import load_config
from weft.errors import UserError
from weft.objectives.balance import balance_sum
from weft.objectives.cross_entropy import CrossEntropy
from weft.verification.documents import awkward_steps
from weft.verification.observed import to_documents


def test_it_is_transformers_loss_of_each_document() -> None:
    torch.manual_seed(0)
    lengths, experts, top_k = (7, 1, 12), 6, 2
    layers = [torch.randn(25, experts, requires_grad=True) for _ in range(3)]
    owner = torch.cat([torch.full((n,), place) for place, n in enumerate(lengths)] + [torch.full((5,), -1)])
    found = balance_sum(layers, owner, len(lengths), top_k)
    parts = [layer[:20].split(lengths) for layer in layers]
    expected = sum(
        n * load_balancing_loss_func(tuple(part[place] for part in parts), experts, top_k)
        for place, n in enumerate(lengths)
    )
    assert torch.allclose(found, torch.as_tensor(expected), rtol=1e-6)
    ours = torch.autograd.grad(found, layers)
    theirs = torch.autograd.grad(torch.as_tensor(expected), layers)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(ours, theirs, strict=True))
    assert not ours[0][20:].any()  # padding


def test_a_row_without_documents_has_none() -> None:
    logits = [torch.randn(4, 3, requires_grad=True)]
    total = balance_sum(logits, torch.full((4,), -1), 0, 1)
    assert float(total.detach()) == 0.0
    total.backward()  # every rank goes through the same backward


AUX = {"router_aux_loss": "document", "router_aux_loss_coef": 0.1}


@pytest.mark.parametrize(
    ("family", "mesh", "model"),
    [
        ("qwen3_moe", "1", {}),
        ("qwen3_moe", "3", {"recompute": "full"}),
        ("mixtral", "2", {}),
        ("gpt_oss", "2x2", {}),
        ("qwen3_next", "2", {}),
    ],
)
def test_parity_with_transformers_own_loss_of_each_document(family: str, mesh: str, model: dict[str, Any]) -> None:
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, {"model": {**AUX, **model}})[0]
    assert verdict.passed, describe(verdict)


def metrics_of(path: str, model: dict[str, Any]) -> tuple[float, dict[str, float | None], float]:
    engine = open_engine(path, "1", model=model)
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    metrics = engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    return engine.balance, metrics, engine.gradient_norm()


def test_the_coefficient_is_the_configs_unless_it_is_set() -> None:
    path = saved_model("qwen3_moe")
    default, metrics, norm = run(1, metrics_of, path, {"router_aux_loss": "document"})[0]
    assert default == 0.001 and metrics["aux_loss"] > 1.0
    chosen, again, other = run(1, metrics_of, path, AUX)[0]
    assert chosen == 0.1 and again == metrics and other != norm
    none, without, _ = run(1, metrics_of, path, {})[0]
    assert none == 0.0 and "aux_loss" not in without and without["loss"] == metrics["loss"]


def refusal(path: str) -> str:
    with pytest.raises(UserError) as error:
        open_engine(path, "1", model={"router_aux_loss": "document"})
    return str(error.value)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_family_without_it_is_refused(family: str) -> None:
    assert f"{family} has no auxiliary loss in transformers" in run(1, refusal, saved_model(family))[0]


def test_a_coefficient_without_the_loss_is_refused() -> None:
    with pytest.raises(UserError, match="router_aux_loss_coef would have no effect: model.router_aux_loss is none"):
        load_config([], ["model.path=x", "data.path=y", "model.router_aux_loss_coef=0.1"])
