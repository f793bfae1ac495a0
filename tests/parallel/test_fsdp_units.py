"""fsdp.wrap: which modules are units, what a rank then gathers at a time, and what cannot be a unit."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.cases import (
    ALL_GATHER,
    REDUCE_SCATTER,
    describe,
    open_engine,
    parity,
    parity_of_two_steps,
    saved_model,
    world_of,
)
from tests.support.pool import run
from weft.config.schema import FsdpConfig
from weft.engine.describe import unit_rows
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.models import hf
from weft.models.train_module import TrainModule
from weft.parallel.parallelize import is_one_unit
from weft.parallel.units import Unit, find_units, parameters_by_unit
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict
from weft.verify.observed import to_documents

L0, L1 = "model.layers.0", "model.layers.1"
ATTENTION = [f"{layer}.self_attn" for layer in (L0, L1)]
MLP = [f"{layer}.mlp" for layer in (L0, L1)]
EXPERTS = [f"{layer}.mlp.experts" for layer in (L0, L1)]
HEAD = "model.norm + lm_head"
EXPERT_ELEMENTS = 6 * 3 * 40 * 64  # of a qwen3_moe layer: 5 experts, padded to two shards of three


def name_of(value: object) -> str:
    """Of a case, the same in every process: sets have no order of their own."""
    return str(sorted(value) if isinstance(value, set) else value)[:40]


# family, fsdp.wrap, its units in the order of sharding, what the root keeps
UNITS: list[tuple[str, Any, list[str], set[str]]] = [
    ("llama", ("layers", "head"), [L0, L1, HEAD], {"model.embed_tokens.weight"}),
    ("llama", ("LlamaDecoderLayer",), [L0, L1], {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}),
    ("llama", ("layers", "embedding", "head"), [L0, L1, "model.embed_tokens", HEAD], set()),
    ("llama", ("LlamaMLP", "LlamaAttention", "layers", "head"), [*ATTENTION, *MLP, L0, L1, HEAD], {
        "model.embed_tokens.weight"}),
    ("llama", ("LlamaModel", "head"), ["model.norm + lm_head", "model"], set()),
    ("llama", (), [], {"everything"}),
    ("llama_tied", ("layers",), [L0, L1], {"model.embed_tokens.weight", "model.norm.weight"}),
    ("qwen3_moe", ("layers", "head", "Qwen3MoeExperts"), [*EXPERTS, L0, L1, HEAD], {"model.embed_tokens.weight"}),
    ("qwen3_moe", ("Qwen3MoeExperts",), EXPERTS, {"most"}),
]  # fmt: skip


def test_parameters_of_an_inner_unit_are_its_own() -> None:
    """Else what is gathered at a time would be counted twice."""
    outer = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4)))
    inner, first = outer[1], outer[0]
    by_unit = parameters_by_unit([Unit(("1",), (inner,)), Unit(("",), (outer,))])
    assert [[id(p) for p in parameters] for parameters in by_unit] == [
        [id(p) for p in m.parameters()] for m in (inner, first)
    ]


def units(path: str, wrap: Any) -> tuple[list[str], set[str], int, int]:
    """Names of the units, the parameters that the root keeps, and the elements of the table's rows and of the model."""
    engine = open_engine(path, "1", fsdp={"wrap": wrap})
    owned = {id(p) for unit in engine.units for module in unit.modules for p in module.parameters()}
    root = {n for n, p in engine.module.named_parameters() if id(p) not in owned}
    rows = sum(row["parameters"] for row in unit_rows(engine))
    return [u.name for u in engine.units], root, rows, sum(p.numel() for p in engine.module.parameters())


@pytest.mark.covers("fsdp.wrap")
@pytest.mark.parametrize(("family", "wrap", "names", "root"), UNITS, ids=name_of)
def test_units(family: str, wrap: Any, names: list[str], root: set[str]) -> None:
    unit_names, unsharded, rows, elements = run(1, units, saved_model(family), wrap)[0]
    assert sorted(unit_names) == sorted(names)
    assert all(
        not b.startswith(f"{a}.") for index, a in enumerate(unit_names) for b in unit_names[index:]
    )  # inner ones first
    assert len(unsharded) > 2 if root in ({"everything"}, {"most"}) else unsharded == root
    assert rows == elements


def on_one_device(path: str) -> list[bool]:
    """Whether `auto` leaves all to the root: on CUDA, with a model that is too large, with a frozen base in the compute
    dtype, with overrides, on the CPU."""
    engine = open_engine(path, "1")
    module, mesh, cuda = nn.Linear(2**15, 2**15, bias=False, device="meta"), engine.mesh, torch.device("cuda")
    auto, bf16, large = FsdpConfig(), torch.bfloat16, nn.Linear(2**15, 2**15 + 1, device="meta")
    frozen = nn.Sequential(large, nn.Linear(4, 4)).to(bf16)
    large_alone = is_one_unit(large, mesh, auto, bf16, cuda)
    large.requires_grad_(False)
    return [
        is_one_unit(module, mesh, auto, bf16, cuda), large_alone, is_one_unit(frozen, mesh, auto, bf16, cuda),
        is_one_unit(module, mesh, FsdpConfig(overrides={"0": "replicate"}), bf16, cuda),
        is_one_unit(module, mesh, auto, bf16, torch.device("cpu")),
    ]  # fmt: skip


def test_a_small_model_on_a_single_cuda_device_is_one_unit() -> None:
    assert run(1, on_one_device, saved_model("llama")) == [[True, False, True, False, False]]


@pytest.mark.parametrize(
    ("family", "wrap", "recompute"),
    [
        *((family, wrap, "none") for family, wrap, _, _ in UNITS[3:]),
        *(pytest.param(*unit[:2], "none", marks=pytest.mark.table) for unit in UNITS[:3]),
        ("llama", ("LlamaMLP", "LlamaAttention", "layers", "head"), "full"),
        ("qwen3_moe", ("layers", "head", "Qwen3MoeExperts"), "full"),
    ],
    ids=name_of,
)
def test_parity(family: str, wrap: Any, recompute: str) -> None:
    sections = {"fsdp": {"wrap": wrap}, "model": {"recompute": recompute}}
    verdict = run(2, parity_of_two_steps, saved_model(family), "2", sections)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize(("mesh", "reshard"), [("2x2", False), ("4", 2)])
def test_parity_on_other_meshes(mesh: str, reshard: bool | int) -> None:
    sections = {"fsdp": {"wrap": ("layers", "Qwen3MoeExperts", "embedding"), "reshard_after_forward": reshard}}
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model("qwen3_moe"), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


# ---------------------------------------------------------------- a bug in a nested unit


def unsummed(path: str) -> Verdict | None:
    """Parity where the gradients of the experts' units are kept to the rank, as if their reduction were forgotten."""
    scatter = getattr(dist, REDUCE_SCATTER)

    def copy_local(output: Tensor, input: Tensor, *args: Any, **options: Any) -> Any:
        if input.numel() == EXPERT_ELEMENTS:
            group = options["group"]
            output.copy_(input.view(dist.get_world_size(group), -1)[dist.get_rank(group)])
            return None
        return scatter(output, input, *args, **options)

    with mock.patch.object(dist, REDUCE_SCATTER, lambda **o: copy_local(o.pop("output"), o.pop("input"), **o)):
        return parity(path, "2", {"fsdp": {"wrap": ("layers", "head", "Qwen3MoeExperts")}})


def test_parity_sees_experts_that_are_not_summed() -> None:
    verdict = run(2, unsummed, saved_model("qwen3_moe"))[0]
    assert "gradients, every parameter" in verdict.failed


# ---------------------------------------------------------------- effects


def gathers(path: str, wrap: Any) -> tuple[Counter[int], int]:
    """Elements of each all-gather of one forward -> how often; and of the largest reduce-scatter."""
    engine, gathered, reduced = open_engine(path, "2", fsdp={"wrap": wrap}), [], []
    documents, metas = to_documents(engine, awkward_steps(128)[1])
    gather, scatter = getattr(dist, ALL_GATHER), getattr(dist, REDUCE_SCATTER)

    def watch(log: list[int], name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            log.append((options[name] if name in options else args[0]).numel())
            return original(*args, **options)

        return call

    with (
        mock.patch.object(dist, ALL_GATHER, watch(gathered, "output", gather)),
        mock.patch.object(dist, REDUCE_SCATTER, watch(reduced, "input", scatter)),
    ):
        engine.readout(engine.plan(metas), documents)
        forward = Counter(gathered)
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    return forward, max(reduced)


def test_a_unit_is_gathered_and_reduced_by_itself() -> None:
    path = saved_model("qwen3_moe")
    undivided, largest = run(2, gathers, path, "auto")[0]
    parts, smaller = run(2, gathers, path, ("layers", "head", "Qwen3MoeExperts"))[0]
    assert EXPERT_ELEMENTS not in undivided and parts[EXPERT_ELEMENTS] == 2
    assert sum(parts.values()) == sum(undivided.values()) + 2
    assert smaller == EXPERT_ELEMENTS < largest


# ---------------------------------------------------------------- what cannot be a unit


def refusal(path: str, wrap: Any) -> str:
    with pytest.raises(UserError) as caught:
        open_engine(path, "1", fsdp={"wrap": wrap})
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "wrap", "words"),
    [
        ("llama", ("LlamaLayer",), "no module of class LlamaLayer"),
        ("llama", ("LlamaLayer",), "LlamaAttention, LlamaDecoderLayer, LlamaMLP"),
        ("llama", ("ModuleList",), "no module of class ModuleList"),
        ("llama_tied", ("layers", "head"), "lm_head.weight and model.embed_tokens.weight are one tensor (tied)"),
        ("llama_tied", ("embedding",), "model.embed_tokens cannot be a separate unit"),
        ("zamba2", ("Zamba2HybridLayer",), "are one tensor (tied)"),
    ],
)
def test_refusals(family: str, wrap: Any, words: str) -> None:
    assert words in run(1, refusal, saved_model(family), wrap)[0]


class Expert(nn.Linear):
    pass


class SparseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(4, 4) for _ in range(2)])


def test_single_experts_of_a_list_are_refused_with_the_reason() -> None:
    model = hf.build_random(hf.read_config(saved_model("llama")), dtype=torch.float32, attention="eager", seed=0)
    for layer in model.model.layers:
        layer.mlp = SparseBlock()
    module = TrainModule(model)
    with pytest.raises(UserError, match=r"in the list model.layers.0.mlp.experts.* the list, SparseBlock\."):
        find_units(module, ("layers", "Expert"))
    assert len(find_units(module, ("layers", "SparseBlock"))) == 4
