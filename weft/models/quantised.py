"""Frozen weights that are stored in 4 bits (lora.base: nf4), and layers that compute with them.

A layer keeps, instead of a weight, two parameters of bytes: the weight's codes and the codes of its scales
(ops/nf4.py). FSDP2 shards and gathers them like other parameters. Forward and backward each dequantise the weight, so
that autograd stores bytes, not the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models import hf
from weft.models.train_module import TrainModule
from weft.ops import nf4
from weft.ops.nf4 import BLOCK, ScaleGroups

CODES, SCALES = "_codes", "_scales"  # ends of the parameters' names


@dataclass(frozen=True)
class WeightPiece:
    """A box of a whole weight that a rank computes with. start: in the whole weight. local: in the rank's part."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    def scales_within(self) -> tuple[slice, ...]:
        """The slices of the piece's scales in those of the rank's part."""
        last = self.local[-1] // BLOCK
        slices = [slice(start, start + size) for start, size in zip(self.local, self.size, strict=True)]
        return (*slices[:-1], slice(last, last + self.size[-1] // BLOCK))

    def scale_index(self, whole_shape: Sequence[int], device: torch.device) -> Tensor:
        """Index of each scale of the piece among all scales of the whole weight."""
        shape = (*whole_shape[:-1], whole_shape[-1] // BLOCK)
        start = (*self.start[:-1], self.start[-1] // BLOCK)
        size = (*self.size[:-1], self.size[-1] // BLOCK)
        index = torch.zeros(size, dtype=torch.int32, device=device)
        for dim in range(len(shape)):
            stride, rest = math.prod(shape[dim + 1 :]), [1] * (len(shape) - dim - 1)
            indices = torch.arange(start[dim], start[dim] + size[dim], dtype=torch.int32, device=device)
            index += (indices * stride).view(-1, *rest)
        return index


class QuantisedWeight:
    """Stands in a layer for its weight. whole_shape: of the whole weight. shape: of the part that this rank computes
    with, which FSDP2 shards. pieces: of the part. groups: what the scales are relative to; set when the weight is
    read."""

    def __init__(
        self, owner: nn.Module, name: str, whole_shape: tuple[int, ...], pieces: Sequence[WeightPiece], like: Tensor
    ) -> None:
        self.owner, self.name, self.whole_shape, self.pieces = owner, name, whole_shape, pieces
        self.shape, self.ndim, self.dtype = like.shape, like.ndim, like.dtype
        self.groups: ScaleGroups | None = None
        self.requires_grad = False

    def __len__(self) -> int:
        return int(self.shape[0])

    @property
    def codes(self) -> Tensor:
        """[..., n / 2] bytes: this rank's shard, or the gathered part while the layer computes."""
        codes: Tensor = getattr(self.owner, self.name + CODES)
        return codes

    @property
    def scales(self) -> Tensor:
        """[..., n / 64] bytes, as `codes`."""
        scales: Tensor = getattr(self.owner, self.name + SCALES)
        return scales

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The gathered part."""
        codes, scales = self.codes, self.scales
        index = torch.empty(scales.shape, dtype=torch.int32, device=scales.device)
        for piece in self.pieces:
            index[piece.scales_within()] = piece.scale_index(self.whole_shape, scales.device)
        assert self.groups is not None, f"{self.name} was not filled"
        return nf4.dequantise(codes, nf4.dequantise_scales(scales, self.groups, index), dtype)


def replace_weight(
    owner: nn.Module, name: str, whole_shape: tuple[int, ...], pieces: Sequence[WeightPiece]
) -> QuantisedWeight:
    """Replace a weight, on meta, by parameters of bytes, uninitialised."""
    weight = owner._parameters.pop(name)
    assert weight is not None
    stored = QuantisedWeight(owner, name, whole_shape, pieces, weight)
    *rows, width = weight.shape
    for end, size in ((CODES, width // 2), (SCALES, width // BLOCK)):
        values = torch.empty(*rows, size, dtype=torch.uint8, device=weight.device)
        owner.register_parameter(name + end, nn.Parameter(values, requires_grad=False))
    owner.__dict__[name] = stored
    if hf.is_plain_linear(owner):
        owner.forward = MethodType(_linear, owner)
    return stored


def is_bytes(module: TrainModule, name: str) -> bool:
    """Whether a parameter of this name holds bytes of a quantised weight."""
    weight, _, end = name.rpartition("_")
    return f"_{end}" in (CODES, SCALES) and weight in module.quantised_shapes


def _linear(layer: Any, x: Tensor) -> Tensor:
    out: Tensor = _QuantisedLinear.apply(x, layer.bias, layer.weight)
    return out


class _QuantisedLinear(torch.autograd.Function):
    """W x + b. W and b are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: QuantisedWeight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantised(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.weight.dequantised(grad.dtype), None, None


class GroupedLinear(torch.autograd.Function):
    """hf.grouped_linear with a frozen quantised weight."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: QuantisedWeight, ends: Tensor, bias: Tensor | None, transposed: bool
    ) -> Tensor:
        ctx.weight, ctx.transposed = weight, transposed
        ctx.save_for_backward(ends)
        return hf.grouped_linear(rows, weight.dequantised(rows.dtype), ends, bias, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (ends,) = ctx.saved_tensors
        weight = ctx.weight.dequantised(grad.dtype)
        return hf.grouped_linear(grad, weight, ends, None, not ctx.transposed), None, None, None, None
