"""A directory of safetensors files as named tensors. Any box of a tensor can be read."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from weft.errors import UserError
from weft.files import is_own_file, read_object, regular_file
from weft.models import hf
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.quantised_files import Decoder, find_decoders, weight_of
from weft.parallel.shards.safetensors_files import TensorEntry, TensorFile

SINGLE_FILE, INDEX, _INDEX_ENDING = "model.safetensors", "model.safetensors.index.json", ".safetensors.index.json"
ADAPTER = "adapter_config.json"
# Weight files of older formats, which are pickles. transformers looks for the names in _PICKLES.
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLED = ("*.bin", "*.pt", "*.pth")
_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken")


class TensorReader(Protocol):
    """A file of tensors, or an object with the same interface. entries: dtype, shape and byte range of each tensor."""

    path: Path
    entries: dict[str, TensorEntry]

    @property
    def bytes_read(self) -> int: ...

    def read(self, name: str, box: Box | None = None) -> Tensor: ...

    def close(self) -> None: ...


@dataclass
class TensorSource:
    """Named tensors on disk. files: tensor name -> its file. decoders: name of a quantised tensor -> its decoder.
    hidden: names of stored tensors that only decoders read. key: the config key of the source, for messages."""

    folder: Path
    files: Mapping[str, TensorReader]
    decoders: dict[str, Decoder] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    key: str = "model.path"

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted. A quantised tensor has the name that it would have without quantisation."""
        return sorted({*self.files} - self.hidden | {*self.decoders})

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the tensors that are not quantised."""
        return {name: self.files[name].entries[name].dtype for name in self.names if name not in self.decoders}

    @property
    def bytes_read(self) -> int:
        """Number of bytes read so far."""
        return sum(file.bytes_read for file in set(self.files.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, after decoding."""
        return self.decoders[name].shape if name in self.decoders else self.files[name].entries[name].shape

    def sort_key(self, name: str) -> tuple[str, int]:
        """(file name, first byte). Sorting by it makes reads sequential."""
        if name not in self.files:
            return (self.decoders[name].__class__.__name__, 0)
        return (self.files[name].path.name, self.files[name].entries[name].begin)

    def raw(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a stored tensor, without decoding."""
        return self.files[name].read(name, box)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, decoded, on the CPU."""
        box = box or Box.from_shape(self.shape(name))
        return self.decoders[name].read(self, box) if name in self.decoders else self.raw(name, box)

    def close(self, keep: Collection[str] = ()) -> None:
        """Close the files. Files with the tensors in `keep` stay open."""
        open_files = {file for name, file in self.files.items() if weight_of(name) in keep} if keep else set()
        for file in {*self.files.values()} - open_files:
            file.close()


def open_model_weights(path: str) -> TensorSource:
    """Open the weights of model.path. Raises UserError if they are missing, incomplete or pickled."""
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
        if name not in files or files[name].path.name != file_name:  # for example, a file of another checkpoint
            raise UserError(
                f"model.path: {index} lists {name} in {file_name}, which does not contain it: the files are from "
                "different checkpoints. Fetch them again."
            )
    config = config_json.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise UserError(f"model.path: {folder / 'config.json'}: quantization_config is no object. Fetch it again.")
    shapes = {name: file.entries[name].shape for name, file in files.items()}
    dtypes = {name: file.entries[name].dtype for name, file in files.items()}
    source = TensorSource(folder, files)
    decoders, hidden = find_decoders(config, shapes, dtypes, path, source)
    return replace(source, decoders=decoders, hidden=hidden)


def fetch_model(path: str) -> Path:
    """The directory `path`, or the snapshot of the hub repository `path`, downloaded if it is not cached. Raises
    UserError if it is neither."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=list(_MODEL_FILES)))
    except Exception as error:  # any type of exception: no network, no such repository, no access
        cached = hf.source_folder(path)
        if cached is not None:
            return cached
        first = str(error).strip().split("\n")[0]
        raise UserError(
            f"model.path: {path!r} is not a directory here and cannot be fetched from the hub: {first}"
        ) from error


def _weight_files(folder: Path, config: Mapping[str, Any]) -> tuple[list[str], Path | None]:
    """(weight files of a model's folder, the index that lists them or None).

    The choice is that of transformers' from_pretrained: the file in transformers_weights of config.json, else
    model.safetensors, else the files of the index, else a pickle. If there is none of these, other safetensors files
    are read, which transformers would not find. Raises UserError for a pickle, for an adapter next to the weights, and
    if there are no weights."""
    if os.path.lexists(folder / ADAPTER):
        raise UserError(
            f"model.path: {folder} contains {ADAPTER} next to config.json. transformers would load the adapter with "
            "the model, but weft loads only the model. Move the adapter's files to a separate folder. Then set "
            "lora.path to that folder to train the adapter, or run weft merge to train both as one model."
        )
    index = folder / INDEX
    if os.path.lexists(index):  # a broken symbolic link is an error, not a missing index
        regular_file(index, "the index of a model's files")
    file_name = config.get("transformers_weights")
    if file_name is not None:
        ending = next((e for e in (_INDEX_ENDING, ".safetensors") if str(file_name).endswith(e)), None)
        if ending is None or not isinstance(file_name, str) or not is_own_file(file_name):
            raise UserError(
                f"model.path: {folder / 'config.json'}: transformers_weights is {file_name!r:.80}, not a *.safetensors "
                "file of this folder, or an index of such files. Correct it, or remove it."
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
            "weft does not open. To use the first, move the pickle away; else convert the pickle with transformers: "
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
    """Tensor name -> file name. Raises UserError if a file is not in the index's folder."""
    weight_map = read_object(index, "the index of a model's files").get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise UserError(f"model.path: {index}: its weight_map does not map tensors to files. Fetch it again.")
    for file in set(weight_map.values()):
        if not is_own_file(file):
            raise UserError(f"model.path: {index} names {file!r}, which is not a file of this folder. Fetch it again.")
    return weight_map
