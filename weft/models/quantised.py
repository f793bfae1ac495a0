"""Frozen weights that are stored in 4 or 8 bits (lora.base), and layers that compute with them.

A layer has byte parameters instead of a weight: the weight's codes and, if its format shards them, its scales
(ops/low_bit.py). FSDP2 shards and gathers them like other parameters. Forward and backward each dequantise the weight,
so autograd stores bytes, not the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models import hf
from weft.ops import low_bit
from weft.ops.low_bit import Format

CODES, SCALES = "_codes", "_scales"  # ends of the parameters' names
SHARED = "_shared_{}"  # ends of the names, in a sync, of the replicated parts of the scales


@dataclass(frozen=True)
class WeightPiece:
    """A box of a weight with which a rank computes. start: in the full weight. local: in the rank's part."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def within(self) -> tuple[slice, ...]:
        """The slices of the piece in the rank's part."""
        return tuple(slice(start, start + size) for start, size in zip(self.local, self.size, strict=True))


def slices_of_codes(form: Format, slices: tuple[slice, ...]) -> tuple[slice, ...]:
    """Slices of elements as slices of their codes."""
    return (*slices[:-1], _divided(slices[-1], form.per_byte))


def slices_of_scales(form: Format, slices: tuple[slice, ...]) -> tuple[slice, ...]:
    """Slices of elements as slices of the scales of all blocks that they overlap."""
    rows, columns = form.block
    last = _divided(slices[-1], columns) if columns else slice(0, 1)
    return (*slices[:-2], _divided(slices[-2], rows), last)


def _divided(part: slice, size: int) -> slice:
    return slice(part.start // size, -(-part.stop // size))


class QuantisedWeight:
    """Replaces a layer's weight. whole_shape: of the full weight. shape: of the part with which this rank computes,
    which FSDP2 shards. pieces: of the part. shared: the replicated parts of the scales; set when the weight is read."""

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        form: Format,
        whole_shape: tuple[int, ...],
        pieces: Sequence[WeightPiece],
        like: Tensor,
    ) -> None:
        self.owner, self.name, self.form, self.whole_shape, self.pieces = owner, name, form, whole_shape, pieces
        self.shape, self.ndim, self.dtype = like.shape, like.ndim, like.dtype
        self.shared: tuple[Tensor, ...] | None = None
        self.requires_grad = False

    def __len__(self) -> int:
        return int(self.shape[0])

    @property
    def codes(self) -> Tensor:
        """[..., n / per_byte] bytes: this rank's shard, or, while the layer computes, the gathered part."""
        codes: Tensor = getattr(self.owner, self.name + CODES)
        return codes

    @property
    def scales(self) -> Tensor | None:
        """[grid of blocks] bytes, as `codes`; None if they are not sharded."""
        scales: Tensor | None = getattr(self.owner, self.name + SCALES, None)
        return scales

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The gathered part."""
        boxes = [self.box(self.codes, self.scales, piece.within, piece.start, dtype) for piece in self.pieces]
        if len(boxes) == 1:
            return boxes[0]
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for piece, values in zip(self.pieces, boxes, strict=True):
            out[piece.within] = values
        return out

    def box(
        self, codes: Tensor, scales: Tensor | None, slices: tuple[slice, ...], start: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """The elements of `slices` of a part, or of a shard of it. codes, scales: of the part. start: of the slices in
        the whole weight."""
        assert self.shared is not None, f"{self.name} was not filled"
        of_box = None if scales is None else scales[slices_of_scales(self.form, slices)]
        bytes_of_box = codes[slices_of_codes(self.form, slices)]
        return low_bit.dequantise(self.form, bytes_of_box, of_box, self.shared, start, self.whole_shape, dtype)


def parts_on_meta(form: Format, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """End of the name -> tensor on meta, for each stored tensor of a full weight of this shape."""
    *lead, width = shape
    sizes = {CODES: (*lead, width // form.per_byte)} | ({SCALES: form.grid(shape)} if form.sharded else {})
    parts = {end: torch.empty(size, dtype=torch.uint8, device="meta") for end, size in sizes.items()}
    return parts | {SHARED.format(i): torch.empty(size, device="meta") for i, size in enumerate(form.shared(shape))}


def parts_of(weight: QuantisedWeight) -> dict[str, Tensor]:
    """This rank's tensors of parts_on_meta."""
    stored = {CODES: weight.codes} | ({} if weight.scales is None else {SCALES: weight.scales})
    return stored | {SHARED.format(i): part for i, part in enumerate(weight.shared or ())}


def replace_weight(
    owner: nn.Module, name: str, form: Format, whole_shape: tuple[int, ...], pieces: Sequence[WeightPiece]
) -> QuantisedWeight:
    """Replace a weight on meta by uninitialised byte parameters."""
    weight = owner._parameters.pop(name)
    assert weight is not None
    stored = QuantisedWeight(owner, name, form, whole_shape, pieces, weight)
    parts = parts_on_meta(form, tuple(weight.shape))
    for end in (CODES, SCALES):
        if end in parts:
            values = torch.empty_like(parts[end], device=weight.device)
            owner.register_parameter(name + end, nn.Parameter(values, requires_grad=False))
    owner.__dict__[name] = stored
    if hf.is_plain_linear(owner):
        owner.forward = MethodType(_linear, owner)
    return stored


def is_bytes(quantised: Collection[str], name: str) -> bool:
    """Whether a parameter of this name contains bytes of a quantised weight."""
    weight, _, end = name.rpartition("_")
    return f"_{end}" in (CODES, SCALES) and weight in quantised


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
