"""Quantised checkpoints, dequantised box by box while reading: block-wise FP8 (DeepSeek) and MXFP4 (gpt_oss)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.errors import UserError
from weft.parallel.shards.boxes import Box

if TYPE_CHECKING:
    from weft.parallel.shards.source import Decoder, TensorSource

_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_MX_BLOCK = 32  # elements that share a scale (OCP Microscaling Formats 1.0, section 5.2)
# Values of FP4 E2M1 by its four bits: sign, two of exponent, one of mantissa (same document, section 5.3.3).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Fp8Blocks:
    """`name` [..., N, K] in FP8, times one factor per block of `block` elements, in `name`_scale_inv."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]

    def read(self, source: TensorSource, box: Box) -> Tensor:
        values = source.raw(self.name, box).float()
        first = [start // size for start, size in zip(box.start[-2:], self.block, strict=True)]
        last = [-(-end // size) for end, size in zip(box.end[-2:], self.block, strict=True)]
        lead = box.start[:-2], box.size[:-2]
        scales = source.raw(
            self.name + _SCALE, Box((*lead[0], *first), (*lead[1], *(b - a for a, b in zip(first, last, strict=True))))
        ).float()
        for dim, (start, size) in enumerate(zip(box.start[-2:], self.block, strict=True), start=values.ndim - 2):
            places = torch.arange(start, start + values.shape[dim]) // size - start // size
            scales = scales.index_select(dim, places)
        return values * scales


@dataclass(frozen=True)
class Mxfp4Experts:
    """Experts [E, K, N], stored transposed: `name`_blocks [E, N, K/32, 16], two FP4 per byte; _scales [E, N, K/32]."""

    name: str
    shape: tuple[int, ...]

    def read(self, source: TensorSource, box: Box) -> Tensor:
        (experts, inputs, outputs), (n_experts, n_inputs, n_outputs) = box.start, box.size
        first, last = inputs // _MX_BLOCK, -(-(inputs + n_inputs) // _MX_BLOCK)
        part = Box((experts, outputs, first), (n_experts, n_outputs, last - first))
        packed = source.raw(self.name + _BLOCKS, Box((*part.start, 0), (*part.size, _MX_BLOCK // 2)))
        exponents = source.raw(self.name + _SCALES, part).int() - 127
        table = torch.tensor(_FP4)
        values = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], dim=-1).flatten(-2)
        values = torch.ldexp(values, exponents[..., None]).flatten(-2).transpose(1, 2)
        skipped = inputs - first * _MX_BLOCK
        return values[:, skipped : skipped + n_inputs]


def decoder_of(
    config: Mapping[str, Any] | None,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    path: str,
) -> tuple[dict[str, Decoder], frozenset[str]]:
    """(name -> decoder, names in the files that are part of another tensor). config: quantization_config; None if the
    model is not quantised. Raises UserError for other methods."""
    method = None if config is None else str(config.get("quant_method"))
    if config is None:
        return {}, frozenset()
    if method == "mxfp4":
        return _mxfp4(shapes, dtypes, path)
    block = config.get("weight_block_size")
    if method == "fp8" and block is not None:
        return _fp8(shapes, dtypes, _block_of(block, path), path)
    raise UserError(
        f"model.path: {path!r} is quantised ({method}{'' if block else ' without blocks' if method == 'fp8' else ''}), "
        "which weft cannot read. Use a checkpoint in bf16 or fp32, MXFP4, or FP8 in blocks."
    )


def _block_of(block: Any, path: str) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise UserError(f"model.path: {path!r}: config.json: weight_block_size is {block!r}, not [rows, columns].")
    return block[0], block[1]


def _mxfp4(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], path: str
) -> tuple[dict[str, Decoder], frozenset[str]]:
    found: dict[str, Decoder] = {}
    for blocks in (name for name in shapes if name.endswith(_BLOCKS)):
        name = blocks.removesuffix(_BLOCKS)
        shape, scales = shapes[blocks], name + _SCALES
        stored = {dtypes[blocks], dtypes.get(scales)}
        if len(shape) != 4 or shape[3] != _MX_BLOCK // 2 or shapes.get(scales) != shape[:3] or stored != {torch.uint8}:
            raise UserError(f"model.path: {path!r}: {blocks} and {scales} are not the two halves of an MXFP4 tensor.")
        experts, outputs, groups, _ = shape
        found[name] = Mxfp4Experts(name, (experts, groups * _MX_BLOCK, outputs))
    return found, frozenset(name + end for name in found for end in (_BLOCKS, _SCALES))


def _fp8(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], block: tuple[int, int], path: str
) -> tuple[dict[str, Decoder], frozenset[str]]:
    found: dict[str, Decoder] = {}
    for name, dtype in dtypes.items():
        if dtype.itemsize == 1 and dtype.is_floating_point:
            shape, scale = shapes[name], name + _SCALE
            if scale not in shapes:
                raise UserError(f"model.path: {path!r}: {name} is in FP8, but its factors {scale} are missing.")
            wanted = (*shape[:-2], *(-(-n // size) for n, size in zip(shape[-2:], block, strict=False)))
            if len(shape) < 2 or shapes[scale] != wanted:
                raise UserError(
                    f"model.path: {path!r}: {scale} is {list(shapes[scale])} and should be {list(wanted)}: one factor "
                    f"for each block of {name}."
                )
            found[name] = Fp8Blocks(name, shape, block)
    return found, frozenset(name + _SCALE for name in found)
