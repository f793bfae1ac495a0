"""Modules that run over tiles of tokens: values and gradients, what is stored, how often weights are gathered."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import engine_config, open_engine, saved_model
from tests.support.pool import run
from weft.config.load import load_config
from weft.config.recompute import AUTO_TILE, FULL, Activations
from weft.config.schema import SftConfig
from weft.errors import UserError
from weft.ops import tiles
from weft.ops.recompute import run_layer
from weft.ops.tiles import run_in_tiles
from weft.verify.documents import awkward_steps
from weft.verify.observed import one_gradient


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(16, 40), nn.Linear(40, 16), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[-2])
        return self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.parametrize("frozen", [(), ("up",), ("up", "down")])
@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("shape", [(1, 23, 16), (2, 10, 16), (23, 16), (1, 3, 16)])
def test_values_and_gradients_are_those_of_the_whole(
    frozen: tuple[str, ...], input_grad: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    mlp, x = Mlp().double(), torch.randn(shape, dtype=torch.float64, requires_grad=input_grad)
    for name in frozen:
        getattr(mlp, name).requires_grad_(False)
    inputs = [x] * input_grad + [p for p in mlp.parameters() if p.requires_grad]
    if not inputs:
        assert not run_in_tiles(mlp.forward, mlp, 4, x).requires_grad
        return
    untiled, tiled = mlp(x), run_in_tiles(mlp.forward, mlp, 4, x)
    torch.testing.assert_close(tiled, untiled)
    gradient = torch.randn_like(untiled)
    for observed, expected in zip(
        torch.autograd.grad(tiled, inputs, gradient), torch.autograd.grad(untiled, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(observed, expected)


def test_a_tile_at_a_time_and_no_forward_in_recomputation() -> None:
    """A layer that backward runs again stops before an MLP that is its last part, whose tiles backward runs anyway."""
    mlp, x = Mlp(), torch.randn(1, 23, 16, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return x + run_in_tiles(mlp.forward, mlp, 8, torch.tanh(x))

    sizes: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t)  # type: ignore[func-returns-value]
    with hooks:
        layer(x)
    assert sizes == [23 * 16] * 2  # of tanh and of the tiles' input
    mlp.calls.clear()
    run_layer(FULL, layer, x).sum().backward()
    assert mlp.calls == [8, 8, 7] * 2


def gathers(path: str, tile: int | str) -> tuple[int, list[Any]]:
    """(All-gathers of a step, gradients) with an FSDP unit for each MLP."""
    engine = open_engine(
        path, "2", fsdp={"wrap": ("LlamaMLP", "layers")}, model={"tiled_mlp": tile}, step={"max_tokens_per_device": 70}
    )
    gather, counted = torch.distributed.all_gather_into_tensor, list[int]()

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return gather(*args, **kwargs)

    with mock.patch("torch.distributed.all_gather_into_tensor", counting):
        _, gradients = one_gradient(engine, awkward_steps(128)[0], None)[:2]
    return len(counted), list(gradients.values())


def test_weights_are_gathered_once_for_all_tiles() -> None:
    path = saved_model("llama")
    untiled, tiled = (run(2, gathers, path, tile)[0] for tile in ("off", 16))
    assert tiled[0] == untiled[0]
    for observed, expected in zip(tiled[1], untiled[1], strict=True):
        assert float((observed - expected).norm()) <= 1e-5 * float(expected.norm())


def test_the_gradient_of_the_last_tile_alone_is_seen() -> None:
    """B51: each tile's backward is one of its own, whose gradient replaces that of the tiles before."""

    def replace(self: tiles.Sums, gradients: tuple[Tensor | None, ...]) -> None:
        self._totals = [None if gradient is None else gradient.float() for gradient in gradients]

    mlp, x = Mlp(), torch.randn(1, 23, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(mlp(x).sum(), [mlp.up.weight])
    for plant, same in ((replace, False), (tiles.Sums.add, True)):
        with mock.patch.object(tiles.Sums, "add", plant):
            (observed,) = torch.autograd.grad(run_in_tiles(mlp.forward, mlp, 8, x).sum(), [mlp.up.weight])
        assert torch.allclose(observed, expected, rtol=1e-5, atol=1e-6) == same


def test_sums_of_16_bits_are_rounded_once() -> None:
    mlp, x = Mlp().bfloat16(), torch.randn(1, 512, 16, dtype=torch.bfloat16)
    run_in_tiles(mlp.forward, mlp, 8, x).float().square().sum().backward()
    tiled = mlp.down.weight.grad
    assert tiled is not None and tiled.dtype == torch.bfloat16
    exact = Mlp().double()
    exact.load_state_dict(mlp.state_dict())
    exact(x.double()).square().sum().backward()
    assert exact.down.weight.grad is not None
    assert float((tiled - exact.down.weight.grad).norm()) < 0.01 * float(exact.down.weight.grad.norm())


@pytest.mark.parametrize(
    ("tokens", "model", "tile"),
    [
        (65_536, {"recompute": "full"}, AUTO_TILE),
        (65_536, {}, None),
        (32_768, {"recompute": "full"}, None),
        (65_536, {"recompute": "full", "tiled_mlp": "off"}, None),
        (65_536, {"recompute": "full", "compile": True}, None),
        (64, {"tiled_mlp": 512}, 512),
    ],
)
def test_long_rows_run_in_tiles_by_themselves(tokens: int, model: dict[str, Any], tile: int | None) -> None:
    config = engine_config("x", "1", model=model, step={"max_tokens_per_device": tokens})
    assert Activations.from_config(config).tile == tile


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.tiled_mlp=64", "model.compile=true"], "set model.compile=false, or model.tiled_mlp=off"),
        (["model.tiled_mlp=64", "lora.rank=4", "lora.dropout=0.1"], "set lora.dropout=0, or model.tiled_mlp=off"),
        (["model.offload_activations=inputs"], "set model.recompute=full, or model.offload_activations=off"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_config([], ["model.path=x", "data.path=y", *overrides], SftConfig)


def open_tiled(path: str) -> None:
    with pytest.raises(
        UserError, match=r"no dense MLP or shared expert that weft recognises. Set model\.tiled_mlp=off"
    ):
        open_engine(path, "1", model={"tiled_mlp": 64})


def test_a_model_without_such_modules_is_refused() -> None:
    run(1, open_tiled, saved_model("qwen3_moe"))
