"""weft.ops.swiglu against autograd of the formula, and the kernels of experts under Triton's interpreter and
compiler."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.test_head import Operators
from weft import ops
from weft.launch.simulated import Simulation
from weft.ops import dispatch, kernel_trial, swiglu


def operands(dtype: torch.dtype, weights: torch.dtype, rows: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, upstream = (torch.randn(rows, n, generator=generator).to(dtype) for n in (2 * 37, 37))
    return x.requires_grad_(), torch.rand(rows, generator=generator).to(weights).requires_grad_(), upstream


@pytest.mark.parametrize("rows", [7, 0])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(dtype: torch.dtype, weights: torch.dtype, rows: int) -> None:
    x, weight, upstream = operands(dtype, weights, rows)
    out = swiglu.weighted_swiglu(x, weight)
    grads = torch.autograd.grad(out, (x, weight), upstream)
    wide, weight_64 = (t.detach().double().requires_grad_() for t in (x, weight))
    gate, up = wide.chunk(2, -1)
    truth = F.silu(gate) * up * weight_64[:, None]
    truths = torch.autograd.grad(truth, (wide, weight_64), upstream.double())
    assert out.dtype == grads[0].dtype == dtype and grads[1].dtype == weights
    precision = max(4 * torch.finfo(t).eps for t in (dtype, weights))
    for result, expected in zip((out, *grads), (truth, *truths), strict=True):
        largest = float(expected.detach().abs().max()) if rows else 1.0
        torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=precision * largest)


def test_on_cuda_it_is_a_kernel_for_forward_and_one_for_backward() -> None:
    """torch's operations run nine; on fake tensors."""
    x, weight, upstream = operands(torch.bfloat16, torch.bfloat16)
    with Simulation("cuda").running(), Operators() as operators:
        out = swiglu.weighted_swiglu(x, weight)
        torch.autograd.grad(out, (x, weight), upstream)
    kernels = {name: count for name, count in operators.names.items() if name not in ("aten::detach", "prim::device")}
    assert kernels == {"weft::swiglu": 1, "weft::swiglu_gradient": 1}


def in_process(body: str, **environment: str) -> str:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        f"from tests.ops.test_swiglu import {body}; {body}(); print('passed')",
    ]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return ran.stdout or ran.stderr


def compare_kernels() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert swiglu.check_kernels(torch.device("cpu"), dtype), dtype
        assert dispatch.check_kernel(torch.device("cpu"), dtype), dtype


def test_kernels_equal_the_operations() -> None:
    """Under Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton")
    assert in_process("compare_kernels", TRITON_INTERPRET="1") == "passed\n"


def compile_kernels() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from weft.ops import expert_kernels

    for kernel in (expert_kernels._forward, expert_kernels._backward):
        for weights in ("*bf16", "*fp32"):
            types_of = {"width": "i32", "weights": weights, "grad_weights": weights, "BLOCK": "constexpr"}
            signature = {name: types_of.get(name, "*bf16") for name in kernel.arg_names}
            source = ASTSource(kernel, signature, {(kernel.arg_names.index("BLOCK"),): expert_kernels._BLOCK})
            assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]
    names = expert_kernels._sum_rows.arg_names
    constants: dict[tuple[int, ...], int] = {
        (names.index("CHOSEN"),): 8,
        (names.index("BLOCK"),): expert_kernels._BLOCK,
    }
    types_of = {"width": "i32", "indices": "*i64", "CHOSEN": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(expert_kernels._sum_rows, {name: types_of.get(name, "*bf16") for name in names}, constants)
    assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]


def test_kernels_compile_for_a_gpu() -> None:
    """Without one: the interpreter takes code that Triton's compiler does not."""
    pytest.importorskip("triton")
    assert in_process("compile_kernels") == "passed\n"


def test_kernels_name_nothing_that_tritons_compiler_refuses() -> None:
    """It reads annotations, too: as global names only modules and constexprs."""
    code = ast.parse((Path(swiglu.__file__).parent / "expert_kernels.py").read_text())
    functions = [node for node in code.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert len(functions) == 3
    for function in functions:
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        stored = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {a.arg for a in function.args.args}
        assert {node.id for node in names} - stored <= {"tl", "range", "triton"}, function.name


def test_on_cuda_the_sum_of_a_tokens_rows_is_a_kernel() -> None:
    rows = torch.randn(12, 8, dtype=torch.bfloat16, requires_grad=True)
    with Simulation("cuda").running(), Operators() as operators:
        dispatch.sum_of_choices(rows, torch.randperm(12), 3)
    assert operators.names["weft::sum_rows"] == 1 and "aten::_embedding_bag" not in operators.names


def test_a_wrong_sum_of_rows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = types.ModuleType("weft.ops.expert_kernels")
    wrong.sum_rows = lambda rows, indices, out: out.copy_(rows[indices[:, :-1]].sum(1))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "weft.ops.expert_kernels", wrong)
    monkeypatch.setattr(ops, "expert_kernels", wrong, raising=False)
    monkeypatch.setattr(kernel_trial, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match="Outputs of experts are added without Triton kernels"):
        assert not dispatch.check_kernel.__wrapped__(torch.device("cpu"), torch.bfloat16)


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = types.ModuleType("weft.ops.expert_kernels")
    wrong.forward = lambda x, weight, out: out.copy_(1.01 * swiglu.plain(x, weight))  # type: ignore[attr-defined]
    wrong.backward = lambda upstream, x, weight, *grads: [  # type: ignore[attr-defined]
        grad.copy_(truth) for grad, truth in zip(grads, swiglu.plain_gradient(upstream, x, weight), strict=True)
    ]
    monkeypatch.setitem(sys.modules, "weft.ops.expert_kernels", wrong)
    monkeypatch.setattr(ops, "expert_kernels", wrong, raising=False)
    monkeypatch.setattr(kernel_trial, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match="SwiGLU of experts is computed without Triton kernels"):
        assert not swiglu.check_kernels.__wrapped__(torch.device("cpu"), torch.bfloat16)
