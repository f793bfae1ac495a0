"""fsdp.cpu_offload=optimizer: the plain optimizer's numbers bit for bit, and work during backward."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.cases import describe, open_engine, pairs, parity, saved_model, world_of
from tests.support.pool import run
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.observe.opening import fsdp_line
from weft.parallel.device_copies import DeviceCopies
from weft.parallel.fsdp import fsdp_modules
from weft.parallel.mesh import local_shard
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

MICRO_BATCHES: dict[str, Any] = {"step": {"max_tokens_per_device": 61}}
BF16: dict[str, Any] = {"fsdp": {"param_dtype": "bf16"}}
Shown = tuple[list[float | None], dict[str, torch.Tensor]]


def train(path: str, mesh: str, sections: dict[str, Any], offload: bool | str) -> Shown:
    """(losses and norms, masters and state on this rank) of four steps, the third of which has no finite gradient."""
    sections = {**sections, "fsdp": {**sections.get("fsdp", {}), "cpu_offload": offload}}
    engine = open_engine(path, mesh, **sections)
    assert engine.optimizer is not None
    numbers = list[float | None]()
    for number, step in enumerate([*awkward_steps(128)[:3], awkward_steps(128)[0]]):
        documents, metas = to_documents(engine, step)
        numbers.append(engine.accumulate(engine.plan(metas), documents, CrossEntropy())["loss"])
        if number == 2:
            spoil(engine)
        result = engine.apply(1e-3 / (1 + number))
        assert result.skipped is (number == 2)
        numbers.append(result.grad_norm if math.isfinite(result.grad_norm) else None)
    tensors = dict[str, torch.Tensor]()
    for name, parameter in engine.module.named_parameters():
        tensors[name] = local_shard(parameter.detach()).clone()
        state = engine.optimizer.state.get(parameter, {})
        tensors |= {f"{k}/{name}": local_shard(v).clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return numbers, tensors


def spoil(engine: Engine) -> None:
    """Make one gradient infinite after it has arrived."""
    gradient = next(p.grad for p in engine.module.parameters() if p.grad is not None and local_shard(p.grad).numel())
    local_shard(gradient)[(0,) * gradient.ndim] = float("inf")


@pytest.mark.covers("fsdp.cpu_offload")
@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    pairs(
        [
            ("llama", "1", MICRO_BATCHES),
            ("llama", "2x2", MICRO_BATCHES),
            ("llama_tied", "pp2", MICRO_BATCHES),
            ("llama", "2", {**BF16, "optimizer": {"name": "muon"}}),
        ],
        [
            ("qwen3_moe", "ep2xtp2", {}),
            ("llama", "2", MICRO_BATCHES),
            ("llama", "tp2", MICRO_BATCHES),
            ("llama_tied", "2xtp2", MICRO_BATCHES),
            ("llama", "cp2", {}),
            ("llama", "pp2zx2", {"step": {"max_tokens_per_device": 61}, "fsdp": {"reduce": "last"}}),
            ("qwen3_moe", "2xep2", MICRO_BATCHES),
            ("qwen3_moe", "pp2xep2", {"optimizer": {"state_dtype": "int8"}}),
            ("llama", "3", {"optimizer": {"name": "sgd", "momentum": 0.9}, "fsdp": {"reshard_after_forward": False}}),
            ("qwen3", "2", {"lora": {"rank": 4}}),
            ("llama", "2x2", {**BF16, "model": {"recompute": "full"}}),
        ],
    ),
)
def test_bitwise_the_plain_optimizer(family: str, mesh: str, sections: dict[str, Any]) -> None:
    path = saved_model(family)
    shown = [run(world_of(mesh), train, path, mesh, sections, offload) for offload in (False, "optimizer")]
    for (plain, tensors), (numbers, offloaded) in zip(*shown, strict=True):
        assert numbers == plain
        assert tensors.keys() == offloaded.keys()
        assert [name for name in tensors if not torch.equal(tensors[name], offloaded[name])] == []


@pytest.mark.table
@pytest.mark.parametrize(("family", "mesh"), [("llama", "2xtp2"), ("qwen3_moe", "ep2"), ("qwen3", "pp2")])
def test_parity(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, {"fsdp": {"cpu_offload": "optimizer"}})[0]
    assert verdict.passed, describe(verdict)


def during_backward(path: str) -> dict[str, Any]:
    """What happens when: norms that are known when backward ends, and copies that are renewed in an update."""
    engine = open_engine(path, "2", fsdp={"cpu_offload": "optimizer"}, optimizer={"ema_decay": 0.5})
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    plan, copies = engine.plan(metas), engine.device_copies
    assert copies is not None
    for _ in range(2):  # in the first step FSDP finds its units
        engine.accumulate(plan, documents, CrossEntropy())
        assert engine._early_norms is not None
        early = {p for p in engine.module.parameters() if engine._early_norms.norms_of(p) is not None}
        engine.apply(1e-2)
    trained = list(engine.module.parameters())
    last = {p for p in trained if p not in early}
    unit = [p for p in fsdp_modules(engine.module) if last & set(p.parameters(recurse=True))]
    engine.readout(plan, documents)
    with engine.averaged():
        averaged = engine.readout(plan, documents)
        fresh = {"averaged": all(is_fresh(engine, p) for p in trained)}
    after = engine.readout(plan, documents)
    slept = engine.sleep("parameters")
    freed = copies.bytes
    engine.wake()
    return {
        "late": len(last), "late units": len(unit) if last else 0, "of": len(trained), **fresh,
        "awake": {i: v["logprob"] for i, v in engine.readout(plan, documents).items()},
        "after": {i: v["logprob"] for i, v in after.items()}, "other": {i: v["logprob"] for i, v in averaged.items()},
        "freed": (freed, slept, sum(local_shard(p).nbytes for p in trained)), "line": fsdp_line(engine),
    }  # fmt: skip


def is_fresh(engine: Engine, parameter: torch.nn.Parameter) -> bool:
    """Whether what FSDP gathers of a parameter is its master."""
    assert engine.device_copies is not None
    copy = engine.device_copies._copies[parameter]
    master = local_shard(parameter.detach()).flatten()
    return torch.equal(copy.parameter._sharded_param_data[: len(master)], master)


def test_norms_are_known_when_backward_ends_and_copies_follow_their_masters() -> None:
    for shown in run(2, during_backward, saved_model("llama")):
        assert shown["of"] - shown["late"] > 0 and shown["late"] <= shown["of"] // 2, shown["late"]
        assert shown["averaged"]
        remaining, slept, masters = shown["freed"]
        assert remaining == 0 < slept == 2 * masters  # the device is the host here, so that masters sleep, too
        for index, before in shown["after"].items():
            assert torch.equal(before, shown["awake"][index])
            assert len(before) == 1 or not torch.equal(before, shown["other"][index])
        assert shown["line"].endswith("master weights, gradients and optimizer state on the host")


def renewed(path: str, update: Any) -> list[bool]:
    """Whether each copy is its master's value after the update of a second step."""
    engine = open_engine(path, "1", fsdp={"cpu_offload": "optimizer"})
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    for number in range(2):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        with mock.patch.object(DeviceCopies, "update", update) if number else nullcontext():
            engine.apply(1e-2)
    return [is_fresh(engine, parameter) for parameter in engine.module.parameters()]


def forgets(copies: DeviceCopies, parameter: torch.nn.Parameter) -> None:
    """A planted bug: the accelerator keeps the weights of the step before."""


def test_an_update_renews_every_copy() -> None:
    assert all(run(1, renewed, saved_model("llama"), DeviceCopies.update)[0])
    assert not any(run(1, renewed, saved_model("llama"), forgets)[0])
