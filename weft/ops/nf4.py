"""4-bit NormalFloat (NF4) with double quantisation: QLoRA's storage of weights (Dettmers et al. 2023,
arXiv:2305.14314). The stored bytes equal those of bitsandbytes.

A weight [..., n] is split along its last dimension into blocks of 64 elements. An element is one of 16 levels x the
scale of its block, the block's largest magnitude. The mean over the full weight is subtracted from the scales. The
differences are stored as 8-bit floating-point numbers (Dettmers et al. 2022, arXiv:2110.02861) x the largest magnitude
of 256 consecutive differences. An element takes 4 + 8/64 + 32/16384 bits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from weft.launch.simulated import on_host

BLOCK = 64  # elements that share a scale
GROUP = 256  # scales that share a scale
_SLAB = 1 << 24  # elements that are dequantised together; this needs 10 bytes per element
BYTES = 0.5 + 1 / BLOCK + 4 / (BLOCK * GROUP)  # bytes per element
# Quantiles of a normal distribution, made symmetric about an exact 0 (appendix E of the paper).
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _scale_levels() -> list[float]:
    """The 256 values of a "dynamic" 8-bit number: sign, exponent and mantissa, where the exponent has a variable number
    of bits. Each decade from 1e-6 to 1 has twice as many values as the decade below it."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += [*middles.tolist(), *(-middles).tolist()]
    return sorted(values)


_SCALE_LEVELS = _scale_levels()  # computed at import, because tensors have no values inside a simulation


class ScaleGroups(NamedTuple):
    """The numbers needed to decode the scales of a full weight. largest: [groups] fp32, the largest magnitude of each
    256 centred scales. mean: of all scales."""

    largest: Tensor
    mean: Tensor


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """([16] levels, [256, 2] levels of both codes of each byte, [256] levels of scales). The first code of a byte is in
    the upper four bits."""
    with on_host():  # even in a simulation these need values, and must not count as tensors of the step
        levels = torch.tensor(_LEVELS, device=device)
        return levels, torch.cartesian_prod(levels, levels), torch.tensor(_SCALE_LEVELS, device=device)


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """uint8 index of the level nearest to each value."""
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2.0, out_int32=True).to(torch.uint8)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """([..., n / 2] uint8 codes, two per byte; [..., n / 64] fp32 scales). n must be a multiple of 64."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    codes = _nearest(blocks * (1.0 / scales.clamp(min=1e-38))[..., None], _tables(weight.device)[0]).flatten(-2)
    return (codes[..., ::2] << 4) | codes[..., 1::2], scales


def quantise_scales(scales: Tensor) -> tuple[Tensor, ScaleGroups]:
    """(uint8 codes of the scales, the numbers to decode them). scales: all scales of a weight."""
    mean = scales.double().mean().float()  # an fp32 mean would depend on the device and the number of threads
    centred = (scales - mean).flatten()
    groups = torch.nn.functional.pad(centred, (0, -len(centred) % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(-1)
    codes = _nearest(groups * (1.0 / largest.clamp(min=1e-38))[:, None], _tables(scales.device)[2])
    return codes.flatten()[: len(centred)].view(scales.shape), ScaleGroups(largest, mean)


def dequantise_scales(codes: Tensor, groups: ScaleGroups, index: Tensor) -> Tensor:
    """fp32 scales, in the shape of `codes`. index: index of each scale among all scales of the full weight."""
    levels = _tables(codes.device)[2]
    return levels[codes.int()] * groups.largest[index // GROUP] + groups.mean


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., n] weight from [..., n / 2] codes and [..., n / 64] fp32 scales."""
    pairs = _tables(codes.device)[1]
    out = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=dtype, device=codes.device)
    rows = max(1, _SLAB * len(codes) // max(1, out.numel()))
    for slab, slab_codes, scale in zip(out.split(rows), codes.split(rows), scales.split(rows), strict=True):
        values = pairs[slab_codes.int()].flatten(-2).unflatten(-1, (-1, BLOCK))
        slab.copy_(values.mul_(scale[..., None]).flatten(-2))
    return out


def is_usual(levels: Tensor, scale_levels: Tensor) -> bool:
    """Whether these equal the levels of this format. levels: [16]. scale_levels: [256]."""
    usual = _tables(levels.device)
    return torch.equal(levels.float(), usual[0]) and torch.equal(scale_levels.float(), usual[2])
