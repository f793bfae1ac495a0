"""Files of a training batch as other trainers write them, as columns: field -> a value for each sequence.

A file has arrays (.npz, .safetensors), lines (.jsonl), or objects (.pt, .pkl): dictionaries, TensorDict, DataProto of
verl and ROLL, samples of Miles and slime, Experience of OpenRLHF. No class or function that a file names is imported or
called, except those that build tensors, arrays and containers.
"""

from __future__ import annotations

import glob
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from weft import strict_json
from weft.errors import UserError

SUFFIXES = (".npz", ".safetensors", ".jsonl", ".pt", ".pth", ".pkl")
# Fields by which a mapping in a file is the batch, or one sample of it.
TOKENS = ("input_ids", "tokens", "token_ids", "sequences", "responses", "completion_ids")
SCALARS: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "pg_loss", "actor/loss", "actor/pg_loss", "train/loss", "train/pg_loss", "policy_loss"),
    "grad_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm"),
    "step_tokens": ("num_items_in_batch", "global_valid_toks"),
}
_SCALAR_NAMES = tuple(name for names in SCALARS.values() for name in names)
_LENGTHS = ("total_lengths", "response_lengths", "cu_seqlens")
_DEEPEST = 6  # levels of a file in which the batch is searched
Columns = dict[str, Any]


def dump_paths(name: str) -> list[Path]:
    """The files of a dump: one file, the files of a folder, or those of a pattern with `*`. Raises UserError if there
    is none, or if their suffixes differ or are unknown."""
    path = Path(name)
    paths = [path] if path.is_file() else []
    if path.is_dir():
        paths = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not paths:
            raise UserError(f"{name}: the folder has no file that ends in {', '.join(SUFFIXES)}.")
    elif not paths:
        paths = sorted(file for file in map(Path, glob.glob(name)) if file.is_file())
    if not paths:
        raise UserError(f"weft compare-step: {name}: there is no such file.")
    suffixes = {file.suffix for file in paths}
    if not suffixes <= set(SUFFIXES):
        raise UserError(f"{paths[0]}: must end in {', '.join(SUFFIXES)}: weft reads a file by its ending.")
    if len(suffixes) > 1:
        raise UserError(f"{name}: has files that end in {' and '.join(sorted(suffixes))}: name the files of one step.")
    return paths


def read_columns(path: Path) -> Columns:
    """Name -> values of a file. Raises UserError if the file cannot be read, or holds no batch."""
    if path.suffix == ".jsonl":
        return _read_lines(path)
    if path.suffix in (".pt", ".pth", ".pkl"):
        return _of_objects(_read_objects(path), path)
    return _read_arrays(path)


# ---------------------------------------------------------------- arrays and lines


def _read_arrays(path: Path) -> Columns:
    """Name -> array, of a file of numpy or safetensors. Nothing is unpickled."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        from safetensors.torch import load_file

        tensors = load_file(path)
    except Exception as error:  # the exception for a damaged file depends on the library
        hint = " weft does not read arrays of objects: pad them, or write .jsonl." if "pickle" in str(error) else ""
        raise UserError(f"{path}: cannot be read: {error}.{hint}") from error
    return {name: _as_array(tensor) for name, tensor in tensors.items()}


def _read_lines(path: Path) -> Columns:
    """The fields of a .jsonl file: a line for each sequence, and the scalars in any one line."""
    columns: Columns = {}
    scalars: Columns = {}
    count = 0
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = strict_json.parse(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: is not JSON: {error}.") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: must be a JSON object.")
        for name in [name for name in row if name in _SCALAR_NAMES]:
            if name in scalars:
                raise UserError(
                    f"{path}, line {number}: has {name} again: write it once, because it is a number of the "
                    "whole batch."
                )
            scalars[name] = row.pop(name)
        if not row:
            continue
        if count and set(row) != set(columns):
            raise UserError(
                f"{path}, line {number}: has {', '.join(sorted(row))}, but the lines before have "
                f"{', '.join(sorted(columns))}."
            )
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
        count += 1
    return {**columns, **scalars}


# ---------------------------------------------------------------- objects


class _PickledObject(dict[Any, Any]):
    """Replaces an object whose class the file names: has its arguments and its state, and its items as a dictionary."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> _PickledObject:
        record = super().__new__(cls)
        record.parts = list(arguments)
        return record

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__()
        self.parts: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def append(self, value: Any) -> None:
        self.parts.append(value)

    def extend(self, values: Sequence[Any]) -> None:
        self.parts.extend(values)

    def __hash__(self) -> int:  # type: ignore[override]  # an enum may be the key of a dictionary
        return id(self)


_BUILTINS: dict[str, Callable[..., Any]] = {
    "set": set, "frozenset": frozenset, "bytearray": bytearray, "complex": complex, "slice": slice, "range": range,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Builds tensors, arrays and containers; other objects become records."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch.storage" and name == "_load_from_bytes":
            return _load_torch
        if (module, name) == ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"):
            return _consolidated
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _with_attributes
        if module == "torch._utils" and name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"):
            return getattr(torch._utils, name)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module == "torch" and (name in ("Size", "device") or name.endswith("Storage"))):
            return getattr(torch, name)
        of_numpy = module.partition(".")[0] == "numpy"
        if of_numpy and name in ("_reconstruct", "scalar", "_frombuffer", "ndarray", "dtype"):
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "builtins" and name in _BUILTINS:
            return _BUILTINS[name]
        return type(name, (_PickledObject,), {})


def _load_torch(data: bytes) -> Any:
    import torch

    module = SimpleNamespace(Unpickler=_Unpickler, load=_load_pickle, __name__="pickle")
    return torch.load(io.BytesIO(data), map_location="cpu", pickle_module=module, weights_only=False)


def _load_pickle(file: Any, **keywords: Any) -> Any:
    return _Unpickler(file, **keywords).load()


def _with_attributes(build: Callable[..., Any], kind: type, arguments: tuple[Any, ...], state: Any) -> Any:
    """A tensor without the attributes in its state; a nested tensor as a list of tensors."""
    attributes = state[0] if isinstance(state, tuple) else state
    if isinstance(attributes, Mapping) and "_values" in attributes and "_offsets" in attributes:
        return list(attributes["_values"].split(attributes["_offsets"].diff().tolist()))
    return build(*arguments)


def _consolidated(metadata: Mapping[str, Any], storage: Any) -> Columns:
    """The tensors of a consolidated TensorDict, which are slices of one tensor of bytes."""
    import torch

    tensors: Columns = dict(metadata.get("non_tensors", {}))
    for name, (dtype_name, shape, start, *_) in metadata["leaves"].items():
        dtype = getattr(torch, str(dtype_name).removeprefix("torch."))
        end = start + int(np.prod(shape)) * dtype.itemsize
        tensors[name] = storage[start:end].clone().view(dtype).reshape(tuple(shape))
    for name in [name for name in tensors if name.startswith("<NJT_VALUES>")]:  # nested tensors
        field = name.removeprefix("<NJT_VALUES>")
        tensors[field] = list(tensors[name].split(tensors[f"<NJT_OFFSETS>{field}"].diff().tolist()))
    return tensors


def _read_objects(path: Path) -> Any:
    data = path.read_bytes()
    try:
        return _load_torch(data) if data[:4] == b"PK\x03\x04" else _load_pickle(io.BytesIO(data))
    except Exception as error:  # the type of exception depends on the damage
        raise UserError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _of_objects(content: Any, path: Path) -> Columns:
    """The columns of the batch in the content of a file, and the scalars next to the batch. Raises UserError if there
    is none, or if ranks of context parallelism share its sequences."""
    mappings = list(_mappings(content))
    batches = [mapping for mapping in mappings if any(_is_given(mapping.get(name)) for name in TOKENS)]
    if not batches:
        names = sorted({str(name) for mapping in mappings for name in mapping})
        raise UserError(f"{path}: has no {' or '.join(TOKENS)}. It has: {', '.join(names[:30]) or 'no fields'}.")
    ranks = next((int(mapping["cp_size"]) for mapping in mappings if "cp_size" in mapping), 1)
    if ranks > 1:
        raise UserError(
            f"{path}: has one of {ranks} parts of each sequence, because the run had context parallelism: dump a step "
            "with --context-parallel-size 1."
        )
    scalars = {name: value for mapping in mappings for name, value in mapping.items() if name in _SCALAR_NAMES}
    samples = [batch for batch in batches if not _is_batch(batch)]
    if len(samples) == len(batches):
        names = [name for name in samples[0] if all(_is_given(sample.get(name)) for sample in samples)]
        return scalars | {
            name: [_as_array(sample[name]) for sample in samples] for name in names if name not in scalars
        }
    parts = [{name: _as_array(value) for name, value in batch.items()} for batch in batches if _is_batch(batch)]
    parts = [part for part in parts if part.keys() == parts[0].keys()]
    if len(parts) == 1:
        return scalars | parts[0]
    names = [name for name in parts[0] if all(isinstance(part[name], list | np.ndarray) for part in parts)]
    return scalars | {name: [row for part in parts for row in part[name]] for name in names}


def _is_batch(mapping: Mapping[Any, Any]) -> bool:
    """Whether a mapping has several sequences: their lengths, a matrix of token ids, or a list of arrays or lists."""
    if any(_is_given(mapping.get(name)) and not isinstance(mapping[name], int) for name in _LENGTHS):
        return True
    for value in (mapping.get(name) for name in TOKENS):
        if getattr(value, "ndim", 0) > 1:
            return True
        if isinstance(value, list | tuple) and value and (hasattr(value[0], "ndim") or isinstance(value[0], list)):
            return True
    return False


def _is_given(value: Any) -> bool:
    return value is not None and not isinstance(value, _PickledObject)


def _mappings(content: Any, depth: int = 0) -> Iterator[Mapping[Any, Any]]:
    """The mappings in a value, from outside to inside."""
    if depth > _DEEPEST:
        return
    if isinstance(content, bytes) and content[:4] == b"PK\x03\x04":  # as DataProto pickles its tensors
        content = _load_torch(content)
    if isinstance(content, Mapping):
        if content:
            yield content
        parts = [value for value in content.values() if isinstance(value, Mapping | list | tuple | bytes)]
        parts += content.parts if isinstance(content, _PickledObject) else []
    elif isinstance(content, list | tuple):
        parts = [part for part in content if isinstance(part, Mapping | list | tuple | bytes)]
    else:
        return
    for part in parts:
        yield from _mappings(part, depth + 1)


def _as_array(value: Any) -> Any:
    """A tensor, or each tensor of a list, as an array; other values unchanged."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    return [_as_array(part) for part in value] if isinstance(value, list | tuple) else value
