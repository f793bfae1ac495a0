"""Precision is a contract: what is stored, computed, summed and stepped in is what the config says, and is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.cases import REDUCE_SCATTER, open_engine, saved_model
from tests.support.pool import run
from weft.config.schema import FsdpConfig
from weft.engine.contract import check_contract
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.parallel.fsdp import fsdp_modules
from weft.parallel.parallelize import Precision
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {"bf16": BF16, "fp32": FP32}
STEP = awkward_steps(128)[0]


def one_step(engine: Engine, lr: float = 1e-3) -> None:
    documents, metas = to_documents(engine, STEP)
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(lr)


# ---------------------------------------------------------------- what is really there


def observed(path: str, fsdp: dict[str, str]) -> dict[str, set[torch.dtype]]:
    """Dtypes seen in one step on two ranks."""
    engine, dtypes = open_engine(path, "2", fsdp=fsdp), {"gathered": set(), "hidden": set(), "reduced": set()}
    scatter = getattr(dist, REDUCE_SCATTER)

    def look(module: Any, inputs: Any) -> None:
        dtypes["gathered"] |= {parameter.dtype for parameter in module.parameters()}
        dtypes["hidden"].add(inputs[0].dtype)

    def watched(*args: Any, **options: Any) -> Any:
        dtypes["reduced"].add(options["input"].dtype)
        return scatter(*args, **options)

    for _, layer in engine.module.layers:
        layer.register_forward_pre_hook(look)
    with mock.patch.object(dist, REDUCE_SCATTER, watched):
        one_step(engine)
    assert engine.optimizer is not None
    dtypes["stored"] = {parameter.dtype for parameter in engine.module.parameters()}
    states = (state for state in engine.optimizer.state.values())
    dtypes["state"] = {value.dtype for state in states for key, value in state.items() if key != "step"}
    check_contract(engine)
    return dtypes


@pytest.mark.covers("fsdp.param_dtype", "fsdp.reduce_dtype", "fsdp.master_dtype")
@pytest.mark.parametrize(
    ("param", "reduce", "master"),
    [
        ("auto", "fp32", "fp32"),
        ("bf16", "fp32", "fp32"),
        ("bf16", "bf16", "fp32"),
        ("bf16", "bf16", "bf16"),
        ("bf16", "fp32", "bf16"),
        ("fp32", "bf16", "fp32"),
        ("fp32", "fp32", "bf16"),
    ],
)
def test_every_dtype_is_the_configs(param: str, reduce: str, master: str) -> None:
    fsdp = {"param_dtype": param, "reduce_dtype": reduce, "master_dtype": master}
    compute = NAMES.get(param, FP32)  # auto: fp32 on a CPU
    for dtypes in run(2, observed, saved_model("llama"), fsdp):
        assert dtypes == {
            "gathered": {compute},
            "hidden": {compute},
            "reduced": {NAMES[reduce]},
            "stored": {NAMES[master]},
            "state": {NAMES[master]},
        }


@pytest.mark.parametrize(
    ("param", "master", "words"),
    [
        (
            "fp16",
            "bf16",
            "computing in float16 with bfloat16 master weights has the range of float16 and the precision of",
        ),
        ("fp32", "bf16", "computing in float32 with bfloat16 master weights takes the time and memory of float32"),
        ("auto", "bf16", "computing in float32 with bfloat16"),  # on a CPU
        ("bf16", "bf16", ""),
        ("bf16", "fp32", ""),
        ("fp16", "fp32", ""),
        ("fp32", "fp32", ""),
    ],
)
def test_a_pair_of_dtypes_without_a_use_is_said(param: Any, master: Any, words: str) -> None:
    remark = Precision.from_config(FsdpConfig(param_dtype=param, master_dtype=master), torch.device("cpu")).remark()
    assert remark.startswith(words) and bool(remark) == bool(words)


# ---------------------------------------------------------------- the contract, broken


def _a_master(engine: Engine) -> None:
    engine.module.to(torch.bfloat16)


def _the_state(engine: Engine) -> None:
    assert engine.optimizer is not None
    state = next(iter(engine.optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].to(BF16)


def _the_reduction(engine: Engine) -> None:
    for module in fsdp_modules(engine.module):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in [] if group is None else group.fsdp_params:
            parameter.reduce_dtype = BF16


def _a_buffer(engine: Engine) -> None:
    rotary = engine.module.get_submodule("model.rotary_emb")
    rotary._buffers["inv_freq"] = rotary._buffers["inv_freq"].to(BF16)


BREAKS: dict[str, tuple[Callable[[Engine], None], str]] = {
    "master": (_a_master, "is stored as torch.bfloat16, not torch.float32"),
    "state": (_the_state, "optimizer state exp_avg of .* is torch.bfloat16"),
    "reduction": (_the_reduction, r"FSDP computes and reduces in \(torch.float32, torch.bfloat16\)"),
    "buffer": (_a_buffer, "buffer model.rotary_emb.inv_freq is torch.bfloat16"),
}


def broken(path: str, contract: str) -> None:
    engine = open_engine(path, "1")
    one_step(engine)
    check_contract(engine)
    BREAKS[contract][0](engine)
    with pytest.raises(RuntimeError, match="dtype contract broken: .*" + BREAKS[contract][1]):
        check_contract(engine)


@pytest.mark.parametrize("contract", BREAKS)
def test_a_broken_contract_is_an_error(contract: str) -> None:
    run(1, broken, saved_model("llama"), contract)


# ---------------------------------------------------------------- bf16 compute


def gradients(path: str, mesh: str, param: str) -> dict[str, Tensor]:
    engine = open_engine(path, mesh, fsdp={"param_dtype": param}, step={"max_tokens_per_device": 61})
    documents, metas = to_documents(engine, STEP)
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    return {name: gradient for name, gradient in engine.gradients() if gradient is not None}


@pytest.mark.parametrize("family", ["llama", "gemma2", "stablelm"])
def test_gradients_in_bf16_are_close_to_those_in_fp32(family: str) -> None:
    path = saved_model(family)
    rounded, exact = run(2, gradients, path, "2", "bf16")[0], run(1, gradients, path, "1", "fp32")[0]
    largest = max(float(gradient.norm()) for gradient in exact.values())
    assert rounded.keys() == exact.keys()
    for name, gradient in exact.items():
        assert rounded[name].dtype == FP32  # masters, and what is added up for them
        assert float((rounded[name] - gradient).norm()) < 0.1 * max(float(gradient.norm()), 1e-2 * largest), name


def buffers(path: str, purpose: Any, init: str, master: str) -> dict[str, tuple[torch.dtype, Tensor]]:
    engine = open_engine(
        path, "1", purpose=purpose, model={"init": init}, fsdp={"param_dtype": "bf16", "master_dtype": master}
    )
    assert engine.module.get_parameter("lm_head.weight").dtype == (BF16 if purpose == "inference" else NAMES[master])
    return {name: (buffer.dtype, buffer) for name, buffer in engine.module.named_buffers()}


@pytest.mark.parametrize(
    ("purpose", "init", "master"),
    [
        ("train", "pretrained", "fp32"),
        ("train", "pretrained", "bf16"),
        ("train", "random", "bf16"),
        ("inference", "pretrained", "fp32"),
    ],
)
def test_buffers_stay_in_fp32(purpose: str, init: str, master: str) -> None:
    """inv_freq and e_score_correction_bias: rounded, they would turn every position, and route tokens elsewhere."""
    path = saved_model("deepseek_v3")
    buffers_of_rank = run(1, buffers, path, purpose, init, master)[0]
    kinds = {name.rsplit(".", 1)[-1] for name in buffers_of_rank}
    assert {"inv_freq", "e_score_correction_bias"} <= kinds
    exact = run(1, buffers, path, "train", init, "fp32")[0]
    for name, (dtype, value) in buffers_of_rank.items():
        assert dtype == FP32, name
        assert torch.equal(value, exact[name][1]), name


def moved_norms(path: str, master: str) -> tuple[float, float]:
    """(smallest, largest) distance of the final norm's weights, all 1.0, from where they were, after a step at 1e-4."""
    engine = open_engine(
        path, "2", fsdp={"param_dtype": "bf16", "master_dtype": master}, optimizer={"eps": 1e-12, "max_grad_norm": None}
    )
    before = dict(engine.tensors())["model.norm.weight"].float().clone()
    assert torch.equal(before, torch.ones_like(before))
    one_step(engine, lr=1e-4)
    moved = (dict(engine.tensors())["model.norm.weight"].float() - before).abs()
    return float(moved.min()), float(moved.max())


def test_masters_move_by_less_than_bf16_can_tell() -> None:
    """An update of 1e-4 x 1.0 is a fortieth of the step between two bf16 numbers."""
    for smallest, largest in run(2, moved_norms, saved_model("llama"), "fp32"):
        assert smallest == pytest.approx(1e-4, rel=0.01)
        assert largest == pytest.approx(1e-4, rel=0.01)
    for smallest, largest in run(2, moved_norms, saved_model("llama"), "bf16"):
        assert smallest == largest == 0.0


def steps_of_masters(path: str, param: str) -> float:
    """How far twenty small steps take the final norm."""
    engine = open_engine(path, "1", fsdp={"param_dtype": param}, optimizer={"name": "sgd", "weight_decay": 0.0})
    before = dict(engine.tensors())["model.norm.weight"].clone()
    for _ in range(20):
        one_step(engine, lr=1e-4)
    after = dict(engine.tensors())["model.norm.weight"]
    assert isinstance(engine.module.get_parameter("model.norm.weight"), DTensor)
    return float((after - before).norm())


def test_small_steps_add_up_under_bf16_compute() -> None:
    path = saved_model("llama")
    exact, rounded = run(1, steps_of_masters, path, "fp32")[0], run(1, steps_of_masters, path, "bf16")[0]
    assert exact > 0
    assert rounded == pytest.approx(exact, rel=0.05)
