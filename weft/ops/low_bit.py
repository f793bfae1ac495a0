"""The low-bit formats of frozen weights: a code for each element, a scale for each block of elements.

    nf4    4 bits, blocks of 64 elements of a row, scales also quantised            ops/nf4.py
    int8   8 bits, one scale for each row                                           LLM.int8(), arXiv:2208.07339
    fp8    e4m3, one scale for each block of 128 x 128 elements                     DeepSeek-V3, arXiv:2412.19437
    mxfp4  e2m1, blocks of 32 elements with an exponent; read from files only       OCP Microscaling Formats 1.0

Blocks are counted from the first element of the full weight, so codes and scales do not depend on the mesh. Scales of
int8 and fp8 are few, so every rank has all of them, and a shard may split their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.launch.simulated import on_host
from weft.ops import nf4

E4M3_MAX = 448.0
_INT8_STEP = 1.0 / 127.0  # multiplied in fp32, so that results equal those of bitsandbytes
_SLAB = 1 << 24  # elements that are dequantised together
# The value of each FP4 E2M1 code. Bits: sign, two of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Format:
    """A storage format.

    per_byte: number of elements in a byte of codes; they are neighbours along the last dimension. block: (rows,
    columns) of the last two dimensions that share a scale; 0 columns means all columns. sharded: whether scales are
    bytes that are sharded like the codes. A mesh can then split weights only between blocks. Else every rank has all
    scales, in fp32."""

    name: str
    title: str
    per_byte: int
    block: tuple[int, int]
    sharded: bool = False

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of a weight. shape: of the weight."""
        *lead, rows, columns = shape
        return (*lead, -(-rows // self.block[0]), -(-columns // (self.block[1] or columns)))

    def shared(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of the fp32 tensors that every rank has for a weight, in the order of seal_scales(). shape: of the
        weight."""
        if self is NF4:
            return [(-(-math.prod(self.grid(shape)) // nf4.GROUP),), ()]
        return [] if self.sharded else [self.grid(shape)]

    def bytes(self, shape: Sequence[int]) -> float:
        """Bytes per element of a weight, scales included. shape: of the weight."""
        if self is NF4:
            return nf4.BYTES
        scales = math.prod(self.grid(shape)) * (1 if self.sharded else 4)
        return 1 / self.per_byte + scales / math.prod(shape)


NF4 = Format("nf4", "NF4", 2, (1, nf4.BLOCK), sharded=True)
INT8 = Format("int8", "int8", 1, (1, 0))
FP8 = Format("fp8", "FP8", 1, (128, 128))
MXFP4 = Format("mxfp4", "MXFP4", 2, (32, 1), sharded=True)
FORMATS = {form.name: form for form in (NF4, INT8, FP8, MXFP4)}


# ---------------------------------------------------------------- quantising


def largest_of(form: Format, values: Tensor, start: Sequence[int]) -> Tensor:
    """The largest magnitude in each block that a box of the weight overlaps, fp32. values: the box. start: index of its
    first element in the weight."""
    magnitudes, (rows, columns) = values.abs().float(), form.block
    if columns == 0:
        return magnitudes.amax(-1, keepdim=True)
    lead = start[-2] % rows, start[-1] % columns
    tail = -(lead[0] + values.shape[-2]) % rows, -(lead[1] + values.shape[-1]) % columns
    padded = F.pad(magnitudes, (lead[1], tail[1], lead[0], tail[0])) if any(lead + tail) else magnitudes
    return padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax((-1, -3))


def seal_scales(form: Format, largest: Tensor) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """(uint8 scales, or None if scales are not sharded; the fp32 tensors that every rank has). largest: largest
    magnitude of each block of the full weight. Not for mxfp4, which weft only reads."""
    if form is NF4:
        codes, groups = nf4.quantise_scales(largest)
        return codes, tuple(groups)
    assert not form.sharded
    # Divides by a tensor: for a Python number CUDA would multiply by its rounded inverse, and codes would depend on the
    # device.
    return None, (largest if form is INT8 else largest / largest.new_tensor(E4M3_MAX),)


def quantise(form: Format, values: Tensor, start: Sequence[int], shared: Sequence[Tensor]) -> Tensor:
    """uint8 codes of a box of the weight. values: the box. start: index of its first element. shared: second result of
    seal_scales."""
    if form is NF4:
        return nf4.quantise(values)[0]
    scales = spread_scales(form, shared[0], start, values.shape)
    if form is INT8:  # a row of zeros has no scale
        factors = torch.where(scales > 0, 127.0 / scales, 0.0)
        return torch.round(values.float() * factors).to(torch.int8).view(torch.uint8)
    ratio = torch.where(scales > 0, values.float() / scales, 0.0)
    return ratio.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def spread_scales(form: Format, scales: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The scale of each element of a box, broadcastable to its `shape`. scales: of all blocks of the full weight."""
    for dim in range(len(shape) - 2):
        scales = scales.narrow(dim, start[dim], shape[dim])
    for dim, block in zip((-2, -1), form.block, strict=True):
        if block:
            index = torch.arange(start[dim], start[dim] + shape[dim], device=scales.device) // block
            scales = scales.index_select(dim, index)
    return scales


# ---------------------------------------------------------------- dequantising


def dequantise(
    form: Format,
    codes: Tensor,
    scales: Tensor | None,
    shared: Sequence[Tensor],
    start: Sequence[int],
    whole_shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """A box of the weight, in `dtype`. codes, scales: of the box. shared: second result of seal_scales. start: index of
    the box's first element. whole_shape: of the full weight."""
    if form is NF4:
        assert scales is not None
        index = _block_index(form, start, scales.shape, whole_shape, codes.device)
        fp32_scales = nf4.dequantise_scales(scales, nf4.ScaleGroups(shared[0], shared[1]), index)
        return nf4.dequantise(codes, fp32_scales, dtype)
    out = torch.empty(*codes.shape[:-1], form.per_byte * codes.shape[-1], dtype=dtype, device=codes.device)
    if form is MXFP4:
        assert scales is not None
        pairs = _pairs(codes.device)
        for slab, slab_codes, exponents in zip(out, codes, scales, strict=True):  # expert by expert
            values = pairs[slab_codes.int()].flatten(-2).unflatten(-2, (-1, form.block[0]))
            slab.copy_(torch.ldexp(values, exponents.int()[:, None, :] - 127).flatten(-3, -2))
        return out
    rows = max(1, _SLAB * len(codes) // max(1, out.numel()))
    for number, (slab, slab_codes) in enumerate(zip(out.split(rows), codes.split(rows), strict=True)):
        slab_start = (start[0] + number * rows, *start[1:])
        spread = spread_scales(form, shared[0], slab_start, slab_codes.shape)
        if form is INT8:
            slab.copy_(slab_codes.view(torch.int8).float().mul_(spread).mul_(_INT8_STEP))
        else:
            slab.copy_(slab_codes.view(torch.float8_e4m3fn).float().mul_(spread))
    return out


def rounded(form: Format, weight: Tensor) -> Tensor:
    """The full weight after quantising and dequantising, in its dtype."""
    start = (0,) * weight.ndim
    scales, shared = seal_scales(form, largest_of(form, weight, start))
    codes = quantise(form, weight, start, shared)
    return dequantise(form, codes, scales, shared, start, tuple(weight.shape), weight.dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2] values of both FP4 numbers of each byte. The first number is in the lower four bits."""
    with on_host():
        values = torch.tensor(E2M1, device=device)
        return torch.cartesian_prod(values, values).flip(-1)


def _block_index(
    form: Format, start: Sequence[int], shape: Sequence[int], whole_shape: Sequence[int], device: torch.device
) -> Tensor:
    """Index of each scale of a box among all scales of the full weight. shape: of the box's scales."""
    grid, (rows, columns) = form.grid(whole_shape), form.block
    first = (*start[:-2], start[-2] // rows, start[-1] // columns)
    index = torch.zeros(tuple(shape), dtype=torch.int32, device=device)
    for dim in range(len(grid)):
        stride, later_dims = math.prod(grid[dim + 1 :]), [1] * (len(grid) - dim - 1)
        indices = torch.arange(first[dim], first[dim] + shape[dim], dtype=torch.int32, device=device)
        index += (indices * stride).view(-1, *later_dims)
    return index
