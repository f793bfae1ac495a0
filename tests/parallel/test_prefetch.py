"""fsdp.prefetch: what is gathered before the unit that runs, in forward and in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.cases import ALL_GATHER, describe, open_engine, pairs, parity, saved_model, world_of
from tests.support.pool import run
from weft.engine.engine import Engine, StepResult
from weft.engine.losses.base import CrossEntropy
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict
from weft.verify.observed import to_documents

NESTED = {"llama": ("layers", "head", "LlamaMLP", "LlamaAttention"), "qwen3_moe": ("layers", "head", "Qwen3MoeExperts")}


SETTINGS: list[tuple[str, Any, str, str]] = [
    ("2", 2, "auto", "none"), ("2", (1, 3), "nested", "full"), ("2", (3, 1), "nested", "none"),
    ("2x2", 2, "auto", "full"),
]  # fmt: skip
FAMILIES = ("llama", "qwen3_moe")


@pytest.mark.parametrize(("family", "mesh", "depth", "wrap", "recompute"), pairs(
    [(FAMILIES[number % 2], *setting) for number, setting in enumerate(SETTINGS)],
    [(FAMILIES[number % 2 - 1], *setting) for number, setting in enumerate(SETTINGS)],
))  # fmt: skip
def test_parity(family: str, mesh: str, depth: Any, wrap: str, recompute: str) -> None:
    wraps = "auto" if wrap == "auto" else NESTED[family]
    sections = {"fsdp": {"prefetch": depth, "wrap": wraps}, "model": {"recompute": recompute}}
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


# ---------------------------------------------------------------- the bug


@contextmanager
def too_early() -> Iterator[None]:
    """The first layer of the next forward is gathered before the optimizer has stepped."""
    original = Engine.apply

    def apply(self: Engine, lr: float) -> StepResult:
        self.module.layers[0][1].unshard()
        return original(self, lr)

    with mock.patch.object(Engine, "apply", apply):
        yield


def stale(path: str) -> Verdict | None:
    with too_early():
        return parity(path, "2", {"fsdp": {"prefetch": 2}})


def test_parity_sees_weights_that_were_gathered_too_early() -> None:
    assert "loss along 3 steps" in run(2, stale, saved_model("llama"))[0].failed


# ---------------------------------------------------------------- effects


def gathers(path: str, depth: Any, wrap: Any, recompute: str) -> tuple[list[int], list[int], int]:
    """All-gathers that were issued before each layer's attention ran in forward, and in backward, and in all."""
    engine = open_engine(path, "2", fsdp={"prefetch": depth, "wrap": wrap}, model={"recompute": recompute})
    documents, metas = to_documents(engine, awkward_steps(128)[1])
    issued: list[int] = []
    forward, backward = [], []
    original = getattr(dist, ALL_GATHER)

    def watched(*args: Any, **options: Any) -> Any:
        issued.append(1)
        return original(*args, **options)

    for _, layer in engine.module.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda *_: forward.append(len(issued)))
        layer.self_attn.q_proj.register_full_backward_pre_hook(lambda *_: backward.append(len(issued)))
    with mock.patch.object(dist, ALL_GATHER, watched):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    return forward[:4], backward, len(issued)


# Four layers; forward gathers root, layers, head; backward again the layers, last first.
@pytest.mark.covers("fsdp.prefetch")
@pytest.mark.parametrize(
    ("depth", "forward", "backward"),
    [
        (None, [2, 3, 4, 5], [8, 9, 10, 10]),
        (1, [3, 4, 5, 6], [8, 9, 10, 10]),
        (2, [4, 5, 6, 6], [9, 10, 10, 10]),
        ((3, 1), [5, 6, 6, 6], [8, 9, 10, 10]),
        ((1, 3), [3, 4, 5, 6], [10, 10, 10, 10]),
    ],
)
def test_units_are_gathered_ahead(depth: Any, forward: list[int], backward: list[int]) -> None:
    path = saved_model("llama", num_hidden_layers=4)
    for gathered in run(2, gathers, path, depth, "auto", "none"):
        assert gathered == (forward, backward, 10)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nothing_is_gathered_twice(recompute: str) -> None:
    """Nor in recomputation, which runs the units inside a layer again."""
    path = saved_model("llama", num_hidden_layers=4)
    for depth in (None, 1, 3):
        for _, _, total in run(2, gathers, path, depth, NESTED["llama"], recompute):
            assert total == 1 + 3 * 4 + 1 + 3 * 4
