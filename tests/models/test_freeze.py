"""model.freeze: what is frozen gets no gradient and no optimizer state, and the rest trains as in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.cases import REDUCE_SCATTER, describe, open_engine, parity, saved_model, world_of
from tests.support.pool import run
from weft.engine.contract import check_contract
from weft.engine.engine import Engine, StepResult
from weft.engine.losses.base import CrossEntropy
from weft.engine.optim.groups import describe_groups
from weft.errors import UserError
from weft.models.freeze import freeze
from weft.models.patterns import matches
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict
from weft.verify.observed import to_documents

# Whole units, parts of a unit, the first layers (whose inputs then need no gradient), the head.
FROZEN = {
    "llama": [("model.embed_tokens", "model.layers.0"), ("*.mlp",), ("lm_head", "*norm*"), ("model.layers.1",)],
    "qwen3_moe": [("*.mlp.experts",), ("*.mlp.gate", "model.embed_tokens", "model.layers.0.self_attn.q_proj.weight")],
}


CASES = [(family, patterns, "none") for family, choices in FROZEN.items() for patterns in choices]


@pytest.mark.parametrize(
    ("family", "patterns", "recompute"), [*CASES, (*CASES[0][:2], "full"), (*CASES[-1][:2], "full")]
)
def test_the_rest_trains_as_in_a_plain_loop(family: str, patterns: tuple[str, ...], recompute: str) -> None:
    sections = {"model": {"freeze": patterns, "recompute": recompute}}
    verdict = run(2, parity, saved_model(family), "2", sections)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("mesh", ["1", "2x2"])
def test_on_other_meshes(mesh: str) -> None:
    sections = {
        "model": {"freeze": ("*.mlp", "model.embed_tokens", "lm_head")},
        "fsdp": {"reshard_after_forward": False},
    }
    verdict = run(world_of(mesh), parity, saved_model("llama_tied"), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


# ---------------------------------------------------------------- the bugs that it must not have


@contextmanager
def decayed() -> Iterator[None]:
    """Frozen parameters shrink in every step, as where they are given to an optimizer that decays regardless."""
    original = Engine.apply

    def apply(self: Engine, lr: float) -> StepResult:
        result = original(self, lr)
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(1 - lr * self.config.optimizer.weight_decay)
        return result

    with mock.patch.object(Engine, "apply", apply):
        yield


@contextmanager
def forgotten() -> Iterator[None]:
    with mock.patch("weft.engine.builder.freeze"):
        yield


PLANTS = {"decayed": (decayed, "weights after 3 steps"), "forgotten": (forgotten, "gradients, every parameter")}


def planted(path: str, plant: str) -> Verdict | None:
    with PLANTS[plant][0]():
        return parity(path, "2", {"model": {"freeze": ("*.mlp",)}})


@pytest.mark.parametrize("plant", PLANTS)
def test_parity_sees_the_bug(plant: str) -> None:
    verdict = run(2, planted, saved_model("llama"), plant)[0]
    assert PLANTS[plant][1] in verdict.failed


# ---------------------------------------------------------------- effects


def effects(path: str, patterns: tuple[str, ...]) -> dict[str, Any]:
    """One step: who has gradients and optimizer state, and how many elements were reduced."""
    engine, reduced = open_engine(path, "2", model={"freeze": patterns}), []
    documents, metas = to_documents(engine, awkward_steps(128)[2])
    scatter = getattr(dist, REDUCE_SCATTER)

    def watched(*args: Any, **options: Any) -> Any:
        reduced.append(options["input"].numel())
        return scatter(*args, **options)

    with mock.patch.object(dist, REDUCE_SCATTER, watched):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    graded = {name for name, gradient in engine.gradients() if gradient is not None}
    engine.apply(1e-3)
    check_contract(engine)
    named = dict(engine.module.named_parameters())
    assert engine.optimizer is not None
    return {
        "graded": graded,
        "stepped": {name for name, p in named.items() if p in engine.optimizer.state},
        "trained": {name for name, p in named.items() if p.requires_grad},
        "elements": {name: p.numel() for name, p in named.items()},
        "reduced": sum(reduced) / engine.plan(metas).micro_batches,
        "groups": describe_groups(named.items(), engine.config.optimizer),
    }


@pytest.mark.covers("model.freeze")
def test_what_is_frozen_has_no_gradient_no_state_and_is_not_reduced() -> None:
    for facts in run(2, effects, saved_model("llama"), ("*.mlp", "lm_head")):
        frozen = {n for n in facts["elements"] if ".mlp." in n or n == "lm_head.weight"}
        assert len(frozen) == 7
        assert facts["graded"] == facts["stepped"] == facts["trained"] == set(facts["elements"]) - frozen
        assert facts["reduced"] == sum(facts["elements"][name] for name in facts["trained"])
        (row,) = (group for group in facts["groups"] if group.name == "frozen")
        assert (row.parameters, row.elements) == (7, sum(facts["elements"][name] for name in frozen))


def broken_contract(path: str) -> None:
    engine = open_engine(path, "1", model={"freeze": ("*.mlp",)})
    documents, metas = to_documents(engine, awkward_steps(128)[2])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-3)
    check_contract(engine)
    frozen = engine.module.get_parameter("model.layers.0.mlp.up_proj.weight")
    frozen.grad = torch.zeros_like(frozen)
    with pytest.raises(RuntimeError, match="mlp.up_proj.weight is frozen .* has a gradient"):
        check_contract(engine)


def test_the_contract_sees_a_frozen_parameter_with_a_gradient() -> None:
    run(1, broken_contract, saved_model("llama"))


# ---------------------------------------------------------------- patterns


def plain() -> nn.Module:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2, bias=False)})
    module["c"].weight = module["b"].weight
    return module


def test_patterns_name_parameters_and_modules() -> None:
    assert matches("model.layers.1", "model.layers.1.mlp.weight")
    assert not matches("model.layers.1", "model.layers.10.mlp.weight")
    assert matches("*.mlp", "model.layers.1.mlp.up.weight")
    assert not matches("*.mlp", "model.layers.1.mlp_norm.weight")
    module = plain()
    freeze(module, ["a.bias", "[bc]"])
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["a.weight"]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["aa"], "'aa' matches no parameter"),
        (["a.wieght"], "did you mean a.weight"),
        (["b"], "b.weight and c.weight are one tensor (tied). Freeze both or neither"),
        (["*"], "nothing to train"),
    ],
)
def test_what_cannot_be_meant_is_refused(patterns: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        freeze(plain(), patterns)
    assert words in str(caught.value)
