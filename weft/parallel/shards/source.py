"""A directory of safetensors files as named tensors, of which any box can be read."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from weft.errors import UserError
from weft.files import is_own_file, read_object, regular_file
from weft.models import hf
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.safetensors_files import TensorEntry, TensorFile

SINGLE_FILE, INDEX, _INDEX_ENDING = "model.safetensors", "model.safetensors.index.json", ".safetensors.index.json"
ADAPTER = "adapter_config.json"
# Weight files of older formats; reading them would mean unpickling them. The first are what transformers looks for.
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLED = ("*.bin", "*.pt", "*.pth")
_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken")


class TensorReader(Protocol):
    """A file of tensors, or anything read like one. entries: dtype, shape and first byte of each tensor."""

    path: Path
    entries: dict[str, TensorEntry]

    @property
    def bytes_read(self) -> int: ...

    def read(self, name: str, box: Box | None = None) -> Tensor: ...

    def close(self) -> None: ...


@dataclass
class TensorSource:
    """Named tensors on disk. files: tensor name -> its file. decoders: name of a quantised tensor -> its decoder.
    hidden: stored tensors that only decoders read. key: the config key that names the source, for messages."""

    folder: Path
    files: Mapping[str, TensorReader]
    decoders: dict[str, Decoder] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    key: str = "model.path"

    @property
    def names(self) -> list[str]:
        """Names of all tensors, quantised ones under their plain names; sorted."""
        return sorted({*self.files} - self.hidden | {*self.decoders})

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the tensors that are not quantised."""
        return {name: self.files[name].entries[name].dtype for name in self.names if name not in self.decoders}

    @property
    def bytes_read(self) -> int:
        """Bytes requested so far."""
        return sum(file.bytes_read for file in set(self.files.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, after decoding."""
        return self.decoders[name].shape if name in self.decoders else self.files[name].entries[name].shape

    def sort_key(self, name: str) -> tuple[str, int]:
        """(file, first byte), a sort key for sequential reading."""
        if name not in self.files:
            return (self.decoders[name].__class__.__name__, 0)
        return (self.files[name].path.name, self.files[name].entries[name].begin)

    def raw(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a stored tensor, not decoded."""
        return self.files[name].read(name, box)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, decoded, on the CPU."""
        box = box or Box.from_shape(self.shape(name))
        return self.decoders[name].read(self, box) if name in self.decoders else self.raw(name, box)

    def close(self, keep: Collection[str] = ()) -> None:
        """Close the files, except those with tensors of `keep`, which can still be read."""
        stored = {name: name.removesuffix(_SCALE).removesuffix(_BLOCKS).removesuffix(_SCALES) for name in self.files}
        kept = {file for name, file in self.files.items() if stored[name] in keep} if keep else set()
        for file in {*self.files.values()} - kept:
            file.close()


def open_model_weights(path: str) -> TensorSource:
    """The weights of model.path. Raises UserError if they are missing, incomplete or pickled."""
    folder = fetch_model(path)
    config_json = read_object(folder / "config.json", "the config of a model")
    names, index = _weight_files(folder, config_json)
    files: dict[str, TensorFile] = {}
    for name in names:
        file = TensorFile.open(folder / name)
        repeated = next((tensor for tensor in file.entries if tensor in files), None)
        if repeated is not None:
            raise UserError(
                f"model.path: {folder}: {repeated} is in both {files[repeated].path.name} and {name}: keep one."
            )
        files |= dict.fromkeys(file.entries, file)
    for name, file_name in ({} if index is None else _weight_map(index)).items():
        if name not in files or files[name].path.name != file_name:  # such as a shard of another checkpoint
            raise UserError(
                f"model.path: {index} says that {name} is in {file_name}, but it is not: the files do not belong "
                "together. Fetch them again."
            )
    config = config_json.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise UserError(f"model.path: {folder / 'config.json'}: quantization_config is no object. Fetch it again.")
    shapes = {name: file.entries[name].shape for name, file in files.items()}
    dtypes = {name: file.entries[name].dtype for name, file in files.items()}
    decoders, hidden = find_decoders(config, shapes, dtypes, path)
    return TensorSource(folder, files, decoders, hidden)


def fetch_model(path: str) -> Path:
    """The directory itself, or the snapshot of a hub repository, downloaded if the cache lacks it."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=list(_MODEL_FILES)))
    except Exception as error:  # of any type: no network, no such repository, no access
        cached = hf.source_folder(path)
        if cached is not None:
            return cached
        first = str(error).strip().split("\n")[0]
        raise UserError(
            f"model.path: {path!r} is no directory here and cannot be fetched from the hub: {first}"
        ) from error


def _weight_files(folder: Path, config: Mapping[str, Any]) -> tuple[list[str], Path | None]:
    """(weight files of a model's folder, the index that lists them, if one does), as transformers' from_pretrained
    chooses: the file that config.json names as transformers_weights, else model.safetensors, else the index's, else a
    pickle. Where there is none of them, other safetensors files are read, which transformers would not find.

    Raises UserError for a pickle, for an adapter beside the weights, and if there are no weights.
    """
    if os.path.lexists(folder / ADAPTER):
        raise UserError(
            f"model.path: {folder} holds {ADAPTER} beside config.json: transformers loads that adapter on top of the "
            "model, and weft the model alone. Move the adapter's files to a folder of their own; then name it as "
            "lora.path to train it, or weft merge it, to train both as one model."
        )
    index = folder / INDEX
    if os.path.lexists(index):  # also one that leads nowhere: it is an error, not a missing one
        regular_file(index, "the index of a model's files")
    file_name = config.get("transformers_weights")
    if file_name is not None:
        ending = next((e for e in (_INDEX_ENDING, ".safetensors") if str(file_name).endswith(e)), None)
        if ending is None or not isinstance(file_name, str) or not is_own_file(file_name):
            raise UserError(
                f"model.path: {folder / 'config.json'}: transformers_weights is {file_name!r:.80}, not a *.safetensors "
                "file of its own folder, or an index of such. Correct it, or remove it."
            )
        if ending == ".safetensors":
            return [file_name], None
        index = folder / file_name
    elif os.path.lexists(folder / SINGLE_FILE):
        return [SINGLE_FILE], None
    if os.path.lexists(index) or file_name is not None:
        return sorted(set(_weight_map(index).values())), index
    files = sorted(file.name for file in folder.glob("model*.safetensors"))
    files = files or sorted(file.name for file in folder.glob("*.safetensors"))
    preferred = next((name for name in _PICKLES if (folder / name).is_file()), None)
    if files and preferred is not None:
        raise UserError(
            f"model.path: {folder} holds {files[0]} and {preferred}: transformers reads {preferred}, a pickle, which "
            "weft does not open. If the other is meant, move that away; else convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
        )
    if files:
        return files, None
    pickled = next((file for pattern in _PICKLED for file in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise UserError(
            f"model.path: {folder} has its weights in {pickled.name}, a pickle, which weft does not open. Convert it "
            "once with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
        )
    raise UserError(
        f"model.path: {folder} holds no *.safetensors. Set model.init=random to train from fresh weights, or point "
        "model.path at a directory with weights."
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, checked to be in the index's folder."""
    weight_map = read_object(index, "the index of a model's files").get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise UserError(
            f"model.path: {index}: its weight_map does not say which tensor is in which file. Fetch it again."
        )
    for file in set(weight_map.values()):
        if not is_own_file(file):
            raise UserError(f"model.path: {index} names {file!r}, which is no file of its own folder. Fetch it again.")
    return weight_map


# ---------------------------------------------------------------- quantised checkpoints

# Tensors are dequantised box by box while they are read: block-wise FP8 (DeepSeek) and MXFP4 (gpt_oss).
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


Decoder = Fp8Blocks | Mxfp4Experts


def find_decoders(
    config: Mapping[str, Any] | None,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    path: str,
) -> tuple[dict[str, Decoder], frozenset[str]]:
    """(name -> decoder, names in the files that are part of another tensor). config: quantization_config; None if the
    model is not quantised. Raises UserError for other methods."""
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
    raise UserError(
        f"model.path: {path!r} is quantised ({method}{'' if block else ' without blocks' if method == 'fp8' else ''}), "
        "which weft cannot read. Use a checkpoint in bf16 or fp32, MXFP4, or FP8 in blocks."
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
