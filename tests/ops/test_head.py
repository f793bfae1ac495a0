"""weft.ops.head against the same readouts computed from all logits at once."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft import ops
from weft.launch.simulated import Simulation
from weft.ops import head, kernel_trial
from weft.ops.communicator import ThreadCommunicator, ThreadGroup
from weft.ops.head import KnownGrad, LogitTransform, VocabularyShard, chunked_readouts, logprob_and_top1

TRANSFORMS = {
    "none": LogitTransform(),
    "scale": LogitTransform(scale=0.25),
    "divide": LogitTransform(scale=1 / 8.0),
    "softcap": LogitTransform(softcap=3.0),
    "scale and softcap": LogitTransform(scale=1.7, softcap=2.0),
}
TILES = [None, (1, 1), (3, 7), (5, 100), (100, 13)]


def full_readouts(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(1)


def problem(tokens: int, dtype: torch.dtype, *, vocabulary: int = 37, width: int = 6, seed: int = 0) -> list[Tensor]:
    """hidden, weight, bias (all requiring gradients) and targets."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return [normal(tokens, width), normal(vocabulary, width), normal(vocabulary), targets]


def gradients(outputs: list[Tensor], upstream: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, inputs, upstream))


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance * scale, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_values_and_gradients_equal_full_logits(
    transform: LogitTransform, with_bias: bool, tile: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = problem(11, dtype)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for temperature in (1.0, 0.6):
        bias_used = bias if with_bias else None
        actual = chunked_readouts(
            hidden, weight, bias_used, targets, transform, entropy=True, temperature=temperature, tile=tile
        )
        expected = full_readouts(hidden, weight, bias_used, targets, transform, temperature)
        assert actual[1] is not None
        upstream = [torch.randn(11, dtype=dtype), torch.randn(11, dtype=dtype)]
        close(actual[0], expected[0], tolerance)
        close(actual[1], expected[1], tolerance)
        got = gradients([actual[0], actual[1]], upstream, inputs)
        for value, reference in zip(got, gradients(list(expected), upstream, inputs), strict=True):
            close(value, reference, tolerance)


@pytest.mark.parametrize("readout", ["logprob", "entropy only", "entropy unused"])
def test_each_readout_alone_may_have_a_gradient(readout: str) -> None:
    hidden, weight, bias, targets = problem(7, torch.float64)
    transform = TRANSFORMS["scale and softcap"]
    actual = chunked_readouts(hidden, weight, bias, targets, transform, entropy=readout != "logprob", tile=(2, 5))
    expected = full_readouts(hidden, weight, bias, targets, transform, 1.0)
    index = 1 if readout == "entropy only" else 0
    readout_value = actual[index]
    assert readout_value is not None and (actual[1] is None) == (readout == "logprob")
    upstream = [torch.randn(7, dtype=torch.float64)]
    got = gradients([readout_value], upstream, [hidden, weight, bias])
    for a, b in zip(got, gradients([expected[index]], upstream, [hidden, weight, bias]), strict=True):
        close(a, b, 1e-12)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_top1_is_whether_argmax_is_the_target(transform: LogitTransform, tile: tuple[int, int] | None) -> None:
    hidden, weight, bias, targets = problem(40, torch.float32, vocabulary=7)
    logits = transform(hidden @ weight.T + bias)
    logprob, top1 = logprob_and_top1(hidden, weight, bias, targets, transform, tile=tile)
    assert torch.equal(top1, (logits.argmax(1) == targets).float()) and 0 < top1.sum() < 40
    close(logprob, full_readouts(hidden, weight, bias, targets, transform, 1.0)[0].detach(), 1e-5)
    assert not logprob.requires_grad


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_is_what_it_says(transform: LogitTransform) -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    expected = logits * transform.scale
    if transform.softcap is not None:
        expected = transform.softcap * torch.tanh(expected / transform.softcap)
    torch.testing.assert_close(transform(logits), expected)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_gradcheck(transform: LogitTransform) -> None:
    hidden, weight, bias, targets = problem(4, torch.float64, vocabulary=9, width=3)

    def readouts(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        values = chunked_readouts(hidden, weight, bias, targets, transform, entropy=True, temperature=0.8, tile=(3, 4))
        return tuple(x for x in values if x is not None)

    assert torch.autograd.gradcheck(readouts, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_predictions_give_zero_gradients(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = problem(0, dtype)
    logprob, entropy = chunked_readouts(hidden, weight, bias, targets, LogitTransform(), entropy=True)
    assert entropy is not None and logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    for x in (hidden, weight, bias):
        assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()


def test_one_prediction() -> None:
    hidden, weight, bias, targets = problem(1, torch.float32)
    logprob, _ = chunked_readouts(hidden, weight, bias, targets, LogitTransform(), entropy=False)
    close(logprob, full_readouts(hidden, weight, bias, targets, LogitTransform(), 1.0)[0], 1e-6)
    with torch.no_grad():
        same, _ = chunked_readouts(hidden, weight, bias, targets, LogitTransform(), entropy=False)
    assert torch.equal(same, logprob)


HINTS = ["right", "a multiple", "partly zero", "both zero", "of sum zero"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("tile", [None, (3, 7)], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("hint", HINTS)
def test_a_known_direction_changes_nothing_but_the_work(
    hint: str, transform: LogitTransform, tile: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = problem(11, dtype)
    upstream = torch.randn(11, dtype=dtype)
    if hint == "partly zero":
        upstream[3:6] = 0
    if hint == "both zero":
        upstream *= 0
    if hint == "of sum zero":  # as advantages within a group are
        upstream[:] = torch.tensor([1.0, -1.0] * 5 + [0.0])
    direction = KnownGrad({"a multiple": -3.7, "partly zero": 2}.get(hint, 1) * upstream)
    actual, _ = chunked_readouts(
        hidden, weight, bias, targets, transform, entropy=False, temperature=0.7, known_grad=direction, tile=tile
    )
    expected, _ = full_readouts(hidden, weight, bias, targets, transform, 0.7)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    close(actual, expected, tolerance)
    inputs = [hidden, weight, bias]
    reference_gradients = gradients([expected], [upstream], inputs)
    for retain in (True, False):
        got = torch.autograd.grad([actual], inputs, [upstream], retain_graph=retain)
        for value, reference in zip(got, reference_gradients, strict=True):
            close(value, reference, tolerance)
    assert [bool(flag) for flag in direction.wrong] == [False]  # the second backward computed afresh


@pytest.mark.parametrize("wrong", ["another", "zero", "one token in a thousand"])
def test_a_direction_that_is_wrong_is_flagged(wrong: str) -> None:
    hidden, weight, bias, targets = problem(1000, torch.float32)
    upstream = torch.rand(1000) + 0.5
    guess = {"another": torch.ones(1000), "zero": torch.zeros(1000)}.get(wrong, upstream.clone())
    if wrong == "one token in a thousand":
        guess[7] *= 1.00001
    direction = KnownGrad(guess)
    logprob, _ = chunked_readouts(hidden, weight, bias, targets, LogitTransform(), entropy=False, known_grad=direction)
    (logprob @ upstream).backward()
    assert [bool(flag) for flag in direction.wrong] == [True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_no_wrong_direction(bad: float) -> None:
    """The gradients of the head are not finite either, and the step is dropped."""
    hidden, weight, _, targets = problem(11, torch.float32)
    direction = KnownGrad(torch.rand(11))
    logprob, _ = chunked_readouts(hidden, weight, None, targets, LogitTransform(), entropy=False, known_grad=direction)
    upstream = direction.values_N / 2
    upstream[4] = bad
    assert not any(gradient.isfinite().all() for gradient in gradients([logprob], [upstream], [hidden, weight]))
    assert not direction.wrong[0]


def test_a_right_direction_saves_the_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = problem(11, torch.float32)
    upstream = torch.rand(11)
    monkeypatch.setattr(head, "_differentiate", lambda *_: pytest.fail("computed again"))
    direction = KnownGrad(upstream)
    logprob, _ = chunked_readouts(hidden, weight, None, targets, LogitTransform(), entropy=False, known_grad=direction)
    (logprob @ (upstream / 7)).backward()
    assert hidden.grad is not None and hidden.grad.any()


@pytest.mark.parametrize("tokens", [0, 64])
def test_a_known_direction_in_bf16(tokens: int) -> None:
    hidden, weight, _, targets = problem(tokens, torch.bfloat16, vocabulary=1000, width=32)
    grads = []
    for direction in (None, KnownGrad(torch.ones(tokens))):
        logprob, _ = chunked_readouts(
            hidden, weight, None, targets, LogitTransform(), entropy=False, known_grad=direction, tile=(16, 100)
        )
        grads.append(gradients([logprob.sum()], [torch.tensor(0.5)], [hidden, weight]))
    for gradient, reference in zip(*grads, strict=True):
        assert gradient.dtype == reference.dtype == torch.bfloat16
        assert (gradient.float() - reference.float()).norm() <= 0.01 * gradient.float().norm()


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_only_the_gradients_that_are_needed(trained: str) -> None:
    named = dict(zip(("hidden", "weight", "bias", "targets"), problem(5, torch.float64), strict=True))
    inputs = {name: x if name == trained else x.detach() for name, x in named.items()}
    args = (inputs["hidden"], inputs["weight"], inputs["bias"], inputs["targets"])
    logprob, _ = chunked_readouts(*args, LogitTransform(), entropy=False, tile=(2, 8))
    (got,) = gradients([logprob.sum()], [torch.ones((), dtype=torch.float64)], [inputs[trained]])
    expected = full_readouts(*args, LogitTransform(), 1.0)[0].sum()
    close(got, gradients([expected], [torch.ones((), dtype=torch.float64)], [inputs[trained]])[0], 1e-12)


@pytest.mark.parametrize("tile", [None, (16, 100)], ids=str)
def test_bf16_is_as_near_to_the_truth_as_full_logits(tile: tuple[int, int] | None) -> None:
    """Products in bf16, the rest in fp32; the truth is fp64 on the same rounded inputs."""
    hidden, weight, _, targets = problem(64, torch.bfloat16, vocabulary=1000, width=32)
    upstream = [torch.randn(64)]

    def run(compute: torch.dtype, chunked: bool) -> tuple[Tensor, list[Tensor]]:
        h, w = hidden.detach().to(compute).requires_grad_(), weight.detach().to(compute).requires_grad_()
        if chunked:
            logprob, _ = chunked_readouts(h, w, None, targets, LogitTransform(), entropy=False, tile=tile)
        else:
            logprob, _ = full_readouts(h, w, None, targets, LogitTransform(), 1.0)
        return logprob, gradients([logprob], [upstream[0].to(logprob.dtype)], [h, w])

    truth, naive, tiled = run(torch.float64, False), run(torch.bfloat16, False), run(torch.bfloat16, True)
    assert tiled[0].dtype == torch.float32 and [g.dtype for g in tiled[1]] == [torch.bfloat16] * 2
    for expected, plain, actual in zip(
        [truth[0], *truth[1]], [naive[0], *naive[1]], [tiled[0], *tiled[1]], strict=True
    ):
        noise = (plain.double() - expected).norm()
        assert (actual.double() - expected).norm() <= 1.2 * noise + 1e-9 * expected.norm()


def test_the_weights_gradient_is_summed_in_fp32() -> None:
    """Over 64 tiles of tokens, as near to the truth as in one."""
    hidden, weight, _, targets = problem(512, torch.bfloat16, vocabulary=100, width=32)
    wide = weight.detach().double().requires_grad_()
    exact, _ = full_readouts(hidden.detach().double(), wide, None, targets, LogitTransform(), 1.0)
    truth = gradients([exact], [torch.ones(512, dtype=torch.float64)], [wide])[0]

    def error(tile: tuple[int, int]) -> float:
        logprob, _ = chunked_readouts(hidden, weight, None, targets, LogitTransform(), entropy=False, tile=tile)
        return float((gradients([logprob], [torch.ones(512)], [weight])[0].double() - truth).norm() / truth.norm())

    assert error((8, 100)) <= 1.2 * error((512, 100)) + 1e-4


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_added_to_a_wide_sum_without_rounding(narrow: torch.dtype) -> None:
    """A product in 16 bits would be wrong by 2^-9 of itself (bf16), in every tile."""
    generator = torch.Generator().manual_seed(0)
    total, truth = torch.zeros(8, 5), torch.zeros(8, 5, dtype=torch.float64)
    for inner in (3, 70, 1):
        a = torch.randn(8, inner, generator=generator).to(narrow)
        b = torch.randn(inner, 5, generator=generator).to(narrow)
        head.add_product(total, a, b)
        truth += a.double() @ b.double()
    torch.testing.assert_close(total.double(), truth, rtol=1e-6, atol=1e-5)


def test_wide_products_take_the_inner_dimension_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "block_bytes", lambda device: 4 * (8 + 5) * 16)
    a, b, total = torch.randn(8, 70).bfloat16(), torch.randn(70, 5).bfloat16(), torch.ones(8, 5)
    head._widen(total, a, b)
    torch.testing.assert_close(total.double(), 1.0 + a.double() @ b.double(), rtol=1e-6, atol=1e-5)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_direction", [True, False])
def test_on_cuda_a_tile_costs_one_kernel_beside_its_products(with_direction: bool) -> None:
    """In a simulation of a card with 24 GB and of one with 80 GB, whose tiles are four times larger."""
    counts = []
    for gigabytes in (24, 80):
        simulation = Simulation("cuda", gigabytes * 10**9)
        with simulation.running(), Operators() as operators:
            hidden = torch.zeros(4000, 64, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.zeros(151_936, 64, dtype=torch.bfloat16, requires_grad=True)
            direction = KnownGrad(torch.ones(4000)) if with_direction else None
            targets = torch.zeros(4000, dtype=torch.int64)
            logprob, entropy = chunked_readouts(
                hidden, weight, None, targets, LogitTransform(), entropy=not with_direction, known_grad=direction
            )
            (logprob.sum() if entropy is None else logprob.sum() + entropy.sum()).backward()
        names = operators.names
        tiles = names["weft::head_softmax_gradient" if with_direction else "weft::head_gradient"]
        assert names["weft::head_fold"] == (0 if with_direction else tiles)
        assert names["aten::addmm.dtype_out"] == 2 * tiles
        assert not names["aten::exp_"] and not names["aten::scatter_add_"]
        counts.append(tiles)
    assert counts == [5, 2]


def compare_kernels() -> None:
    """Values, both gradients, a softcap, targets of other tiles, columns that no block divides."""
    assert head.check_kernels(torch.device("cpu"), torch.bfloat16)
    for transform in (TRANSFORMS["none"], TRANSFORMS["scale and softcap"]):
        for with_direction in (False, True):
            results = []
            for has_kernel in (False, True):
                head.uses_kernels = lambda tile, check, has_kernel=has_kernel: has_kernel
                hidden, weight, bias, targets = problem(12, torch.bfloat16, vocabulary=300, width=16)
                upstream = torch.linspace(0.5, 2.0, 12)
                direction = KnownGrad(upstream) if with_direction else None
                logprob, entropy = chunked_readouts(
                    hidden, weight, bias, targets, transform, entropy=not with_direction, temperature=0.7,
                    known_grad=direction,
                    tile=(5, 130),
                )  # fmt: skip
                outputs = [logprob] if entropy is None else [logprob, entropy]
                grads = gradients(outputs, [upstream, upstream.flip(0)][: len(outputs)], [hidden, weight, bias])
                top1 = logprob_and_top1(hidden, weight, bias, targets, transform, tile=(5, 130))
                results.append([*outputs, *grads, *top1])
            for plain, fused in zip(*results, strict=True):
                close(fused.float(), plain.float(), 2.0**-6 if plain.dtype == torch.bfloat16 else 1e-5)


def test_kernels_equal_the_operations() -> None:
    """Under Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton")
    body = "from tests.ops.test_head import compare_kernels; compare_kernels(); print('equal')"
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", body], env=interpreted, capture_output=True, text=True, check=False)
    assert ran.stdout == "equal\n", ran.stderr


def compile_kernels() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from weft.ops import head_kernels

    types_of = {"tile": "*bf16", "targets": "*i64", "stride": "i64", "columns": "i32", "inner": "fp32", "outer": "fp32"}
    for kernel in (head_kernels._fold, head_kernels._softmax_gradient, head_kernels._gradient):
        for flag in (True, False):
            chosen = {"CAPPED": flag, "ENTROPY": flag, "BLOCK": head_kernels._BLOCK}
            chosen = {name: value for name, value in chosen.items() if name in kernel.arg_names}
            signature = {n: "constexpr" if n in chosen else types_of.get(n, "*fp32") for n in kernel.arg_names}
            constants = {(kernel.arg_names.index(name),): value for name, value in chosen.items()}
            source = ASTSource(kernel, signature, constants)
            assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]


def test_kernels_compile_for_a_gpu() -> None:
    """Without one: the interpreter takes code that Triton's compiler does not, such as a global name in a function."""
    pytest.importorskip("triton")
    body = "from tests.ops.test_head import compile_kernels; compile_kernels(); print('compiled')"
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", body], capture_output=True, text=True, check=False)
    assert ran.stdout == "compiled\n", ran.stderr


def test_kernels_name_nothing_that_tritons_compiler_refuses() -> None:
    """It reads annotations, too: as global names only modules, functions of triton.jit and constexprs."""
    code = ast.parse((Path(head.__file__).parent / "head_kernels.py").read_text())
    functions = [node for node in code.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert len(functions) >= 4
    globals_allowed = {"tl", "float", "range", *(function.name for function in functions)}
    for function in functions:
        names = [node for node in ast.walk(function.args) if isinstance(node, ast.Name)]
        names += [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        local_names = {node.arg for node in function.args.args}
        local_names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assert {node.id for node in names} - local_names - {"triton"} <= globals_allowed, function.name


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = types.ModuleType("weft.ops.head_kernels")
    for name in ("fold", "softmax_gradient", "gradient"):
        setattr(wrong, name, lambda *arguments: None)
    monkeypatch.setitem(sys.modules, "weft.ops.head_kernels", wrong)
    monkeypatch.setattr(ops, "head_kernels", wrong, raising=False)
    monkeypatch.setattr(kernel_trial, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match="computes without Triton kernels on cpu: their results differ by"):
        assert not head.check_kernels.__wrapped__(torch.device("cpu"), torch.bfloat16)


def test_in_fp16_gradients_are_of_the_scaled_loss() -> None:
    """Tokens with a probability of 1e-8 have a gradient under a loss scale, where the direction is known too; fp16
    holds nothing below 6e-8."""
    scale, targets = 65536.0, torch.zeros(1, dtype=torch.int64)
    hidden = torch.ones(1, 1, dtype=torch.float16)
    weight = torch.tensor([[18.5], [0.0], [-0.5]], dtype=torch.float16, requires_grad=True)
    upstream = torch.ones(1)
    logprob, _ = chunked_readouts(
        hidden, weight, None, targets, LogitTransform(), entropy=False, known_grad=KnownGrad(upstream)
    )
    (gradient,) = gradients([logprob], [upstream * scale], [weight])
    wide = weight.detach().double().requires_grad_()
    exact, _ = full_readouts(hidden.double(), wide, None, targets, LogitTransform(), 1.0)
    (truth,) = gradients([exact], [upstream.double() * scale], [wide])
    assert 1e-9 < float(-truth[1]) / scale < 6e-8
    torch.testing.assert_close(gradient[1:].double(), truth[1:], rtol=0.02, atol=0.0)  # 1 - p rounds to 0 in fp32


def test_mixed_dtypes_follow_the_weight() -> None:
    hidden, weight, _, targets = problem(5, torch.float32)
    narrow = weight.detach().bfloat16().requires_grad_()
    logprob, _ = chunked_readouts(hidden, narrow, None, targets, LogitTransform(), entropy=False)
    (-logprob.sum()).backward()
    assert logprob.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    assert narrow.grad is not None and narrow.grad.dtype == torch.bfloat16


def test_entropy_of_a_certain_prediction_keeps_its_digits() -> None:
    """A difference of two large numbers would return noise of 1e-5 here."""
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[60.0], [45.0], [44.0], [30.0]])
    _, entropy = chunked_readouts(hidden, weight, None, torch.tensor([0]), LogitTransform(), entropy=True, tile=(1, 2))
    exact = torch.distributions.Categorical(logits=weight.double().T).entropy()
    assert entropy is not None
    torch.testing.assert_close(entropy.double(), exact, rtol=0.0, atol=2e-7)


def test_a_target_outside_the_vocabulary_is_not_silent() -> None:
    hidden, weight, _, targets = problem(3, torch.float32)
    targets[1] = -100
    logprob, _ = chunked_readouts(hidden, weight, None, targets, LogitTransform(), entropy=False)
    assert logprob.isnan().tolist() == [False, True, False]


def test_impossible_settings_are_refused() -> None:
    hidden, weight, _, targets = problem(3, torch.float32)
    with pytest.raises(ValueError, match="the temperature of log-probabilities must be above 0"):
        chunked_readouts(hidden, weight, None, targets, LogitTransform(), entropy=False, temperature=0.0)
    with pytest.raises(ValueError, match="softcap must be above 0"):
        LogitTransform(softcap=0.0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_readouts_of_a_divided_vocabulary(ranks: int) -> None:
    """The likeliest token is that of all shards, whichever has the target: its first and its last id too."""
    hidden, weight, _, _ = (x.detach() for x in problem(48, torch.float64, vocabulary=12))
    targets, size = torch.arange(12).repeat(4), 12 // ranks
    targets[-12:] = (hidden @ weight.T)[-12:].argmax(1)
    expected = logprob_and_top1(hidden, weight, None, targets, LogitTransform())
    assert 0 < expected[1].sum() < len(targets)
    group = ThreadGroup(ranks)

    def of_rank(rank: int) -> tuple[Tensor, ...]:
        local_weight, shard = (
            weight[rank * size :][:size],
            VocabularyShard(rank * size, ThreadCommunicator(group, rank)),
        )
        logprob, entropy = chunked_readouts(
            hidden, local_weight, None, targets, LogitTransform(), entropy=True, shard=shard
        )
        assert entropy is not None
        return *logprob_and_top1(hidden, local_weight, None, targets, LogitTransform(), shard=shard), logprob, entropy

    entropy = full_readouts(hidden, weight, None, targets, LogitTransform(), 1.0)[1]
    with ThreadPoolExecutor(ranks) as threads:
        for readouts in threads.map(of_rank, range(ranks)):
            for value, reference in zip(readouts, (*expected, expected[0], entropy), strict=True):
                close(value, reference, 1e-12)


@pytest.mark.parametrize("tokens", [0, 1, 7, 1024, 8192, 8193, 100_000])
@pytest.mark.parametrize("vocabulary", [1, 50, 151_936])
def test_tiles_hold_their_bytes(tokens: int, vocabulary: int) -> None:
    rows, columns = head._tile_shape(tokens, vocabulary, "cpu")
    assert rows >= 1 and 1 <= columns <= vocabulary
    assert rows * columns * 4 <= 1.01 * head.tile_bytes("cpu") + 4 * 64 * rows


_MEASURE = Path(__file__).parents[2] / "benchmarks" / "head.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_against_the_naive_loss() -> None:
    """At a real vocabulary: at most 10% of the naive loss's extra memory. Each runs in a process of its own, so that
    the peaks are the operating system's; benchmarks/head.py has the times."""

    def measure(variant: str) -> dict[str, float]:
        command = [sys.executable, str(_MEASURE), "--one", variant, "--tokens", "1024", "--width", "64", "--runs", "1"]
        done = subprocess.run(command, check=True, capture_output=True)
        answer: dict[str, float] = json.loads(done.stdout)
        return answer

    naive = measure("naive")
    for variant in ("chunked", "chunked, known direction"):
        chunked = measure(variant)
        assert chunked["extra_mib"] <= 0.10 * naive["extra_mib"], (variant, chunked, naive)
        assert abs(chunked["loss"] - naive["loss"]) <= 1e-5 * abs(naive["loss"])
        assert abs(chunked["grad_norm"] - naive["grad_norm"]) <= 1e-5 * naive["grad_norm"]
