"""Expert parallelism: gradients and steps of plain transformers, however experts are dealt to ranks.

Pairs of family and mesh are chosen so that each way is met: softmax and sigmoid routers, correction biases, shared
experts, biases of experts, transposed weights, experts that see every token (llama4), numbers of experts that do not
divide, mixers with a state; several ranks with the same experts, replicas, tp and cp beside it.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.cases import (
    describe,
    graphs_as_traced,
    open_engine,
    pairs,
    parity_of_two_steps,
    saved_model,
    world_of,
)
from tests.support.pool import run
from tests.support.zoo import tiny_config
from weft.engine.batch.document import Document
from weft.engine.engine import StepResult
from weft.engine.losses.base import CrossEntropy
from weft.engine.selfcheck.architecture import examine
from weft.engine.selfcheck.division import check_experts
from weft.engine.selfcheck.harness import in_threads
from weft.errors import UserError
from weft.models import experts, hf
from weft.ops import dispatch
from weft.ops.dispatch import ExpertPlacement
from weft.ops.recompute import contexts, reuse_in_recompute
from weft.parallel.fsdp import fsdp_modules
from weft.parallel.mesh import local_shard
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

SHORT = {"step": {"max_tokens_per_device": 40}}  # with cp, documents are cut
CASES = [
    ("gpt_oss", "ep2xtp2"), ("deepseek_v3", "pp2xep2"), ("glm4_moe", "4ep2"), ("llama4_text", "ep2"),
    ("qwen3_moe", "ep2xcp2"), ("qwen3_moe", "3ep3"), ("qwen3_next", "ep2"),
]  # fmt: skip
TABLE = [
    ("mixtral", "ep4"),  # on ep2 it runs, without a bug, in tests/verify/test_plants_on_meshes.py
    ("gpt_oss", "ep4xcp2"), ("jamba", "ep2"), ("jamba", "ep2xtp2"), ("mixtral", "cp2ep2"), ("deepseek_v3", "2xep2"),
    ("qwen3_moe", "ep2"), ("qwen3_moe", "pp2xep2"), ("gpt_oss", "pp2xep2xcp2"),
]  # fmt: skip
EXPERTS = ("experts.gate_up_proj", "experts.down_proj", "q_proj")
KNOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "recompute and last": ("qwen3_moe", "4ep2", {"model": {"recompute": "full"}, "fsdp": {"reduce": "last"}}),
    "scatter and offload": ("mixtral", "2xep2", {"fsdp": {"reduce": "scatter", "cpu_offload": True}}),
    "experts balanced": (
        "qwen3_moe", "ep2", {"model": {"router_aux_loss": "document", "router_aux_loss_coef": 0.1}},
    ),
    "experts balanced by step": (
        "qwen3_moe", "ep2xcp2",
        SHORT | {"model": {"router_aux_loss": "step", "router_aux_loss_coef": 0.1}},
    ),
    "lora on experts": ("qwen3_moe", "4ep2", {"lora": {"rank": 3, "targets": EXPERTS}}),
    "lora on experts with tp": ("gpt_oss", "ep2xtp2", {"lora": {"rank": 2, "targets": EXPERTS}}),
    "wrapped by class": ("qwen3_moe", "ep2", {"fsdp": {"wrap": ["Qwen3MoeExperts", "layers", "head"], "prefetch": 1}}),
    "replicated layers": ("mixtral", "4ep2", {"fsdp": {"overrides": {"*.self_attn": "replicate"}}}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "mesh"), pairs(CASES, TABLE))
def test_steps_are_those_of_plain_transformers(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, SHORT if "cp" in mesh else {})[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("name", KNOBS)
def test_with_other_knobs(name: str) -> None:
    family, mesh, sections = KNOBS[name]
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def gradients(path: str, compiled: bool) -> dict[str, Tensor]:
    """Of one step on ep 2."""
    with graphs_as_traced():
        engine = open_engine(path, "ep2", model={"compile": compiled})
        engine.accumulate(*engine.plan_step(documents()), CrossEntropy())
    return {name: gradient for name, gradient in engine.gradients() if gradient is not None}


@pytest.mark.table  # with shards, tp and pp layers are compiled in the suite
def test_with_compiled_layers() -> None:
    path = saved_model("qwen3_moe", num_hidden_layers=1)
    compiled, plain = (run(2, gradients, path, compile_layers)[0] for compile_layers in (True, False))
    for name, expected in plain.items():
        difference = float((compiled[name] - expected).abs().max() / expected.abs().max())
        assert difference < 1e-5, (name, difference)


# ---------------------------------------------------------------- what a rank holds


def held(path: str, mesh: str) -> tuple[dict[str, tuple[int, ...]], int]:
    """(local shapes of the experts of the first layer, ranks that they are sharded over)."""
    engine = open_engine(path, mesh)
    layer = engine.module.layers[0][1]
    shapes = {name: tuple(p.to_local().shape) for name, p in layer.mlp.experts.named_parameters()}
    sharded = next(unit for unit in fsdp_modules(layer.mlp) if unit is layer.mlp.experts)
    group = sharded._get_fsdp_state()._fsdp_param_group
    assert group is not None
    return shapes, group.mesh_info.mesh.size()


def count_exchanges(path: str, recompute: str) -> tuple[int, int]:
    """(exchanges of numbers of rows in a step, forwards of a layer's experts)."""
    engine = open_engine(path, "ep2", model={"recompute": recompute}, step={"max_tokens_per_device": 64})
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    plan = engine.plan(metas)
    with mock.patch.object(dispatch, "_exchange_counts", wraps=dispatch._exchange_counts) as exchange:
        engine.accumulate(plan, documents, CrossEntropy())
    return exchange.call_count, plan.micro_batches * len(experts.find_experts(engine.module))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_numbers_of_rows_are_exchanged_once_and_not_in_recomputation(recompute: str) -> None:
    """The host waits for each of these exchanges."""
    for exchanged, forwards in run(2, count_exchanges, saved_model("qwen3_moe"), recompute):
        assert exchanged == forwards >= 4


def test_what_a_recomputed_layer_keeps() -> None:
    """Each layer has its own results, in any order of backwards, and again where a graph is retained."""
    drawn = iter(range(100))

    def layer(x: Tensor) -> Tensor:
        return x * reuse_in_recompute(lambda: next(drawn)) + x * reuse_in_recompute(lambda: next(drawn))

    x = torch.ones(1, requires_grad=True)
    outputs = [checkpoint(layer, x, use_reentrant=False, context_fn=contexts) for _ in range(3)]
    assert [int(out) for out in outputs] == [0 + 1, 2 + 3, 4 + 5]
    for out, value in reversed([*zip(outputs, (1, 5, 9), strict=True)]):
        for _ in range(2):
            assert int(torch.autograd.grad(out, x, retain_graph=True)[0]) == value
    assert reuse_in_recompute(lambda: next(drawn)) == 6  # outside of a layer


@pytest.mark.covers("mesh.ep")
def test_a_rank_holds_its_experts_and_shards_them_over_those_that_hold_the_same() -> None:
    for rank, (shapes, ranks) in enumerate(run(4, held, saved_model("mixtral"), "4ep2")):
        assert (shapes["gate_up_proj"][0], ranks) == (1, 2), rank  # 4 experts, over ep 2 and 2 ranks each
    five = [shapes["down_proj"][0] for shapes, _ in run(3, held, saved_model("qwen3_moe"), "3ep3")]
    assert five == [1, 2, 2]


def two_engines(path: str) -> tuple[bool, bool]:
    """Whether the experts of one engine, and of another in the same process, are divided."""
    divided, undivided = open_engine(path, "ep2"), open_engine(path, "2")

    def is_divided(engine: Any) -> bool:
        return hasattr(engine.module.layers[0][1].mlp.experts, "weft_axis")

    return is_divided(divided), is_divided(undivided)


def test_two_engines_of_a_process_do_not_see_each_others_experts() -> None:
    assert run(2, two_engines, saved_model("qwen3_moe"))[0] == (True, False)


def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    return [Document(torch.randint(0, 96, (n,), generator=generator), torch.ones(n)) for n in (30, 7, 19, 1, 44)]


def load_of_a_step(path: str, mesh: str, sections: dict[str, Any]) -> dict[str, float | None]:
    engine = open_engine(path, mesh, **sections)
    metrics = engine.accumulate(*engine.plan_step(documents()), CrossEntropy())
    counted = engine._executor.load.last
    assert counted is not None
    assert set(counted.sum(1).tolist()) == {2 * sum(max(1, len(document) - 1) for document in documents())}
    return {name: value for name, value in metrics.items() if name.startswith("experts/")}


def load_in_transformers(path: str) -> float:
    """max / mean of the choices of a layer's four experts, the mean over layers; a last token predicts nothing."""
    model = hf.model_class(hf.read_config(path)).from_pretrained(path, dtype=torch.float32)
    counts: list[Tensor] = []
    for document in documents():
        ids = document.tokens[: max(1, len(document) - 1)][None]
        logits = model(input_ids=ids, output_router_logits=True).router_logits
        counts.append(torch.stack([of_layer.topk(2)[1].flatten().bincount(minlength=4) for of_layer in logits]))
    total_LE = torch.stack(counts).sum(0).double()
    return float((total_LE.amax(1) / total_LE.mean(1)).mean())


def test_the_load_of_experts_is_that_of_the_step_however_it_is_cut() -> None:
    path = saved_model("mixtral")
    expected = pytest.approx(load_in_transformers(path))
    assert run(1, load_of_a_step, path, "1", {})[0] == {"experts/max_load": expected}
    for mesh, sections in (("ep2", {"model": {"recompute": "full"}}), ("ep2xtp2", {"step": {"padding": "buckets"}})):
        metrics = run(world_of(mesh), load_of_a_step, path, mesh, sections)[0]
        assert metrics["experts/max_load"] == expected
        assert 0.2 < (metrics["experts/sent"] or 0) < 0.8


def nan_of_a_router(path: str) -> tuple[float | None, StepResult]:
    """The loss and the outcome of a step of a model one of whose routers gives NaN."""
    engine = open_engine(path, "ep2")
    with torch.no_grad():
        local_shard(engine.module.get_parameter("model.layers.0.mlp.gate.weight")).fill_(float("nan"))
    metrics = engine.accumulate(*engine.plan_step(documents()), CrossEntropy())
    return metrics["loss"], engine.apply(1e-3)


def test_a_router_that_gives_nan_is_a_step_that_is_skipped() -> None:
    for loss, result in run(2, nan_of_a_router, saved_model("mixtral")):
        assert loss != loss and result.skipped
        assert "rank 0, micro-batch 1" in result.reason


# ---------------------------------------------------------------- the exchange alone


def exchanged(
    choices: list[Tensor], hidden: list[Tensor], sizes: tuple[int, ...], idle: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """The sum of what comes back to each token, and the gradient of token number x this sum, where expert e multiplies
    by e + 1 and a choice has the weight expert + 0.5. idle: grows by the ranks to whose experts no row came."""

    def on_rank(rank: int, groups: Any) -> tuple[Tensor, Tensor]:
        axis = ExpertPlacement(rank, sizes, groups(tuple(range(len(sizes))), rank))
        tokens = hidden[rank].clone().requires_grad_()
        order, ends = dispatch.sort_by_expert(choices[rank], sum(sizes))
        chosen = choices[rank].shape[1]
        weights = dispatch.permuted((choices[rank] + 0.5).reshape(-1), order)
        dispatched = dispatch.dispatch(dispatch.rows_of(tokens, order, chosen), ends, axis, weights)
        assert dispatched.weights_R is not None
        if not sum(dispatched.received):  # a grouped matmul without rows would fail or hang in backward
            assert dispatched.rows_RH.tolist() == [[0.0, 0.0]] and (dispatched.ends == 1).all()
            idle.append(rank)
        first = sum(sizes[:rank])
        number = torch.searchsorted(dispatched.ends, torch.arange(len(dispatched.rows_RH)), right=True) + first + 1
        rows = dispatched.rows_RH * (number * dispatched.weights_R)[:, None]
        back = dispatch.sum_of_choices(dispatch.combine(rows, dispatched, axis), order, chosen)
        (back * torch.arange(1.0, len(tokens) + 1)[:, None]).sum().backward()
        assert tokens.grad is not None
        return back.detach(), tokens.grad

    return in_threads(len(sizes), on_rank)


def test_rows_of_any_number_travel_to_their_experts_and_back() -> None:
    """Ranks without tokens, experts that nobody chose, uneven numbers of experts."""
    draws, idle = random.Random(0), list[int]()
    for case in range(100):
        generator = torch.Generator().manual_seed(case)
        sizes = tuple(draws.randint(1, 3) for _ in range(draws.randint(2, 4)))
        chosen = draws.randint(1, min(3, sum(sizes)))
        used = draws.randint(chosen, sum(sizes))
        counts = [draws.choice([0, 1, 5, 17]) for _ in sizes]
        scores = [torch.rand(n, used, generator=generator) for n in counts]
        choices = [s.topk(chosen).indices for s in scores]
        hidden = [torch.randn(n, 2, generator=generator) for n in counts]
        for rank, (back, gradient) in enumerate(exchanged(choices, hidden, sizes, idle)):
            factors = ((choices[rank] + 1) * (choices[rank] + 0.5)).sum(1)[:, None]
            torch.testing.assert_close(back, hidden[rank] * factors)
            numbers = torch.arange(1.0, counts[rank] + 1)[:, None]
            torch.testing.assert_close(gradient, (factors * numbers).expand(-1, 2))
    assert len(idle) > 10


# ---------------------------------------------------------------- before it starts

DIVIDED = (
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "llama4_text", "jamba", "qwen3_next", "olmoe",
    "qwen2_moe", "granitemoe", "phimoe", "minimax_m2", "lfm2_moe", "nemotron_h", "granitemoehybrid", "kimi_linear",
    "minimax", "qwen3_5_moe_text",
)  # fmt: skip


def checked(family: str, ep: int) -> float:
    config = hf.without_noise(tiny_config(family))
    return check_experts(config, examine(config), ep)


@pytest.mark.parametrize(("family", "ep"), [
    pytest.param(family, ep, marks=marks) for ep, marks in ((3, ()), (2, pytest.mark.table)) for family in DIVIDED
])  # fmt: skip
def test_experts_of_a_small_copy_of_each_family_are_divided(family: str, ep: int) -> None:
    """Three ranks, whose experts are not equally many; and in the table two."""
    assert checked(family, ep) < 5e-5


def test_overrides_of_experts_are_refused() -> None:
    with pytest.raises(
        AssertionError, match=r"fsdp\.overrides: .*experts is replicate, but mesh\.ep shards .*mesh\.ep=1"
    ):
        run(2, overridden, saved_model("mixtral"))


def overridden(path: str) -> None:
    open_engine(path, "ep2", fsdp={"overrides": {"*.experts": "replicate"}})


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"mesh\.ep=2: weft finds no experts in a model of type llama\. Set mesh\.ep=1"):
        checked("llama", 2)


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"mesh\.ep=4 is more than the 2 experts .*\. Set mesh\.ep to 2 or less"):
        run(4, open_engine, saved_model("mixtral", num_local_experts=2), "ep4")


def test_a_bug_is_seen_at_the_start() -> None:
    """Many more are in tests/verify/test_plants_on_meshes.py."""
    with mock.patch.object(experts, "permuted", lambda rows, order: rows), pytest.raises(UserError, match="differ"):
        checked("mixtral", 2)
