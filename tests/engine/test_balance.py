"""The experts' auxiliary loss: transformers' own, of each document or of the whole step, whatever the cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.support.cases import describe, open_engine, pairs, parity_of_two_steps, saved_model, world_of
from tests.support.pool import run
from weft.config import load_config
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.models import train_module
from weft.models.balance import Balance, balance_sum, count_choices
from weft.ops.segments import ROOT, Segments
from weft.parallel.mesh import local_shard
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents
from weft.verify.reference import Reference


def test_it_is_transformers_loss_of_each_document() -> None:
    torch.manual_seed(0)
    lengths, experts, top_k = (7, 1, 12), 6, 2
    layers = [torch.randn(25, experts, requires_grad=True) for _ in range(3)]
    owner = torch.cat([torch.full((n,), document) for document, n in enumerate(lengths)] + [torch.full((5,), -1)])
    actual = balance_sum(layers, Balance(owner, len(lengths), top_k))
    parts = [layer[:20].split(lengths) for layer in layers]
    expected = sum(
        n * load_balancing_loss_func(tuple(part[document] for part in parts), experts, top_k)
        for document, n in enumerate(lengths)
    )
    assert torch.allclose(actual, torch.as_tensor(expected), rtol=1e-6)
    gradients = torch.autograd.grad(actual, layers)
    reference_gradients = torch.autograd.grad(torch.as_tensor(expected), layers)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(gradients, reference_gradients, strict=True))
    assert not gradients[0][20:].any()  # padding


@pytest.mark.parametrize("step", [False, True])
def test_a_token_that_documents_share_counts_in_each(step: bool) -> None:
    """The row of trees has the loss and the gradients of the row of its documents."""
    torch.manual_seed(0)
    experts, top_k = 6, 2
    tree = Segments((5, 3, 2, 4, 1, 3), (ROOT, 0, 1, 0, ROOT, ROOT), (2, 1, 3, 4, 0))
    shared = [torch.randn(18, experts, requires_grad=True) for _ in range(3)]
    owner = torch.arange(5).repeat_interleave(torch.tensor(tree.document_lengths))
    cpu = torch.device("cpu")
    balances = [
        Balance(tree.segment_T(cpu), 5, top_k, holders_DS=tree.holders_DS(cpu)), Balance(owner, 5, top_k),
    ]  # fmt: skip
    layers = [shared, [layer[tree.document_tokens(cpu)] for layer in shared]]
    counts = [count_choices(row, balance) for row, balance in zip(layers, balances, strict=True)]
    torch.testing.assert_close(*counts)
    if step:
        shares = counts[1].sum(0) / (3 * len(owner))
        balances = [replace(balance, shares_E=shares) for balance in balances]
    losses = [balance_sum(row, balance) for row, balance in zip(layers, balances, strict=True)]
    torch.testing.assert_close(*losses)
    gradients, references = (torch.autograd.grad(loss, shared) for loss in losses)
    for gradient, expected in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, expected)
    assert not gradients[0][15:].any()  # padding


def test_of_a_step_its_rows_add_up_to_transformers_loss_of_all_tokens() -> None:
    torch.manual_seed(0)
    experts, top_k, tokens = 6, 2, (9, 4)
    rows = [[torch.randn(n + 2, experts, requires_grad=True) for _ in range(3)] for n in tokens]
    owners = [torch.cat([torch.arange(n) // 5, torch.tensor([-1, -1])]) for n in tokens]
    balances = [Balance(owner, int(owner.max()) + 1, top_k) for owner in owners]
    counts = [count_choices(row, balance).sum(0) for row, balance in zip(rows, balances, strict=True)]
    shares = sum(counts) / (3 * sum(tokens))
    assert isinstance(shares, torch.Tensor) and float(shares.sum()) == pytest.approx(top_k)
    parts = [balance_sum(row, replace(balance, shares_E=shares)) for row, balance in zip(rows, balances, strict=True)]
    joined = tuple(torch.cat([row[layer][:n] for row, n in zip(rows, tokens, strict=True)]) for layer in range(3))
    expected = torch.as_tensor(load_balancing_loss_func(joined, experts, top_k))
    assert torch.allclose(sum(parts) / sum(tokens), expected, rtol=1e-6)
    gradients = torch.autograd.grad(sum(parts) / sum(tokens), [layer for row in rows for layer in row])
    references = torch.autograd.grad(expected, [layer for row in rows for layer in row])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(gradients, references, strict=True))


def test_a_row_without_documents_has_none() -> None:
    logits = [torch.randn(4, 3, requires_grad=True)]
    nobody = Balance(torch.full((4,), -1), 0, 1)
    assert not count_choices(logits, nobody).any()
    total = balance_sum(logits, nobody)
    assert float(balance_sum(logits, replace(nobody, shares_E=torch.ones(3))).detach()) == 0.0
    assert float(total.detach()) == 0.0
    total.backward()  # every rank goes through the same backward


AUX = {"router_aux_loss": "document", "router_aux_loss_coef": 0.1}
AUX_STEP = {**AUX, "router_aux_loss": "step"}


@pytest.mark.parametrize(
    ("family", "mesh", "model"),
    pairs([
        ("qwen3_moe", "3", {"recompute": "full"}),
        ("mixtral", "2", {}),
        ("gpt_oss", "2x2", {}),
        ("qwen3_next", "2", {}),
        ("qwen3_moe", "pp2xcp2", {}),
    ], [("qwen3_moe", "1", {}), ("gpt_oss", "pp2", {})]),
)  # fmt: skip
def test_parity_with_transformers_own_loss_of_each_document(family: str, mesh: str, model: dict[str, Any]) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, {"model": {**AUX, **model}})[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.covers("model.router_aux_loss")
@pytest.mark.parametrize(
    ("family", "mesh", "model"),
    pairs([
        ("qwen3_moe", "4", {"recompute": "full"}),
        ("qwen3_moe", "pp2x2", {}),
    ], [("qwen3_moe", "1", {}), ("mixtral", "2", {}), ("gpt_oss", "2x2", {})]),
)  # fmt: skip
def test_parity_with_transformers_own_loss_of_the_whole_step(family: str, mesh: str, model: dict[str, Any]) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, {"model": {**AUX_STEP, **model}})[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize(("mesh", "model"), [("pp2i", AUX), ("pp2v", AUX_STEP)])
def test_parity_in_several_stages_per_rank(mesh: str, model: dict[str, Any]) -> None:
    verdict = run(2, parity_of_two_steps, saved_model("qwen3_moe", num_hidden_layers=4), mesh, {"model": model})[0]
    assert verdict.passed, describe(verdict)


def cuts_of_a_step(path: str, mesh: str) -> list[float]:
    """The metric at several cuts, and what transformers says of all documents as one."""
    engine, losses = open_engine(path, mesh, model=AUX_STEP), []
    steps = awkward_steps(128)[0]
    documents, metas = to_documents(engine, steps)
    for budget in (None, max(len(ids) for ids, _ in steps)):
        metrics = engine.accumulate(engine.plan(metas, budget=budget), documents, CrossEntropy())
        engine.drop_gradients()
        losses.append(metrics["aux_loss"] or 0.0)
    plain = Reference(path, balance=1.0, whole_step=True)
    with torch.no_grad():
        outs = [plain.model(input_ids=torch.tensor([ids]), output_router_logits=True) for ids, _ in steps]
    router_logits = tuple(torch.cat(layer) for layer in zip(*(out.router_logits for out in outs), strict=True))
    config = plain.plain.config
    return [*losses, float(load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok))]


def test_the_metric_is_the_loss_of_the_whole_step_whatever_the_cut() -> None:
    for mesh in ("1", "2", "pp2"):
        *losses, expected = run(world_of(mesh), cuts_of_a_step, saved_model("qwen3_moe"), mesh)[0]
        assert losses == pytest.approx([expected] * len(losses), rel=1e-5)


def counted_twice(path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of a step in two rows: the choices of the pass that counts, and those of the forward with a gradient."""
    engine = open_engine(path, "1", model=AUX_STEP, lora={"rank": 4, "dropout": 0.5})
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if name.endswith(".B"):
                local_shard(parameter).normal_()
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    shares: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []

    def watched(logits: Any, balance: Balance) -> torch.Tensor:
        assert balance.shares_E is not None
        shares.append(balance.shares_E)
        chosen.append(count_choices(logits, balance).sum(0) / len(logits))
        return balance_sum(logits, balance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "balance_sum", watched)
        for _ in range(2):
            engine.accumulate(engine.plan(metas, budget=max(meta.length for meta in metas)), documents, CrossEntropy())
    half = len(chosen) // 2
    tokens = sum(meta.length for meta in metas)
    assert half > 1
    return [(shares[start], torch.stack(chosen[start : start + half]).sum(0) / tokens) for start in (0, half)]


def test_what_is_counted_first_is_what_is_chosen_then_dropout_of_adapters_included() -> None:
    (first, then), (second_first, after) = run(1, counted_twice, saved_model("qwen3_moe"))[0]
    assert torch.allclose(first, then, atol=1e-6) and torch.allclose(second_first, after, atol=1e-6)
    assert not torch.allclose(first, second_first, atol=1e-3)  # dropout is at work


def metrics_of(path: str, model: dict[str, Any]) -> tuple[float, dict[str, float | None], float]:
    engine = open_engine(path, "1", model=model)
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    metrics = engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    return engine.balance, metrics, engine.gradient_norm()


@pytest.mark.covers("model.router_aux_loss_coef")
def test_the_coefficient_is_the_configs_unless_it_is_set() -> None:
    path = saved_model("qwen3_moe")
    default, metrics, norm = run(1, metrics_of, path, {"router_aux_loss": "document"})[0]
    assert default == 0.001 and metrics["aux_loss"] > 1.0
    chosen, repeated, differing = run(1, metrics_of, path, AUX)[0]
    assert chosen == 0.1 and repeated == metrics and differing != norm
    none, without, _ = run(1, metrics_of, path, {})[0]
    assert none == 0.0 and "aux_loss" not in without
    # Its rows leave last tokens out, so that sums are rounded otherwise.
    assert without["loss"] == pytest.approx(metrics["loss"], rel=1e-6)


def refusal(path: str) -> str:
    with pytest.raises(UserError) as error:
        open_engine(path, "1", model={"router_aux_loss": "document"})
    return str(error.value)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_family_without_it_is_refused(family: str) -> None:
    assert f"{family} models have no auxiliary loss in transformers" in run(1, refusal, saved_model(family))[0]


def test_a_coefficient_without_the_loss_is_refused() -> None:
    with pytest.raises(UserError, match="router_aux_loss_coef would have no effect: model.router_aux_loss is none"):
        load_config([], ["model.path=x", "data.path=y", "model.router_aux_loss_coef=0.1"])
