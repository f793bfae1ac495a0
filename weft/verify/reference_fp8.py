"""The reference for linear layers that multiply e4m3 numbers, in plain steps. Imports nothing of weft.

    y = r(x) r(W)^T        dL/dx = r(g) r(W^T)^T        dL/dW = g^T x        r: each row to e4m3, with its own scale

A scale is the smallest power of two with which a row's largest element is at most 448 (docs/how-to/fp8.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NEVER = {"gate", "router", "shared_expert_gate", "lora_A", "lora_B"}  # in the names of routers and adapters


def is_rounded(name: str, layer: nn.Module) -> bool:
    """Whether a module below a decoder layer is a linear layer in fp8. name: below the decoder layer."""
    linear = type(layer).forward is nn.Linear.forward or type(layer).__name__ == "FalconLinear"
    return linear and layer.weight.shape[0] % 16 == layer.weight.shape[1] % 16 == 0 and not _NEVER & {*name.split(".")}


def round_layers(layers: nn.ModuleList) -> None:
    """Make the linear layers of these decoder layers round."""
    for decoder_layer in layers:
        for name, child in decoder_layer.named_modules():
            if is_rounded(name, child):
                child.forward = partial(_forward, child)


def _forward(layer: Any, x: Tensor) -> Tensor:
    out: Tensor = _Product.apply(x, layer.weight)
    return out if layer.bias is None else out + layer.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient_of_input(gradients[0], weight), gradients[0].flatten(0, -2).T @ x.flatten(0, -2)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T. x: [..., inputs], weight: [outputs, inputs]."""
    return F.linear(rows_in_e4m3(x), rows_in_e4m3(weight)).to(x.dtype)


def gradient_of_input(gradient: Tensor, weight: Tensor) -> Tensor:
    """g W. gradient: [..., outputs]."""
    return F.linear(rows_in_e4m3(gradient), rows_in_e4m3(weight.T)).to(gradient.dtype)


def rows_in_e4m3(matrix: Tensor) -> Tensor:
    """The rows after rounding to e4m3, in fp32."""
    largest = matrix.abs().amax(-1, keepdim=True).double()
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448))).where(largest > 0, 1.0).float()
    return (matrix.float() / scale).to(torch.float8_e4m3fn).float() * scale
