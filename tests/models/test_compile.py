"""model.compile: layers run as graphs, attention over documents does not, and the numbers are those of a plain process.

The suite compiles C++ on one rank, because it is the same on every mesh and takes a minute.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.support.cases import describe as described
from tests.support.cases import engine_config, graphs_as_traced, open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.zoo import tiny_config
from weft.engine.batch.document import Document
from weft.engine.builder import decide_compile, make_spec, may_compile
from weft.engine.losses.base import CrossEntropy
from weft.engine.selfcheck import device as device_check
from weft.engine.selfcheck.architecture import examine
from weft.engine.selfcheck.compile import try_compiled
from weft.errors import UserError
from weft.launch.process import join
from weft.models.experts import hides_routers
from weft.ops import attention
from weft.ops.attention_call import Call
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict, verify


def compiled(path: str, mesh: str, backend: str) -> tuple[Verdict | None, dict[str, Any]]:
    """Parity with recomputation, and what was traced. backend: of torch.compile, "inductor" or "aot_eager"."""
    torch._dynamo.utils.counters.clear()
    torch._inductor.config.compile_threads = 1  # no pool of compiler processes, which take longer to start than to run
    with graphs_as_traced() if backend == "aot_eager" else nullcontext():
        engine = open_engine(path, mesh, model={"compile": True, "recompute": "full"})
    traced: list[bool] = []
    kernel = attention.KERNELS["per_document"].run

    def watched(call: Call) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return kernel(call)

    attention.KERNELS["per_document"] = attention.Kernel(watched, False, False, True)
    try:
        verdict = verify(engine, path, awkward_steps(128)[:2], [1e-3] * 2)
    finally:
        attention.KERNELS["per_document"] = attention.Kernel(kernel, False, False, True)
    breaks = torch._dynamo.utils.counters["graph_break"]
    return verdict, {
        "compiled": [layer._compiled_call_impl is not None for _, layer in engine.module.layers],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "breaks": list(breaks),
        "traced": any(traced),
        "calls": len(traced),
    }


@pytest.mark.covers("model.compile")
@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.parametrize(
    ("mesh", "backend"),
    pairs([("1", "inductor"), ("2", "aot_eager")], [("2", "inductor"), ("tp2", "inductor")]),
)
def test_parity_with_compiled_layers(mesh: str, backend: str) -> None:
    """On tp2, the sums over it are in the graphs."""
    path = saved_model("llama", num_hidden_layers=1)
    ranks = run(world_of(mesh), compiled, path, mesh, backend, timeout=500.0)
    verdict = ranks[0][0]
    assert verdict.passed, described(verdict)
    for _, facts in ranks:
        assert facts["compiled"] == [True]
        # Before and after attention, with and without gradients, first in forward and again in recomputation; rows of
        # another length add none.
        assert 4 <= facts["graphs"] <= 16
        assert facts["calls"] > 10 and not facts["traced"]
        assert all("torch.compiler.disable" in reason for reason in facts["breaks"])


# ---------------------------------------------------------------- layers with experts


def with_experts(path: str, mesh: str, steps: int, sections: dict[str, Any]) -> tuple[Any, set[str], list[int]]:
    """(Parity along the reference's routes, why graphs end, the number of graphs after each of three more steps, whose
    rows have three lengths)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = {"compile": True, "recompute": "full", **sections.get("model", {})}
    with graphs_as_traced():
        engine = open_engine(path, mesh, **{**sections, "model": model})
        verdict, graphs = verify(engine, path, awkward_steps(128)[:steps], [1e-3] * steps), []
        for length in (90, 61, 113):
            document = Document(torch.arange(1, length + 1) % 50, torch.ones(length))
            metrics, _ = engine.step(*engine.plan_step([document] * 2), CrossEntropy(), 1e-3)
            assert (metrics["experts/max_load"] or 0) >= 1
            graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return verdict, set(torch._dynamo.utils.counters["graph_break"]), graphs


@pytest.mark.table
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("family", "mesh", "layers", "sections"),
    [
        ("qwen3_moe", "1", 1, {}),
        *(
            (family, mesh, 2, sections)
            for family in ("qwen3_moe", "deepseek_v3", "gpt_oss")
            for mesh, sections in (
                ("1", {"model": {"recompute": "none"}}), ("2", {}), ("ep2", {}), ("tp2", {}),
            )
        ),
    ],
)  # fmt: skip
def test_experts_and_routers_stay_outside_of_graphs(
    family: str, mesh: str, layers: int, sections: dict[str, Any]
) -> None:
    """Of deepseek_v3 the first layer is dense, and the second has shared experts."""
    path, ranks = saved_model(family, num_hidden_layers=layers), 1 if mesh == "1" else 2
    for verdict, breaks, graphs in run(ranks, with_experts, path, mesh, layers, sections, timeout=300.0):
        assert verdict is None or verdict.passed, described(verdict)
        assert breaks and all("torch.compiler.disable" in reason for reason in breaks)
        assert graphs == [graphs[0]] * 3 and graphs[0] <= 24


def refused(path: str) -> None:
    engine = open_engine(path, "1", model={"compile": True})
    with (
        mock.patch("weft.verify.harness.hides_routers", return_value=False),
        pytest.raises(UserError, match="routes through compiled routers: add model.compile=false"),
    ):
        verify(engine, path, awkward_steps(128), [1e-3] * 3)


def test_routes_cannot_be_replayed_through_compiled_routers() -> None:
    run(1, refused, saved_model("qwen3_moe"))


def test_routers_are_hidden_if_a_block_contains_them_and_their_experts() -> None:
    def experts() -> nn.Module:
        module = nn.Module()
        module.down_proj = nn.Parameter(torch.empty(2, 3, 3))
        return module

    layer, block, dense = nn.Module(), nn.Module(), nn.Module()
    block.experts, layer.mlp = experts(), block
    assert hides_routers([dense, layer]) and not hides_routers([dense])
    layer.experts = experts()  # as of gemma4, whose layers have the router, too
    assert not hides_routers([dense, layer])


# ---------------------------------------------------------------- model.compile=auto


def graphs_by_length(path: str, fused: bool) -> list[int]:
    """Graphs after each of six steps, whose rows have six lengths; four layers, run again in backward."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []
    with graphs_as_traced():
        engine = open_engine(path, "1", model={"compile": True, "recompute": "full", "fused_norms": fused})
        for length in (90, 61, 113, 47, 83, 109):
            document = Document(torch.arange(1, length + 1) % 50, torch.ones(length))
            plan, local = engine.plan_step([document])
            engine.step(plan, local, CrossEntropy(), 1e-3)
            graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("fused", pairs([(True,)], [(False,)]))
def test_layers_share_graphs_for_rows_of_all_lengths(fused: bool) -> None:
    """They are compiled anew for the second length at most, with torch's fused norms too."""
    graphs = run(1, graphs_by_length, saved_model("llama", num_hidden_layers=4), fused, timeout=200.0)[0]
    assert graphs[1:] == [graphs[1]] * 5 and graphs[1] <= 12


def trial(plant: str, changes: dict[str, Any] | None = None, family: str = "llama") -> str:
    config = tiny_config(family, **(changes or {}))
    findings = examine(config)
    original = LlamaMLP.forward

    def planted(self: Any, x: torch.Tensor) -> torch.Tensor:
        if plant == "values" and torch.compiler.is_compiling():
            return original(self, x) * 1.1
        if plant == "lengths":
            return original(self, x) * float(len(range(x.shape[1])) > 0)  # a loop over tokens
        return original(self, x)

    with (
        TemporaryDirectory() as folder,
        mock.patch.object(device_check, "FOLDER", Path(folder)),
        graphs_as_traced(),
        mock.patch.object(LlamaMLP, "forward", planted),
    ):
        if plant == "fails":
            torch.nn.Module.compile = None  # type: ignore[assignment, method-assign] # put back by graphs_as_traced
        return try_compiled(config, "auto", findings, torch.device("cpu"), torch.bfloat16)


@pytest.mark.slow
def test_compiled_layers_are_tried_on_a_small_copy() -> None:
    assert run(1, trial, "nothing", timeout=200.0) == [""]
    assert run(1, trial, "values", timeout=200.0)[0].startswith("values or gradients differ by")
    assert "graphs are compiled anew" in run(1, trial, "lengths", timeout=200.0)[0]
    assert run(1, trial, "fails", timeout=200.0)[0].startswith("they do not run")


@pytest.mark.slow
def test_rounding_that_eager_layers_have_too_is_no_reason_against_compiled_ones() -> None:
    """Eager bf16 gradients of this model are off by 5%, of wider ones by 75%."""
    assert run(1, trial, "nothing", {"initializer_range": 0.2}, timeout=200.0) == [""]


@pytest.mark.table
def test_a_model_with_experts_is_tried_along_the_routes_of_the_reference() -> None:
    """With choices of its own, rounding would send tokens to other experts."""
    for family in ("qwen3_moe", "deepseek_v3", "gpt_oss"):
        assert run(1, trial, "nothing", None, family, timeout=200.0) == [""]


def test_a_result_is_kept_for_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "FOLDER", tmp_path)
    tried: list[str] = []

    def result(config: PretrainedConfig, *_: Any) -> str:
        tried.append(config.model_type)
        if len(tried) == 1:
            raise RuntimeError("out of memory")
        return "" if config.model_type == "llama" else "values differ"

    support: Any = SimpleNamespace(layout="packed", uses_bounds=True, attention=(), mixers=())

    def results(family: str, dtype: torch.dtype = torch.bfloat16) -> str:
        return try_compiled(tiny_config(family), "auto", support, torch.device("cpu"), dtype)

    with mock.patch("weft.engine.selfcheck.compile._try", side_effect=result):
        assert results("llama").startswith("they do not run (RuntimeError: out of memory")  # not kept
        assert [results("llama") for _ in range(3)] == [""] * 3 and len(tried) == 2
        assert [results("qwen3") for _ in range(3)] == ["values differ"] * 3 and len(tried) == 3
        assert results("llama", torch.float16) == "" and len(tried) == 4
        assert len(list(tmp_path.iterdir())) == len(list(tmp_path.glob("*.json"))) == 3  # none is partial


def tried_on_ranks(path: str) -> tuple[int, bool]:
    """(number of trials of this rank, model.compile)."""
    spec = make_spec(engine_config(path, "2"), join("cpu"))
    built = open_engine(path, "2").built
    with (
        mock.patch("weft.engine.builder.may_compile", return_value=True),
        mock.patch("weft.engine.builder.try_compiled", return_value="") as attempt,
    ):
        ranks = replace(spec.ranks, local_rank=dist.get_rank())
        compiles = decide_compile(replace(spec, ranks=ranks), built, (), tried=True).config.model.compile
    return attempt.call_count, compiles is True


def test_one_rank_of_a_machine_tries_compiled_layers() -> None:
    assert run(2, tried_on_ranks, saved_model("llama")) == [(1, True), (0, True)]


def considered(
    path: str, device: str, sections: dict[str, Any], readouts: tuple[str, ...], peak: float | None = None
) -> tuple[bool, Any]:
    """(Whether compiled layers are considered there; what model.compile is on this CPU). peak: of the device."""
    engine = open_engine(path, "1", **sections)
    setup = make_spec(engine_config(path, "1", **sections), engine.ranks)
    ranks = replace(engine.ranks, device=torch.device(device))
    compute = torch.float32 if device == "cpu" or "fsdp" in sections else torch.bfloat16
    setup = replace(setup, ranks=ranks, precision=replace(setup.precision, compute=compute))
    with mock.patch("weft.engine.builder.peak_flops", return_value=peak):
        return may_compile(setup, engine.built, readouts), engine.config.model.compile


def test_where_auto_considers_compiled_layers() -> None:
    llama = saved_model("llama")
    assert run(1, considered, llama, "cuda", {}, ()) == [(True, False)]
    assert run(1, considered, llama, "cuda", {}, (), 1e9) == [(True, False)]
    assert run(1, considered, llama, "cuda", {}, (), 1e15) == [(False, False)]  # the host takes longer than the device
    assert run(1, considered, llama, "cpu", {}, ()) == [(False, False)]
    assert run(1, considered, llama, "cuda", {}, ("hidden/model.layers.0",)) == [(False, False)]
    assert run(1, considered, llama, "cuda", {"fsdp": {"param_dtype": "fp32"}}, ()) == [(False, False)]
    assert run(1, considered, llama, "cuda", {"model": {"transforms": ("fp8",)}}, ()) == [(False, False)]
    assert run(1, considered, saved_model("qwen3_moe"), "cuda", {}, ()) == [(True, False)]
