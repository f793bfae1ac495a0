"""model.compile: layers run as graphs, attention over documents does not, and the numbers are those of a plain process.

One case for each kind of mesh, because the first steps compile: 70 s where others use the machine too.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config

from tests.cases import describe, open_engine, pairs, saved_model
from tests.pool import run
from weft.errors import UserError
from weft.ops import attention
from weft.ops.attention_call import Call
from weft.verification.documents import awkward_steps
from weft.verification.harness import Verdict, verify


def compiled(path: str, mesh: str) -> tuple[Verdict | None, dict[str, Any]]:
    """Parity with recomputation, and what was traced."""
    torch._dynamo.utils.counters.clear()
    torch._inductor.config.compile_threads = 1  # no pool of compiler processes, which take longer to start than to run
    engine = open_engine(path, mesh, model={"compile": True, "recompute": "full"})
    traced: list[bool] = []
    kernel = attention.KERNELS["per_document"].run

    def watched(call: Call) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return kernel(call)

    attention.KERNELS["per_document"] = attention.Kernel(watched, False, False, True)
    try:
        verdict = verify(engine, path, awkward_steps(128), [1e-3] * 3)
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


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.parametrize("mesh", pairs([("2",)], [("tp2",)]))
def test_parity_with_compiled_layers(mesh: str) -> None:
    """On tp2, the sums over it are in the graphs."""
    ranks = run(2, compiled, saved_model("llama", num_hidden_layers=1), mesh, timeout=500.0)
    verdict = ranks[0][0]
    assert verdict.passed, describe(verdict)
    for _, seen in ranks:
        assert seen["compiled"] == [True]
        # Before and after attention, with and without gradients, first in forward and again in recomputation; rows of
        # another length add none.
        assert 4 <= seen["graphs"] <= 16
        assert seen["calls"] > 10 and not seen["traced"]
        assert all("torch.compiler.disable" in reason for reason in seen["breaks"])


def refused(path: str) -> None:
    engine = open_engine(path, "1", model={"compile": True})
    with pytest.raises(UserError, match="routes through compiled layers: add model.compile=false"):
        verify(engine, path, awkward_steps(128), [1e-3] * 3)


def test_routes_cannot_be_replayed_through_compiled_layers() -> None:
    run(1, refused, saved_model("qwen3_moe"))
