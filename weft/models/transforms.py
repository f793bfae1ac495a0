"""Transforms of a model's modules (model.transforms). Each changes how modules compute, never what they hold.

A transform works on the whole TrainModule, on meta, before recomputation and compilation wrap its layers. To add one,
write its two functions and name it in TRANSFORMS and in model.transforms (config/schema.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from weft.errors import UserError
from weft.models import hf
from weft.models.lora import is_read_only
from weft.models.train_module import TrainModule
from weft.ops import fp8
from weft.terminal import counted

_ROUTERS = ("gate", "router")  # parts of names; not gate_proj


def linear_layers(module: TrainModule) -> Iterator[tuple[str, nn.Module]]:
    """(name, plain linear layer) of the decoder layers, without routers: neither what is named so, nor what a module
    with experts holds beside them (qwen2_moe's shared_expert_gate)."""
    family = module.facts.model_type
    for layer, root in module.layers:
        with_experts = {name for name, child in root.named_modules() if hasattr(child, "experts")}
        for name, child in root.named_modules():
            parts = name.split(".")
            if not hf.is_plain_linear(child) or hf.is_transposed(child) or is_read_only(family, name):
                continue
            if any(part in _ROUTERS for part in parts) or ".".join(parts[:-1]) in with_experts:
                continue
            yield f"{layer}.{name}", child


def use_fp8(module: TrainModule) -> None:
    """Make linear layers of the decoder compute by 8-bit products (ops/fp8.py). Routers, embeddings, heads, fused
    experts and adapters stay as they are, and so do layers whose widths are no multiples of 16."""
    for _, layer in linear_layers(module):
        if not any(width % fp8.MULTIPLE for width in hf.linear_widths(layer)):
            layer.forward = MethodType(_fp8_forward, layer)
    if not any(_computes_in_fp8(layer) for _, layer in linear_layers(module)):
        raise UserError(
            "model.transforms: fp8 finds no nn.Linear in the decoder layers of this model whose widths are multiples "
            f"of {fp8.MULTIPLE}: set 'model.transforms=[]'."
        )


def describe_fp8(module: TrainModule) -> str:
    """A line for the start of a run."""
    layers = list(linear_layers(module))
    count = sum(_computes_in_fp8(layer) for _, layer in layers)
    unchanged = [name for name, layer in layers if not _computes_in_fp8(layer)]
    remark = (
        f"; {len(unchanged)} have widths that are no multiples of {fp8.MULTIPLE} ({unchanged[0]})" if unchanged else ""
    )
    return f"fp8 (not exact): {counted(count, 'linear layer')} of the decoder{remark}"


def _computes_in_fp8(layer: nn.Module) -> bool:
    return getattr(layer.forward, "__func__", None) is _fp8_forward


def _fp8_forward(layer: Any, x: Tensor) -> Tensor:
    return fp8.linear(x, layer.weight.to(x.dtype), layer.bias)


class Transform(NamedTuple):
    """apply: changes the modules; may raise UserError. describe: a line for the start of a run, afterwards."""

    apply: Callable[[TrainModule], None]
    describe: Callable[[TrainModule], str]


TRANSFORMS = {"fp8": Transform(use_fp8, describe_fp8)}
