"""Reads weights that are quantised on disk: boxes of dequantised values, or of the stored bytes.

Formats: FP8 in blocks (DeepSeek), MXFP4 (gpt_oss), bitsandbytes' 4 and 8 bits. A decoder's `form` is the format of
ops/low_bit.py with the same bytes, so that `lora.base` can load them unchanged; None if there is none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.errors import UserError
from weft.ops import low_bit, nf4
from weft.ops.low_bit import E2M1, Format
from weft.parallel.shards.boxes import Box


class StoredTensors(Protocol):
    """Tensors as they are stored in files. raw: a box of a tensor, by default all of it."""

    def raw(self, name: str, box: Box | None = None) -> Tensor: ...


_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
# bitsandbytes: suffixes of the names of the tensors that belong to a weight.
_ABSMAX, _MAP, _NESTED_ABSMAX, _NESTED_MAP = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
_STATE, _SCB = ".quant_state.bitsandbytes__", "SCB"
_MX_BLOCK = 32  # elements that share a scale (OCP Microscaling Formats 1.0, section 5.2)


def weight_of(name: str) -> str:
    """The name of the quantised weight that a stored tensor belongs to; for other tensors, their name."""
    weight = name.partition(_STATE)[0]
    for end in (_SCALE, _BLOCKS, _SCALES, _ABSMAX, _MAP, _NESTED_ABSMAX, _NESTED_MAP):
        weight = weight.removesuffix(end)
    return weight.removesuffix(_SCB) + "weight" if weight.endswith(f".{_SCB}") else weight


@dataclass(frozen=True)
class Fp8Blocks:
    """A weight [..., N, K]: FP8 codes in `name`, and a factor for each block of `block` elements in
    `name`_scale_inv."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]

    @property
    def form(self) -> Format:
        return replace(low_bit.FP8, block=self.block)

    def codes(self, source: StoredTensors, box: Box) -> Tensor:
        """uint8 codes of a box, in the file's order of dimensions."""
        return source.raw(self.name, box).view(torch.uint8)

    def scales(self, source: StoredTensors, box: Box) -> Tensor:
        """Scales of all blocks that a box overlaps."""
        block = (*(1 for _ in box.start[:-2]), *self.block)
        first = tuple(start // size for start, size in zip(box.start, block, strict=True))
        last = tuple(-(-end // size) for end, size in zip(box.end, block, strict=True))
        return source.raw(
            self.name + _SCALE, Box(first, tuple(b - a for a, b in zip(first, last, strict=True)))
        ).float()

    def read(self, source: StoredTensors, box: Box) -> Tensor:
        values = source.raw(self.name, box).float()
        scales = self.scales(source, box)
        for dim, (start, size) in enumerate(zip(box.start[-2:], self.block, strict=True), start=values.ndim - 2):
            block_index = torch.arange(start, start + values.shape[dim]) // size - start // size
            scales = scales.index_select(dim, block_index)
        return values * scales


@dataclass(frozen=True)
class Mxfp4Experts:
    """Experts [E, K, N], stored transposed: `name`_blocks [E, N, K/32, 16] with two FP4 codes per byte, and
    `name`_scales [E, N, K/32] with exponents."""

    name: str
    shape: tuple[int, ...]
    form = low_bit.MXFP4

    def codes(self, source: StoredTensors, box: Box) -> Tensor:
        """The codes of a box, [experts, inputs, outputs / 2]. A byte has two outputs; in the file it has two inputs."""
        packed, _ = self._raw(source, box)
        by_output = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(2).transpose(1, 2)
        return by_output[..., ::2] | (by_output[..., 1::2] << 4)

    def scales(self, source: StoredTensors, box: Box) -> Tensor:
        """The exponents of a box, [experts, inputs / 32, outputs]."""
        return self._raw(source, box)[1].transpose(1, 2)

    def _raw(self, source: StoredTensors, box: Box) -> tuple[Tensor, Tensor]:
        """([experts, outputs, blocks, 16] bytes, [experts, outputs, blocks] exponents) of the blocks of a box."""
        (experts, inputs, outputs), (n_experts, n_inputs, n_outputs) = box.start, box.size
        first, last = inputs // _MX_BLOCK, -(-(inputs + n_inputs) // _MX_BLOCK)
        scales = Box((experts, outputs, first), (n_experts, n_outputs, last - first))
        blocks = Box((*scales.start, 0), (*scales.size, _MX_BLOCK // 2))
        return source.raw(self.name + _BLOCKS, blocks), source.raw(self.name + _SCALES, scales)

    def read(self, source: StoredTensors, box: Box) -> Tensor:
        packed, exponents = self._raw(source, box)
        table = torch.tensor(E2M1)
        values = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], dim=-1).flatten(-2)
        values = torch.ldexp(values, exponents.int()[..., None] - 127).flatten(-2).transpose(1, 2)
        skipped = box.start[1] % _MX_BLOCK
        return values[:, skipped : skipped + box.size[1]]


@dataclass(frozen=True)
class BnbInt8:
    """A weight [N, K] of LLM.int8() (bitsandbytes): int8 codes in `name`, and the largest magnitude of each row in SCB.
    An element is code x magnitude / 127."""

    name: str
    shape: tuple[int, ...]
    form = low_bit.INT8

    def codes(self, source: StoredTensors, box: Box) -> Tensor:
        return source.raw(self.name, box).view(torch.uint8)

    def scales(self, source: StoredTensors, box: Box) -> Tensor:
        return source.raw(self.name.removesuffix("weight") + _SCB, Box(box.start[:1], box.size[:1])).float()[:, None]

    def read(self, source: StoredTensors, box: Box) -> Tensor:
        start = (0, *box.start[1:])
        shared = (self.scales(source, box),)
        return low_bit.dequantise(self.form, self.codes(source, box), None, shared, start, self.shape, torch.float32)


@dataclass(frozen=True)
class Bnb4Bits:
    """A weight [N, K] in bitsandbytes' 4 bits.

    `name` has the codes of the flattened weight, two per byte, the first in the upper four bits. .quant_map has the
    levels. .absmax has a scale for each block of `block` elements. Without `group` the scales are fp32. With `group` a
    scale is .nested_quant_map[.absmax] x .nested_absmax of its group of `group` scales + offset. dtype: to which level
    x scale is rounded."""

    name: str
    shape: tuple[int, ...]
    block: int
    group: int | None
    offset: float
    dtype: torch.dtype
    form: Format | None

    def codes(self, source: StoredTensors, box: Box) -> Tensor:
        (row, column), (rows, columns) = box.start, box.size
        width = self.shape[1]
        flat = source.raw(self.name, Box((row * width // 2, 0), (rows * width // 2, 1)))
        return flat.view(rows, width // 2)[:, column // 2 : (column + columns) // 2]

    def scales(self, source: StoredTensors, box: Box) -> Tensor:
        """The stored scales of a box. The box must consist of complete blocks."""
        (row, column), (rows, columns) = box.start, box.size
        blocks = self.shape[1] // self.block
        flat = source.raw(self.name + _ABSMAX, Box((row * blocks,), (rows * blocks,)))
        return flat.view(rows, blocks)[:, column // self.block : (column + columns) // self.block]

    def groups(self, source: StoredTensors) -> nf4.ScaleGroups:
        """The numbers to decode the scales, for scales that are quantised (`group`)."""
        return nf4.ScaleGroups(source.raw(self.name + _NESTED_ABSMAX).float(), torch.tensor(self.offset))

    def read(self, source: StoredTensors, box: Box) -> Tensor:
        (row, column), (rows, columns) = box.start, box.size
        first, last = row * self.shape[1], (row + rows) * self.shape[1]
        packed = source.raw(self.name, Box((first // 2, 0), (-(-last // 2) - first // 2, 1))).flatten().int()
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[first % 2 :][: last - first]
        blocks = Box((first // self.block,), (-(-last // self.block) - first // self.block,))
        scales = source.raw(self.name + _ABSMAX, blocks)
        if self.group is not None:
            largest, offset = self.groups(source)
            index = torch.arange(blocks.start[0], blocks.end[0]) // self.group
            scales = source.raw(self.name + _NESTED_MAP)[scales.int()] * largest[index] + offset
        index = torch.arange(first, last) // self.block - first // self.block
        values = source.raw(self.name + _MAP)[codes] * scales[index]
        return values.view(rows, -1)[:, column : column + columns].to(self.dtype).float()


Decoder = Fp8Blocks | Mxfp4Experts | BnbInt8 | Bnb4Bits


def find_decoders(
    config: Mapping[str, Any] | None,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    path: str,
    source: StoredTensors | None = None,
) -> tuple[dict[str, Decoder], frozenset[str]]:
    """(name of a quantised weight -> decoder, names in the files that belong to quantised weights).

    config: quantization_config; None if the model is not quantised. source: the files, from which bitsandbytes'
    descriptions of tensors are read. Raises UserError for unsupported methods and malformed tensors.
    """
    if config is None:
        return {}, frozenset()
    method = str(config.get("quant_method"))
    if method == "mxfp4":
        return _mxfp4(shapes, dtypes, path)
    block = config.get("weight_block_size")
    if method == "fp8" and block is not None:
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise UserError(f"model.path: {path!r}: config.json: weight_block_size is {block!r}, not [rows, columns].")
        return _fp8(shapes, dtypes, (block[0], block[1]), path)
    if method == "bitsandbytes" and source is not None:
        return _bitsandbytes(shapes, dtypes, path, source)
    raise UserError(
        f"model.path: {path!r} is quantised ({method}{'' if block else ' without blocks' if method == 'fp8' else ''}), "
        "which weft cannot read. Use a checkpoint in bf16 or fp32, MXFP4, FP8 in blocks, or bitsandbytes' 4 or 8 bits."
    )


def _mxfp4(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], path: str
) -> tuple[dict[str, Decoder], frozenset[str]]:
    decoders: dict[str, Decoder] = {}
    for blocks in (name for name in shapes if name.endswith(_BLOCKS)):
        name = blocks.removesuffix(_BLOCKS)
        shape, scales = shapes[blocks], name + _SCALES
        stored = {dtypes[blocks], dtypes.get(scales)}
        if len(shape) != 4 or shape[3] != _MX_BLOCK // 2 or shapes.get(scales) != shape[:3] or stored != {torch.uint8}:
            raise UserError(f"model.path: {path!r}: {blocks} and {scales} are not the two halves of an MXFP4 tensor.")
        experts, outputs, groups, _ = shape
        decoders[name] = Mxfp4Experts(name, (experts, groups * _MX_BLOCK, outputs))
    return decoders, frozenset(name + end for name in decoders for end in (_BLOCKS, _SCALES))


def _fp8(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], block: tuple[int, int], path: str
) -> tuple[dict[str, Decoder], frozenset[str]]:
    decoders: dict[str, Decoder] = {}
    for name, dtype in dtypes.items():
        if dtype.itemsize == 1 and dtype.is_floating_point:
            shape, scale = shapes[name], name + _SCALE
            if scale not in shapes:
                raise UserError(f"model.path: {path!r}: {name} is in FP8, but its factors {scale} are missing.")
            expected = (*shape[:-2], *(-(-n // size) for n, size in zip(shape[-2:], block, strict=False)))
            if len(shape) < 2 or shapes[scale] != expected:
                raise UserError(
                    f"model.path: {path!r}: {scale} is {list(shapes[scale])} and should be {list(expected)}: one "
                    f"factor for each block of {name}."
                )
            decoders[name] = Fp8Blocks(name, shape, block)
    return decoders, frozenset(name + _SCALE for name in decoders)


def _bitsandbytes(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], path: str, source: StoredTensors
) -> tuple[dict[str, Decoder], frozenset[str]]:
    decoders: dict[str, Decoder] = {}
    hidden: set[str] = set()
    for key in shapes:
        name, is_state, _ = key.partition(_STATE)
        if is_state:
            decoders[name] = _four_bits(name, key, shapes, dtypes, path, source)
            ends = (_ABSMAX, _MAP, _NESTED_ABSMAX, _NESTED_MAP)
            hidden |= {key, *(name + end for end in ends if name + end in shapes)}
        elif key.endswith(f".{_SCB}"):
            weight = key.removesuffix(_SCB) + "weight"
            if dtypes.get(weight) != torch.int8 or shapes[key] != shapes[weight][:1]:
                raise UserError(f"model.path: {path!r}: {key} is not the scale of each row of an int8 {weight}.")
            decoders[weight] = BnbInt8(weight, shapes[weight])
            hidden |= {key, *(n for n in (f"{weight}_format",) if n in shapes)}
    return decoders, frozenset(hidden)


def _four_bits(
    name: str,
    key: str,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    path: str,
    source: StoredTensors,
) -> Bnb4Bits:
    """The decoder of the weight `name`. key: name of a tensor whose bytes are a JSON object that describes the
    weight."""
    try:
        state = json.loads(bytes(source.raw(key).tolist()))
        shape = tuple(int(n) for n in state["shape"])
        block, group = int(state["blocksize"]), state.get("nested_blocksize")
        dtype = getattr(torch, str(state["dtype"]))
        offset = float(state.get("nested_offset", 0.0))
        blocks, elements = -(-math.prod(shape) // block), math.prod(shape)
        fits = len(shape) == 2 and shapes[name] == (-(-elements // 2), 1) and dtypes[name] == torch.uint8
        fits = fits and shapes[name + _ABSMAX] == (blocks,) and shapes[name + _MAP] == (16,)
        nested = torch.uint8 if group else torch.float32
        fits = fits and dtypes[name + _ABSMAX] == nested and isinstance(dtype, torch.dtype)
        if group:
            fits = fits and shapes[name + _NESTED_ABSMAX] == (-(-blocks // int(group)),)
            fits = fits and shapes[name + _NESTED_MAP] == (256,)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise UserError(f"model.path: {path!r}: {key} does not describe a weight in 4 bits: {error!r:.80}.") from error
    if not fits:
        raise UserError(f"model.path: {path!r}: {name} is not {list(shape)} in bitsandbytes' 4 bits, as {key} says.")
    has_nf4_levels = nf4.is_usual(source.raw(name + _MAP), source.raw(name + _NESTED_MAP)) if group else False
    is_nf4 = has_nf4_levels and block == nf4.BLOCK and group == nf4.GROUP and shape[1] % block == 0
    return Bnb4Bits(name, shape, block, int(group) if group else None, offset, dtype, low_bit.NF4 if is_nf4 else None)
