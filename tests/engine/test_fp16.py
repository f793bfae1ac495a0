"""fsdp.param_dtype: fp16, with dynamic loss scaling."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.cases import describe, open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from weft.engine.contract import check_contract
from weft.engine.describe import dtype_rows
from weft.engine.engine import Engine, StepResult
from weft.engine.losses.base import CrossEntropy
from weft.engine.optim.loss_scale import LossScale
from weft.engine.step_plan.plan import StepPlan
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict, verify
from weft.verify.observed import to_documents

STEPS = awkward_steps(128)
CLIPPED = {"optimizer": {"max_grad_norm": 0.05}}  # every step is clipped, so that the weights depend on the norm


# ---------------------------------------------------------------- scaling is exact: parity in fp32 with a scaled loss


def scaled_parity(path: str, mesh: str, sections: dict[str, Any]) -> Verdict | None:
    """In fp32, where a power of two changes no digit; the scale is doubled after every step."""
    engine = open_engine(path, mesh, **sections)
    engine.loss_scale = LossScale(1024.0, 1)
    verdict = verify(engine, path, STEPS, [1e-3] * 3)
    assert engine.loss_scale.scale == 8192.0
    return verdict


SEVERAL_ROWS = {"step": {"max_tokens_per_device": 61}, **CLIPPED}
REDUCED_ONCE = {"fsdp": {"reduce": "last"}}


@pytest.mark.parametrize(("family", "mesh", "sections"), pairs(
    [("qwen3_moe", "2", CLIPPED), ("llama", "2x2", SEVERAL_ROWS), ("qwen3_moe", "2", REDUCED_ONCE)],
    [("llama", "2", CLIPPED), ("qwen3_moe", "2x2", SEVERAL_ROWS), ("llama", "2", REDUCED_ONCE)],
))  # fmt: skip
def test_parity_with_a_scaled_loss(family: str, mesh: str, sections: dict[str, Any]) -> None:
    verdict = run(world_of(mesh), scaled_parity, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("scope", ["document", "step"])
def test_the_balancing_loss_of_experts_is_scaled(scope: str) -> None:
    sections = {"model": {"router_aux_loss": scope, "router_aux_loss_coef": 0.1}}
    verdict = run(2, scaled_parity, saved_model("qwen3_moe"), "2", sections)[0]
    assert verdict.passed, describe(verdict)


def never_unscaled(path: str) -> Verdict | None:
    with mock.patch("weft.engine.engine.unscale_gradients"):
        return scaled_parity(path, "2", {"optimizer": {"name": "sgd", "max_grad_norm": None}})


def test_parity_sees_gradients_that_were_never_unscaled() -> None:
    failed = run(2, never_unscaled, saved_model("llama"))[0].failed
    assert {"gradient norm along 3 steps", "weights after 3 steps"} <= set(failed)


# ---------------------------------------------------------------- fp16 itself


class Faint(CrossEntropy):
    """A loss so small that its gradients are below what fp16 can hold."""

    def normaliser(self, plan: StepPlan) -> float:
        return super().normaliser(plan) * 1e7


def gradients(
    path: str, mesh: str, fsdp: dict[str, Any], objective: type[CrossEntropy] = CrossEntropy
) -> dict[str, Tensor]:
    engine = open_engine(path, mesh, fsdp=fsdp, step={"max_tokens_per_device": 61})
    documents, metas = to_documents(engine, STEPS[0])
    engine.accumulate(engine.plan(metas), documents, objective())
    return {name: gradient for name, gradient in engine.gradients() if gradient is not None}


def error(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest relative error of any parameter's gradient, against at least a hundredth of the largest."""
    largest = max(float(g.norm()) for g in exact.values())
    return max(float((gradients[n] - g).norm()) / max(float(g.norm()), 1e-2 * largest) for n, g in exact.items())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradients_in_fp16_are_closer_to_fp32_than_those_in_bf16(family: str) -> None:
    path = saved_model(family)
    exact = run(1, gradients, path, "1", {"param_dtype": "fp32"})[0]
    half, brain = (run(2, gradients, path, "2", {"param_dtype": dtype})[0] for dtype in ("fp16", "bf16"))
    assert all(gradient.dtype == torch.float32 for gradient in half.values())
    assert error(half, exact) < 0.02
    assert error(half, exact) < 0.5 * error(brain, exact)


def test_a_scaled_loss_keeps_small_gradients_from_vanishing() -> None:
    path = saved_model("llama")
    exact = run(1, gradients, path, "1", {"param_dtype": "fp32"}, Faint)[0]
    plain, scaled = (
        run(2, gradients, path, "2", {"param_dtype": "fp16", "loss_scale": scale}, Faint)[0] for scale in (1.0, 65536.0)
    )
    assert error(plain, exact) > 0.9
    assert error(scaled, exact) < 0.03  # fp16 rounds, and other rows round otherwise


# ---------------------------------------------------------------- the scale


def one_step(engine: Engine) -> StepResult:
    documents, metas = to_documents(engine, STEPS[0])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    return engine.apply(1e-3)


def overflowing(path: str, mesh: str) -> dict[str, Any]:
    """Steps from a scale that is far too large until three in a row were taken."""
    engine = open_engine(path, mesh, fsdp={"param_dtype": "fp16", "loss_scale": 2.0**30})
    assert engine.loss_scale is not None and engine.optimizer is not None
    results, before = [], {name: tensor.clone() for name, tensor in engine.tensors()}
    while not results or results[-1].skipped:
        results.append(one_step(engine))
        if results[-1].skipped:
            assert not engine.optimizer.state
            assert all(torch.equal(before[name], tensor) for name, tensor in engine.tensors())
    results += [one_step(engine), one_step(engine)]
    check_contract(engine)
    return {
        "scales": [result.loss_scale for result in results],
        "skipped": [result.skipped for result in results],
        "results": results,
        "state": engine.loss_scale.state_dict(),
        "moved": any(not torch.equal(before[name], tensor) for name, tensor in engine.tensors()),
        "table": {row["use"]: row["dtype"] for row in dtype_rows(engine)}["compute"],
    }


@pytest.mark.covers("fsdp.loss_scale")
@pytest.mark.parametrize("mesh", pairs([("1",), ("2x2",)], [("2",)]))
def test_an_overflow_halves_the_scale(mesh: str) -> None:
    ranks = run(world_of(mesh), overflowing, saved_model("llama"), mesh)
    assert all(rank["scales"] == ranks[0]["scales"] and rank["state"] == ranks[0]["state"] for rank in ranks)
    for observed in ranks:
        bad = observed["skipped"].index(False)
        assert bad > 3 and observed["skipped"] == [True] * bad + [False] * 3
        assert observed["scales"] == [2.0 ** (30 - k) for k in range(bad + 1)] + [2.0 ** (30 - bad)] * 2
        assert observed["state"] == {"scale": 2.0 ** (30 - bad), "good": 3, "overflows": bad}
        assert observed["moved"] and observed["table"] == "float16"
        for result in observed["results"][:bad]:
            assert result.overflow and result.reason == f"fp16 overflow at loss scale {result.loss_scale:g}"


def poisoned(path: str) -> tuple[StepResult, dict[str, float]]:
    """A loss that is not finite is no matter of its scale."""
    engine = open_engine(path, "2", fsdp={"param_dtype": "fp16"})
    documents, metas = to_documents(engine, STEPS[0])
    documents[5].weights.fill_(float("nan"))
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    result = engine.apply(1e-3)
    assert engine.loss_scale is not None
    return result, engine.loss_scale.state_dict()


def test_a_loss_that_is_not_finite_is_an_error_still() -> None:
    for result, state in run(2, poisoned, saved_model("llama")):
        assert result.skipped and not result.overflow and "loss is not finite" in result.reason
        assert state == {"scale": 65536.0, "good": 0, "overflows": 0}


@pytest.mark.covers("fsdp.loss_scale_interval")
def test_the_scale_grows_after_good_steps() -> None:
    scale = LossScale(4.0, 3)
    for expected in (4.0, 4.0, 8.0, 8.0):
        scale.succeed()
        assert scale.scale == expected
    assert scale.overflow() and (scale.scale, scale.good) == (4.0, 0)


def test_at_one_an_overflow_is_an_error() -> None:
    scale = LossScale(2.0, 10)
    assert scale.overflow()
    assert not scale.overflow()
    assert (scale.scale, scale.overflows) == (1.0, 1)


def test_its_state_is_plain_numbers() -> None:
    scale, restored = LossScale(64.0, 2), LossScale(1.0, 2)
    scale.succeed()
    restored.load_state_dict(scale.state_dict())
    assert restored == scale
    restored.succeed()
    assert restored.scale == 128.0


def without_scaling(path: str) -> list[Any]:
    return [open_engine(path, "1", fsdp={"param_dtype": dtype}).loss_scale for dtype in ("bf16", "fp32")]


def test_other_dtypes_have_no_scale() -> None:
    assert run(1, without_scaling, saved_model("llama"))[0] == [None, None]
