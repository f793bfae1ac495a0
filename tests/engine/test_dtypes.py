"""optimizer.state_dtype and fsdp.reduce_dtype: what is stored and sent, and that nothing but rounding comes of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.cases import REDUCE_SCATTER, describe, open_engine, parity, saved_model, world_of
from tests.support.pool import run
from weft.engine.contract import check_contract
from weft.engine.describe import dtype_rows
from weft.engine.losses.base import CrossEntropy
from weft.engine.optim import block_step, low_bit
from weft.engine.optim.placement import Placements
from weft.engine.optim.sgd import RoundedSGD
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict
from weft.verify.observed import to_documents

SGD = {"name": "sgd", "momentum": 0.9, "lr": 1.0}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("mesh", "optimizer"), [("2", {}), ("2x2", {"betas": (0.8, 0.99)})])
def test_the_same_rounding_as_in_one_process(family: str, mesh: str, optimizer: dict[str, Any]) -> None:
    """The reference rounds its state alike after every step, with code of its own."""
    sections = {"optimizer": {"state_dtype": "bf16", **optimizer}}
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


def unrounded(path: str, optimizer: dict[str, Any]) -> Verdict | None:
    """Parity where the state that a step computed is not stored, and the next begins from zeros again."""
    original = block_step.new_moments

    def fresh(first: Tensor, second: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        return original(first.zero_(), second.zero_(), *arguments)

    with mock.patch.object(block_step, "new_moments", fresh):
        return parity(path, "2", {"optimizer": optimizer})


@pytest.mark.parametrize("optimizer", [{"state_dtype": "bf16"}])
def test_parity_sees_state_that_is_forgotten(optimizer: dict[str, Any]) -> None:
    assert "weights after 3 steps" in run(2, unrounded, saved_model("llama"), optimizer)[0].failed


# ---------------------------------------------------------------- effects


def one_step(path: str, optimizer: dict[str, Any], fsdp: dict[str, Any]) -> dict[str, Any]:
    engine, sent = open_engine(path, "2", optimizer=optimizer, fsdp=fsdp), []
    documents, metas = to_documents(engine, awkward_steps(128)[1])
    scatter = getattr(dist, REDUCE_SCATTER)

    def watched(*args: Any, **options: Any) -> Any:
        sent.append(options["input"].nbytes)
        return scatter(*args, **options)

    with mock.patch.object(dist, REDUCE_SCATTER, watched):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-3)
    check_contract(engine)
    assert engine.optimizer is not None
    states = [value.to_local() for s in engine.optimizer.state.values() for key, value in s.items() if key != "step"]
    return {
        "dtypes": {value.dtype for value in states},
        "bytes": sum(value.nbytes for value in states),
        "elements": sum(p.to_local().numel() for p in engine.module.parameters()),
        "sent": sum(sent),
        "table": {row["use"]: row["dtype"] for row in dtype_rows(engine)}["optimizer"],
    }


@pytest.mark.covers("optimizer.state_dtype")
@pytest.mark.parametrize(
    ("optimizer", "master", "dtype", "size"),
    [
        ({"state_dtype": "auto"}, "fp32", torch.float32, 8),
        ({"state_dtype": "bf16"}, "fp32", torch.bfloat16, 4),
        ({"state_dtype": "fp32"}, "bf16", torch.float32, 8),
        ({"state_dtype": "bf16", **SGD}, "fp32", torch.bfloat16, 2),
    ],
)
def test_state_has_its_dtype_and_size(optimizer: dict[str, Any], master: str, dtype: torch.dtype, size: int) -> None:
    for observed in run(2, one_step, saved_model("llama"), optimizer, {"master_dtype": master}):
        assert observed["dtypes"] == {dtype}
        assert observed["bytes"] == size * observed["elements"]
        assert observed["table"] == str(dtype).removeprefix("torch.")


def test_a_reduction_in_bf16_sends_half_the_bytes() -> None:
    path = saved_model("llama")
    (wide, _), (narrow, _) = (run(2, one_step, path, {}, {"reduce_dtype": dtype}) for dtype in ("fp32", "bf16"))
    assert wide["sent"] == 2 * narrow["sent"] > 0


# ---------------------------------------------------------------- against torch's own, by hand


def optimizers(kind: str, state: torch.dtype) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """(torch's over fp32, ours with rounded state) over equal weights."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(7, 5)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    decay = {"weight_decay": 0.1}
    if kind == "adamw":
        reference: torch.optim.Optimizer = torch.optim.AdamW(
            [weights[0]], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, **decay
        )
        groups, names = [{"params": [weights[1]], **decay}], {weights[1]: "w"}
        options = {"state_dtype": state, "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
        low_bit_optimizer = low_bit.LowBitAdamW(groups, Placements({}), names, **options)
        return reference, low_bit_optimizer
    reference = torch.optim.SGD([weights[0]], lr=1e-2, momentum=0.9, **decay)
    return reference, RoundedSGD([{"params": [weights[1]], **decay}], state, 1e-2, 0.9)


def steps(optimizers: tuple[torch.optim.Optimizer, ...], count: int, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    weights = [optimizer.param_groups[0]["params"][0] for optimizer in optimizers]
    for _ in range(count):
        gradient = torch.randn(7, 5)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    return weights


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_in_fp32_it_is_torchs_and_in_bf16_near_it(kind: str) -> None:
    expected, actual = steps(optimizers(kind, torch.float32), 20, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    expected, actual = steps(optimizers(kind, torch.bfloat16), 20, 1)
    assert 0 < (actual - expected).detach().norm() < 0.02 * expected.detach().norm()
