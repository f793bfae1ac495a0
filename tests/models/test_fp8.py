"""model.transforms=[fp8]: products of rounded matrices, the layers that have them, and parity with plain transformers
whose linear layers round in the same way."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import zoo
from tests.support.cases import graphs_as_traced, open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.toy_tokenizers import chat, write_jsonl
from tests.support.zoo import tiny_config
from weft.config import load_config
from weft.errors import UserError
from weft.models import hf
from weft.models.train_module import TrainModule
from weft.models.transforms import describe_fp8, linear_layers, use_fp8
from weft.ops import fp8
from weft.verify.adapter import as_in_files
from weft.verify.documents import awkward_steps
from weft.verify.observed import one_gradient
from weft.verify.reference import Reference


def plainly_rounded(row: list[float]) -> list[float]:
    """A row as e4m3 holds it: multiples of 2^-3 of each number's power of two, no finer than 2^-9 of the scale."""
    largest = max(map(abs, row))
    scale = 1.0 if largest == 0 else 2.0 ** math.ceil(math.log2(largest / 448))
    values = []
    for number in row:
        exponent = max(-6, math.floor(math.log2(abs(number) / scale))) if number else -6
        step = 2.0 ** (exponent - 3)
        values.append(round(number / scale / step) * step * scale)  # Python rounds halves to even, as e4m3 does
    return values


def test_rows_are_rounded_to_e4m3_with_the_least_power_of_two_that_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 40, generator=generator) * torch.exp2(torch.randint(-20, 20, (64, 1), generator=generator))
    rows[0], rows[1, :2], rows[2] = 0, torch.tensor([448.0, -449.0]), torch.linspace(-1.75, 1.75, 40)
    rows[3], rows[4] = rows[3] / rows[3].abs().max() * 1.75 * 2**5, rows[4] / rows[4].abs().max() * 2**7
    values, scale = fp8.rounded(rows, 1)
    assert (values.float() * scale).tolist() == [plainly_rounded(row) for row in rows.tolist()]
    columns, of_columns = fp8.rounded(rows.T.contiguous(), 0)
    assert torch.equal(columns.T.float(), values.float()) and torch.equal(of_columns.T, scale)
    assert (scale[0], scale[2], scale[3], scale[4]) == (1, 2**-8, 2**-3, 2**-1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(value: float) -> None:
    x = torch.ones(2, 16)
    x[0, 3] = value
    out = fp8.linear(x, torch.eye(16))
    assert out[0].isnan().all() and torch.equal(out[1], x[1])


def emulated(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same in plain steps that autograd differentiates: rounded copies in place of the values, twice."""

    def rows(matrix: Tensor) -> Tensor:
        largest = matrix.abs().amax(-1, keepdim=True)
        scale = torch.exp2(torch.ceil(torch.log2(largest.double() / 448))).where(largest > 0, 1.0).float()
        return (matrix / scale).to(torch.float8_e4m3fn).float() * scale

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return rows(x) @ rows(weight).T

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return rows(grads[0]) @ rows(weight.T).T, grads[0].flatten(0, -2).T @ x.flatten(0, -2)

    out = Product.apply(x, weight)
    return out if bias is None else out + bias


def test_a_layer_and_its_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, upstream = (
        torch.randn(*shape, generator=generator) for shape in ((2, 5, 32), (48, 32), (48,), (2, 5, 48))
    )
    results = []
    for function in (fp8.linear, emulated, F.linear):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])
    for actual, reference, _ in zip(*results, strict=True):
        assert torch.allclose(actual, reference, rtol=1e-6, atol=1e-6)
    off = [(actual - exact).norm() / exact.norm() for actual, _, exact in zip(*results, strict=True)]
    assert 1e-2 < off[0] < 5e-2 and 1e-2 < off[1] < 5e-2  # it does round
    assert off[2] < 1e-6 and off[3] < 1e-6  # and not for weights and bias
    out = fp8.linear(x.requires_grad_(), weight)  # a frozen weight
    assert torch.equal(torch.autograd.grad(out, x, upstream)[0], results[0][1])


def layers_of(family: str) -> tuple[TrainModule, list[str]]:
    model = hf.build_meta(tiny_config(family), dtype=torch.float32, attention="eager")
    module = TrainModule(model)
    return module, [name for name, _ in linear_layers(module)]


@pytest.mark.parametrize("family", sorted({*zoo._ZOO} - {"gpt2"}))  # whose layers are no nn.Linear
def test_no_router_and_every_projection(family: str) -> None:
    """A router is what scores experts: its width is their number, or one (the gate of a shared expert)."""
    module, names = layers_of(family)
    config = module.hf_model.config.get_text_config()
    counts = {1, *(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))}
    widths = {name: hf.linear_widths(module.get_submodule(name))[1] for name in names}
    assert not [name for name, width in widths.items() if width in counts], widths
    projections = {
        name for name, child in module.named_modules() if isinstance(child, nn.Linear) and ".layers." in f".{name}"
    }
    for name in projections - set(names):
        end = name.rpartition(".")[2]
        assert end not in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), name


def distances(path: str, mesh: str, sections: dict[str, Any]) -> tuple[float, float, float] | None:
    """(relative difference of the loss, of the gradient of all parameters, the same from layers that do not round)."""
    steps = awkward_steps(128)
    with graphs_as_traced():
        engine = open_engine(path, mesh, **{**sections, "model": {"transforms": ("fp8",), **sections.get("model", {})}})
        loss, gradients, _ = one_gradient(engine, steps[0], None)
    if not engine.ranks.is_first:
        return None
    gradients = as_in_files(engine, gradients)
    plain = Reference(path)
    exact = plain.gradients(steps[0])[1]
    for name, child in plain.model.named_modules():
        wide = type(child) is nn.Linear and child.in_features % 16 == child.out_features % 16 == 0
        if wide and ".layers." in name and not name.endswith(("gate", "router")):
            child.forward = partial(lambda layer, x: emulated(x, layer.weight, layer.bias), child)
    expected_loss, expected = plain.gradients(steps[0])
    assert gradients.keys() == expected.keys()

    def distance(candidates: dict[str, Tensor]) -> float:
        squares = sum(
            float((gradients[name].double() - gradient.double()).square().sum())
            for name, gradient in candidates.items()
        )
        return math.sqrt(squares / sum(float(gradient.double().square().sum()) for gradient in candidates.values()))

    return abs(loss / expected_loss - 1), distance(expected), distance(exact)


@pytest.mark.covers("model.transforms")
@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    pairs(
        [("llama", "1", {}), ("qwen3", "2", {"model": {"recompute": "full"}}), ("qwen2_moe", "ep2", {}),
         ("gemma3_text", "cp2", {}), ("llama", "pp2z", {})],
        [("qwen3", "2x1", {"model": {"compile": True}}), ("llama", "2x2", {}),
         ("deepseek_v3", "2", {}), ("qwen3_moe", "pp2", {})],
    ),
)  # fmt: skip
def test_gradients_of_plain_layers_that_round(family: str, mesh: str, sections: dict[str, Any]) -> None:
    """In the norm over all parameters: where sums differ in their last bits, a number halfway between two of e4m3
    may be rounded to either, and moves single elements by up to a percent."""
    loss, gradients, from_exact = run(world_of(mesh), distances, saved_model(family), mesh, sections)[0]
    assert loss < 1e-5
    assert gradients < 0.1 * from_exact and from_exact > 1e-2


def test_layers_of_other_widths_are_left_and_named() -> None:
    model = hf.build_meta(tiny_config("llama", intermediate_size=72), dtype=torch.float32, attention="eager")
    module = TrainModule(model)
    use_fp8(module)
    assert describe_fp8(module) == (
        "fp8 (not exact): 8 linear layers of the decoder; 6 have widths that are not multiples of 16 "
        "(model.layers.0.mlp.gate_proj)"
    )
    narrow = hf.build_meta(tiny_config("llama", hidden_size=40, head_dim=8), dtype=torch.float32, attention="eager")
    with pytest.raises(UserError, match=r"finds no nn.Linear .* set 'model\.transforms=\[\]'"):
        use_fp8(TrainModule(narrow))


def test_refusals(tmp_path: Path) -> None:
    required = [f"model.path={saved_model('llama')}", f"data.path={tmp_path}/chats.jsonl"]
    write_jsonl(tmp_path / "chats.jsonl", chat(("user", "1"), ("assistant", "2")))
    words = [*required, "model.transforms=[fp8]"]
    assert load_config([], words).model.transforms == ("fp8",)
    with pytest.raises(UserError, match=r"Set mesh\.tp=1, or 'model\.transforms=\[\]'"):
        load_config([], [*words, "mesh.tp=2"])
    with pytest.raises(UserError, match=r"model\.transforms must be"):
        load_config([], [*required, "model.transforms=[fp4]"])


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [((8, 0), torch.bfloat16, "has none"), ((9, 0), torch.float16, "Set fsdp.param_dtype=bf16"),
     ((9, 0), torch.bfloat16, "a trial of fp8 failed on A card")],
)  # fmt: skip
def test_a_device_without_them_is_refused(capability: tuple[int, int], dtype: torch.dtype, message: str) -> None:
    with (
        mock.patch("torch.cuda.get_device_name", return_value="A card"),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch.object(Tensor, "to", lambda x, *a: x),  # there is no such device here
        mock.patch.object(fp8, "linear", side_effect=RuntimeError("no kernel")),
        pytest.raises(UserError, match=message),
    ):
        fp8.check(torch.device("cuda"), dtype)


def test_the_call_of_the_product_on_cuda() -> None:
    """Row-wise scales, the second operand column by column, as torch's scaled_mm needs them on the device; torch's CPU
    kernel takes the same call."""
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(7, 32, generator=generator), torch.randn(48, 32, generator=generator)
    (a, a_scale), (b, b_scale) = fp8.rounded(x, 1), fp8.rounded(weight, 1)
    by_row = F.ScalingType.RowWise
    kernel = F.scaled_mm(a, b.T, a_scale, by_row, b_scale.T, by_row, output_dtype=torch.bfloat16)
    assert torch.allclose(kernel.float(), fp8.product(a, a_scale, b, b_scale, torch.float32), rtol=1e-2, atol=1e-2)
