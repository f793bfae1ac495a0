"""A directory of safetensors files as named tensors, of which any box can be read."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
from weft.parallel.shards.quantised import decoder_of
from weft.parallel.shards.safetensors_files import TensorEntry, TensorFile

WHOLE, INDEX, _INDEX_ENDING = "model.safetensors", "model.safetensors.index.json", ".safetensors.index.json"
ADAPTER = "adapter_config.json"
# Weight files of older formats; reading them would mean unpickling them. The first are what transformers looks for.
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLED = ("*.bin", "*.pt", "*.pth")
_WANTED = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken")


class Decoder(Protocol):
    """Reads a quantised tensor as floating point."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, source: TensorSource, box: Box) -> Tensor: ...


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

    def place(self, name: str) -> tuple[str, int]:
        """(file, first byte), a sort key for sequential reading."""
        if name not in self.files:
            return (self.decoders[name].__class__.__name__, 0)
        return (self.files[name].path.name, self.files[name].entries[name].begin)

    def raw(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a stored tensor, not decoded."""
        return self.files[name].read(name, box)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, decoded, on the CPU."""
        box = box or Box.whole(self.shape(name))
        return self.decoders[name].read(self, box) if name in self.decoders else self.raw(name, box)

    def close(self) -> None:
        """Close the files."""
        for file in set(self.files.values()):
            file.close()


def open_model_weights(path: str) -> TensorSource:
    """The weights of model.path. Raises UserError if they are missing, incomplete or pickled."""
    folder = fetch_model(path)
    read = read_object(folder / "config.json", "the config of a model")
    names, index = _weight_files(folder, read)
    files: dict[str, TensorFile] = {}
    for name in names:
        file = TensorFile.open(folder / name)
        twice = next((tensor for tensor in file.entries if tensor in files), None)
        if twice is not None:
            raise UserError(f"model.path: {folder}: {twice} is in both {files[twice].path.name} and {name}: keep one.")
        files |= dict.fromkeys(file.entries, file)
    if index is not None:
        _check_index(index, files)
    config = read.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise UserError(f"model.path: {folder / 'config.json'}: quantization_config is no object. Fetch it again.")
    decoders, hidden = decoder_of(config, _shapes(files), _dtypes(files), path)
    return TensorSource(folder, files, decoders, hidden)


def fetch_model(path: str) -> Path:
    """The directory itself, or the snapshot of a hub repository, downloaded if the cache lacks it."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=list(_WANTED)))
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
    named = config.get("transformers_weights")
    if named is not None:
        ending = next((e for e in (_INDEX_ENDING, ".safetensors") if str(named).endswith(e)), None)
        if ending is None or not isinstance(named, str) or not is_own_file(named):
            raise UserError(
                f"model.path: {folder / 'config.json'}: transformers_weights is {named!r:.80}, not a *.safetensors "
                "file of its own folder, or an index of such. Correct it, or remove it."
            )
        if ending == ".safetensors":
            return [named], None
        index = folder / named
    elif os.path.lexists(folder / WHOLE):
        return [WHOLE], None
    if os.path.lexists(index) or named is not None:
        return sorted(set(_weight_map(index).values())), index
    found = sorted(file.name for file in folder.glob("model*.safetensors"))
    found = found or sorted(file.name for file in folder.glob("*.safetensors"))
    preferred = next((name for name in _PICKLES if (folder / name).is_file()), None)
    if found and preferred is not None:
        raise UserError(
            f"model.path: {folder} holds {found[0]} and {preferred}: transformers reads {preferred}, a pickle, which "
            "weft does not open. If the other is meant, move that away; else convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
        )
    if found:
        return found, None
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
    found = read_object(index, "the index of a model's files").get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise UserError(
            f"model.path: {index}: its weight_map does not say which tensor is in which file. Fetch it again."
        )
    for file in set(found.values()):
        if not is_own_file(file):
            raise UserError(f"model.path: {index} names {file!r}, which is no file of its own folder. Fetch it again.")
    return found


def _check_index(index: Path, files: Mapping[str, TensorFile]) -> None:
    """Raises UserError if a tensor is not in the file that the index names, as with a shard of another checkpoint."""
    for name, file in _weight_map(index).items():
        if name not in files or files[name].path.name != file:
            raise UserError(
                f"model.path: {index} says that {name} is in {file}, but it is not: the files do not belong "
                "together. Fetch them again."
            )


def _shapes(files: Mapping[str, TensorFile]) -> dict[str, tuple[int, ...]]:
    return {name: file.entries[name].shape for name, file in files.items()}


def _dtypes(files: Mapping[str, TensorFile]) -> dict[str, torch.dtype]:
    return {name: file.entries[name].dtype for name, file in files.items()}
