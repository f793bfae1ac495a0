"""What backward runs again: gradients are those of layers that store everything; nothing that is kept runs twice."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.test_offload import LateCopies
from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.vision_zoo import FAMILIES, saved_vision_model
from weft.config.load import load_config
from weft.config.recompute import SELECTIVE, RecomputePolicy
from weft.config.schema import SftConfig
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.ops import offload
from weft.ops.communicator import GroupCommunicator
from weft.ops.recompute import run_layer
from weft.verify.documents import awkward_steps
from weft.verify.observed import one_gradient, to_documents

STEP = awkward_steps(128)[0]
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "attention of 1 in 2": {"recompute": RecomputePolicy(("attention",), 2)},
    "collectives": {"recompute": RecomputePolicy(("collectives",))},
    "full, inputs on the host": {"recompute": "full", "offload_activations": "inputs"},
    "selective, all on the host": {"recompute": "selective", "offload_activations": "kept"},
    "tiles": {"tiled_mlp": 16},
    "full, tiles": {"recompute": "full", "tiled_mlp": 16},
    "selective, all on the host, tiles": {
        "recompute": "selective", "offload_activations": "kept", "tiled_mlp": 16,
    },
}  # fmt: skip


def differing(path: str, mesh: str, modes: list[str], sections: dict[str, Any]) -> dict[str, list[str]]:
    """Mode -> parameters whose gradients are not those of a model that stores everything: bit for bit, and to 1e-5
    with tiles, which add up the tokens' parts of a weight's gradient in another order."""
    results = {}
    for mode in ["none", *modes]:
        changes = {**sections, "model": {**sections.get("model", {}), **MODES[mode]}}
        engine = open_engine(path, mesh, step={"max_tokens_per_device": 70}, **changes)
        transfers = engine.module.offload
        if transfers is not None:  # copies run as late as they may
            transfers.open(torch.device("cpu"), transfers.limit, LateCopies())
        with mock.patch.object(offload, "LAYERS_IN_FLIGHT", 1):
            results[mode] = one_gradient(engine, STEP, None)[:2]
        if transfers is not None:
            traffic = transfers.traffic
            assert traffic.sent > 0 == transfers.used and (traffic.fetched or "pp" in mesh), traffic
            # The CPU's kernel has results for each document, which need more pages than one for the row.
            assert not traffic.stayed or "all" in mode
    loss, plain = results["none"]
    assert all(abs(results[mode][0] - loss) <= 1e-6 * abs(loss) * ("tiles" in mode) for mode in modes)
    return {
        mode: [name for name in plain if _differ(plain[name], results[mode][1][name], 1e-5 * ("tiles" in mode))]
        for mode in modes
    }


def _differ(plain: Tensor, changed: Tensor, tolerance: float) -> bool:
    return not torch.equal(plain, changed) and not float((plain - changed).norm()) <= tolerance * float(plain.norm())


# The last is for models with dense MLPs or shared experts.
HOSTED = ["full, inputs on the host", "selective, all on the host", "full, tiles"]
LORA = {"lora": {"rank": 4, "targets": ("all-linear", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")}}


@pytest.mark.covers("model.recompute", "model.offload_activations", "model.tiled_mlp")
@pytest.mark.parametrize(
    ("family", "mesh", "sections", "modes"),
    [
        ("llama", "1", {}, [mode for mode in MODES if mode != "none"]),
        ("llama", "2xtp2", {}, ["selective", "collectives"]),
        pytest.param("llama", "cp2u2", {}, ["selective"], marks=pytest.mark.table),
        ("llama", "pp2z", {}, ["selective", "selective, all on the host, tiles"]),
        ("llama", "2", {"lora": {"rank": 4}}, ["selective", "full, inputs on the host", "tiles"]),
        ("qwen3_moe", "ep2xcp2", {}, ["selective", "collectives", "selective, all on the host"]),
        ("qwen3_moe", "pp2", LORA, ["selective"]),
        ("deepseek_v3", "tp2", {}, ["selective", "selective, all on the host, tiles"]),
        pytest.param("deepseek_v3", "ep2xtp2", {"fsdp": {"reduce": "last"}}, ["selective"], marks=pytest.mark.table),
        ("gemma3_text", "cp2", {}, ["selective", "attention of 1 in 2"]),
        pytest.param("qwen3_5_text", "2", {}, ["selective", "full, inputs on the host", "tiles"],
                     marks=pytest.mark.table),
        ("qwen3_5_text", "cp2u2", {}, ["selective"]),
        ("bamba", "tp2", {}, ["selective"]),
        *(
            pytest.param(family, mesh, {}, HOSTED[: 2 if family == "qwen3_moe" else 3], marks=pytest.mark.table)
            for family in ("llama", "qwen3_moe", "deepseek_v3", "gemma3_text", "qwen3_5_text", "qwen2_vl")
            for mesh in ("1", "2", "tp2", "cp2u2", "pp2", "2xtp2", "ep2")
            if mesh != "ep2" or family in ("qwen3_moe", "deepseek_v3")
        ),
    ],
)  # fmt: skip
def test_gradients_are_those_of_layers_that_store_everything(
    family: str, mesh: str, sections: dict[str, dict[str, Any]], modes: list[str]
) -> None:
    path = saved_vision_model(family) if family in FAMILIES else saved_model(family)
    results = run(world_of(mesh), differing, path, mesh, modes, sections)
    assert results == [{mode: [] for mode in modes}] * world_of(mesh)


class Operations(TorchDispatchMode):
    """Counts operations, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def work(path: str, mesh: str, mode: Any) -> tuple[int, int, int]:
    """(attention kernels, products of matrices, collectives of layers) of a step on a rank."""
    engine = open_engine(path, mesh, model={"recompute": mode})
    documents, metas = to_documents(engine, STEP)
    plan, sent = engine.plan(metas), Counter[str]()

    def counted(name: str) -> Any:
        original = getattr(GroupCommunicator, name)

        def call(self: Any, *args: Any) -> Any:
            sent[name] += 1
            return original(self, *args)

        return mock.patch.object(GroupCommunicator, name, call)

    with counted("sum_"), counted("all_to_all"), counted("all_gather"), Operations() as operations:
        engine.accumulate(plan, documents, CrossEntropy())
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return (
        operations.counts[kernel],
        operations.counts["aten::mm"] + operations.counts["aten::_grouped_mm"],
        sent.total(),
    )


@pytest.mark.parametrize(("family", "mesh"), [("llama", "tp2"), ("qwen3_moe", "ep2xcp2")])
def test_nothing_that_is_kept_runs_twice(family: str, mesh: str) -> None:
    """Attention and collectives run as often as in layers that store everything, and fewer products run again."""
    ranks = world_of(mesh)
    by_mode = {mode: run(ranks, work, saved_model(family), mesh, mode) for mode in ("none", "selective", "full")}
    for none, selective, full in zip(*by_mode.values(), strict=True):
        assert selective[0] == none[0] and full[0] == 2 * none[0] > 0
        assert none[1] < selective[1] < full[1]
        assert selective[2] == none[2] < full[2]


def test_a_change_in_place_of_what_is_kept_is_an_error() -> None:
    """As by adapters that add to a layer's output in place: the recomputed layer would add once more."""
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        second = (x @ weight) @ weight
        out = second.sin() * second
        second.detach().add_(1.0)
        return out

    out = run_layer(SELECTIVE, layer, x)
    with pytest.raises(RuntimeError, match=r"Set model.recompute=full|modified by an inplace"):
        out.sum().backward()


def test_compiled_layers_show_no_results_of_operations() -> None:
    with pytest.raises(UserError, match=r"set model.compile=false, or model.recompute=full"):
        load_config([], ["model.path=x", "data.path=y", "model.compile=true", "model.recompute=selective"], SftConfig)
