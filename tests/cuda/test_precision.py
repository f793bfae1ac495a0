"""What narrow dtypes and compiled graphs may change: rounding, within bounds that are stated here."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor

from tests.cuda.cases import BF16, FP32, STEPS, gradient, kind
from tests.support.cases import open_engine, saved_model
from weft.engine.contract import check_contract
from weft.engine.engine import Engine
from weft.launch.process import Ranks
from weft.ops import fp8
from weft.verify.harness import compare_gradients
from weft.verify.observed import gather_readouts, neighbours, one_gradient, to_documents
from weft.verify.reference import Reference
from weft.verify.routing import Recorder, Replay, Routes

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3")
# Largest relative distances of the loss and of all gradients together, and the mean one of logprobs (nats).
# The worst family has 7e-5, 0.018 and 0.0036 on a CPU in bf16, and an eighth of that in fp16.
BOUNDS = {"bf16": (2e-3, 5e-2, 1e-2), "fp16": (5e-4, 1e-2, 2e-3)}


@dataclass(frozen=True)
class Outputs:
    """Of the first of STEPS. logprobs: of all documents, one after the other."""

    loss: float
    gradients: dict[str, Tensor]
    logprobs: Tensor


def seen_by(engine: Engine, routes: Routes) -> Outputs:
    facts = engine.built.flops
    replay = Replay(routes, facts.experts, facts.experts_per_token) if routes else None
    layers = [layer for _, layer in engine.module.layers]
    with nullcontext() if replay is None else replay.replaying(engine.module, layers):
        return _seen_by(engine)


def _seen_by(engine: Engine) -> Outputs:
    loss, gradients, _ = one_gradient(engine, STEPS[0], None)
    documents, metas = to_documents(engine, STEPS[0])
    read = engine.readout(engine.plan(metas), documents)
    return Outputs(loss, gradients, torch.cat([values["logprob"] for values in read.values()]))


def routes_of(engine: Engine, path: str) -> Routes:
    """Of a plain model in fp32: two scores that are nearly alike send a token elsewhere in another dtype."""
    facts = engine.built.flops
    if not facts.expert:
        return {}
    recorder, plain = Recorder(facts.experts, facts.experts_per_token), Reference(path)
    with recorder.watching(plain.model, list(plain.plain.get_submodule(engine.module.facts.layers).children())):
        for ids, _ in STEPS[0]:
            plain.logprobs(ids)
    return recorder.routes


def distance(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """||g - g_ref|| / ||g_ref|| of all parameters together."""
    error = sum(float((gradients[name].double() - g.double()).square().sum()) for name, g in expected.items())
    return float((error / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5)


@pytest.mark.parametrize(
    ("family", "dtype"),
    # fp16 has gradients of qwen3_next that are infinite.
    [*((family, dtype) for family in FAMILIES for dtype in BOUNDS), ("qwen3_next", "bf16")],
)
def test_narrow_dtypes_differ_by_rounding(family: str, dtype: str, device: torch.device, ranks: Ranks) -> None:
    """By the kernels that `auto` chooses for them, on the same routes through experts."""
    path = saved_model(family, initializer_range=0.05)
    plain = open_engine(path, "1", device=kind(device), **FP32)
    routes = routes_of(plain, path)
    exact = seen_by(plain, routes)
    engine = open_engine(path, "1", device=kind(device), fsdp={"param_dtype": dtype})
    narrow = seen_by(engine, routes)
    deviations = (
        abs(narrow.loss - exact.loss) / exact.loss,
        distance(narrow.gradients, exact.gradients),
        float((narrow.logprobs - exact.logprobs).abs().mean()),
    )
    print(f"{family} {dtype}: loss {deviations[0]:.1e}, gradients {deviations[1]:.1e}, logprobs {deviations[2]:.1e}")
    assert all(deviation < bound for deviation, bound in zip(deviations, BOUNDS[dtype], strict=True)), deviations
    gradient(engine, 1)
    assert not engine.apply(1e-3).skipped
    check_contract(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_do_not_see_each_other_in_bf16(family: str, device: torch.device, ranks: Ranks) -> None:
    engine = open_engine(saved_model(family), "1", device=kind(device), **BF16)
    assert neighbours(engine, STEPS[0], gather_readouts(engine, STEPS[0])) < 1e-6


@pytest.mark.timeout(240)
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("gcc") is None, reason="torch.compile needs a compiler"
)
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "fp32"), ("qwen3", "bf16"), ("qwen3_moe", "fp32")])
def test_compiled_layers_compute_the_same(family: str, dtype: str, device: torch.device, ranks: Ranks) -> None:
    """With recomputation, and rows of other lengths, which compile nothing anew; around experts, too."""
    if device.type == "cpu":
        torch._inductor.config.compile_threads = 1  # a pool of compilers takes longer to start than to run
        if (family, dtype) != ("qwen3", "fp32"):
            pytest.skip("on a CPU one case is enough")
    path, results = saved_model(family, num_hidden_layers=1, initializer_range=0.05), dict[bool, Any]()
    for compiled in (False, True):
        torch._dynamo.utils.counters.clear()
        model = {"compile": compiled, "recompute": "full"}
        engine = open_engine(path, "1", device=kind(device), model=model, fsdp={"param_dtype": dtype})
        results[compiled] = [one_gradient(engine, step, None)[:2] for step in STEPS]
        gradient(engine, 0)
        assert not engine.apply(1e-3).skipped
        check_contract(engine)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 24
    assert all("torch.compiler.disable" in reason for reason in torch._dynamo.utils.counters["graph_break"])
    torch._dynamo.reset()
    for (loss, gradients), (plain_loss, plain) in zip(results[True], results[False], strict=True):
        if dtype == "fp32":
            assert loss == pytest.approx(plain_loss, rel=1e-5)
            worst = max(compare_gradients(gradients, plain, {}), key=lambda figure: figure.value)
            assert worst.passed, worst
        else:
            assert loss == pytest.approx(plain_loss, rel=BOUNDS[dtype][0])
            assert distance(gradients, plain) < BOUNDS[dtype][1]


def test_fp8_rounds_as_on_a_cpu(device: torch.device) -> None:
    """Scales are powers of two on every device, so that a matmul differs by the order of its sums alone."""
    x = torch.randn(70, 256) * torch.logspace(-30, 8, 70)[:, None]
    x[3], x[4, 5], x[5] = 0.0, float("inf"), 448.0 * 2.0**-140
    for dim in (0, 1):
        results = [fp8.rounded(values, dim) for values in (x, x.to(device))]
        for expected, computed in zip(*results, strict=True):
            torch.testing.assert_close(computed.cpu().float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_linear_layers_compute_as_on_a_cpu(compiled: bool, device: torch.device) -> None:
    if compiled and device.type == "cpu":
        pytest.skip("tests/models compile on a CPU")
    source = [torch.randn(shape).bfloat16() for shape in ((67, 256), (48, 256), (67, 48))]
    results = []
    for target in (torch.device("cpu"), device):
        x, weight, upstream = (values.to(target) for values in source)
        x.requires_grad_(), weight.requires_grad_()
        call = torch.compile(fp8.linear) if compiled and target == device else fp8.linear
        out = call(x, weight)
        results.append([out, *torch.autograd.grad(out, (x, weight), upstream)])
    for expected, computed in zip(*results, strict=True):
        assert float((computed.cpu().float() - expected.float()).norm() / expected.float().norm()) < 4e-3
