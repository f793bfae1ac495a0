"""Reads directories that torch.distributed.checkpoint (DCP) wrote.

`.metadata` is a pickle of torch's classes. It maps tensors to byte ranges of files. A file __RANK_N.distcp is a
sequence of chunks, each written by torch.save. Both are read as data, without running code (pickles.py,
torch_archives.py). The description of a tensor is checked before any element is read: its chunks fill it, do not
overlap, and are in files of the directory."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import UserError
from weft.files import is_own_file, regular_file
from weft.parallel.shards.boxes import Box, overlap, slabs
from weft.parallel.shards.pickles import Constructor, GlobalName, UnreadableError, new_dict, read_pickle
from weft.parallel.shards.safetensors_files import DTYPES
from weft.parallel.shards.torch_archives import SavedTensor, read_archive

METADATA = ".metadata"
_LONGEST_METADATA = 1 << 28
_MOST_DIMENSIONS = 8
_LONGEST_NAME = 1000
_MOST_OPEN = 64  # files open at the same time; a directory may have thousands
_SLAB_BYTES = 1 << 25  # bytes of one read, in addition to the memory of the requested box

_CLASSES = "torch.distributed.checkpoint.metadata."
_PATHS = tuple(
    f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "Path", "WindowsPath")
)
_ALLOWED: dict[str, Constructor | None] = {
    **dict.fromkeys(f"{_CLASSES}{name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata",
                                                     "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
                                                     "StorageMeta", "_MEM_FORMAT_ENCODING")),
    **dict.fromkeys(("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout")),
    **dict.fromkeys(f"torch.{str(dtype).removeprefix('torch.')}" for dtype in DTYPES.values()),
    **dict.fromkeys(_PATHS),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "collections.OrderedDict": new_dict,
    "collections.defaultdict": new_dict,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes in a file of the directory."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the directory. chunks: (box of the tensor, byte range) of each chunk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, ByteRange], ...]


@dataclass
class DcpDirectory:
    """A directory whose .metadata was read and checked. tensors: by the names of the program that wrote it. values:
    byte ranges of values that are not tensors. key: the config key of the directory, for messages."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, ByteRange]
    key: str
    bytes_read: int = 0
    _files: dict[str, int] = field(default_factory=dict)
    _chunks: dict[ByteRange, SavedTensor] = field(default_factory=dict)

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, on the CPU. Reads only the overlapping parts of chunks."""
        stored = self.tensors[name]
        out = torch.empty(box.size, dtype=stored.dtype)
        for chunk, location in stored.chunks:
            shared = overlap(chunk, box)
            if shared is None:
                continue
            saved = self._saved(name, stored.dtype, chunk, location)
            for slab in slabs(shared, _SLAB_BYTES // stored.dtype.itemsize):
                inside = Box(tuple(a - b for a, b in zip(slab.start, chunk.start, strict=True)), slab.size)
                values = saved.read(self._file(location.file), inside, f"{self.folder / location.file}: {name}")
                out[slab.within(box)] = values
                self.bytes_read += values.nbytes
        return out

    def value(self, name: str) -> Any:
        """A value that is not a tensor, or the number in a tensor of one element. None for other tensors."""
        if name in self.tensors:
            stored = self.tensors[name]
            return self.read(name, Box.from_shape(stored.shape)).item() if math.prod(stored.shape) == 1 else None
        location = self.values[name]
        with self._readable(location, name):
            return read_archive(self._file(location.file), location.begin, location.length)

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _file(self, name: str) -> int:
        if name not in self._files:
            if len(self._files) >= _MOST_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            try:
                self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            except OSError as error:
                raise UserError(f"{self.key}: {self.folder / name} cannot be opened: {error.strerror}.") from error
        return self._files[name]

    def _saved(self, name: str, dtype: torch.dtype, chunk: Box, location: ByteRange) -> SavedTensor:
        """The position of a chunk's tensor in its file. Raises UserError if dtype or shape differ from .metadata."""
        if location not in self._chunks:
            with self._readable(location, name):
                saved = read_archive(self._file(location.file), location.begin, location.length)
            if not isinstance(saved, SavedTensor) or (saved.dtype, saved.shape) != (dtype, chunk.size):
                raise UserError(
                    f"{self.key}: {self.folder / location.file} does not contain the part of {name} that {METADATA} "
                    f"describes, {list(chunk.size)} of {dtype}. Write the checkpoint again."
                )
            self._chunks[location] = saved
        return self._chunks[location]

    @contextmanager
    def _readable(self, location: ByteRange, name: str) -> Iterator[None]:
        try:
            yield
        except UnreadableError as error:
            raise UserError(
                f"{self.key}: {self.folder / location.file} cannot be read where {name} should be: {error}. Write the "
                "checkpoint again."
            ) from error


def is_dcp(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this directory."""
    return os.path.lexists(folder / METADATA)


def open_dcp(path: str, key: str) -> DcpDirectory:
    """Open the directory at `path`. key: the config key of the path. Raises UserError if DCP did not write it, or if
    its files do not match its metadata."""
    folder = Path(path).expanduser()
    if not is_dcp(folder):
        raise UserError(_no_dcp(folder, key))
    file = regular_file(folder / METADATA, "the metadata of a torch.distributed.checkpoint directory")
    size = file.stat().st_size
    if size > _LONGEST_METADATA:
        raise UserError(f"{key}: {file} has {size:,} bytes, more than weft reads ({_LONGEST_METADATA:,}).")
    try:
        tensors, values = _content(folder, read_pickle(file.read_bytes(), _ALLOWED))
    except UnreadableError as error:
        raise UserError(
            f"{key}: {file} cannot be read: {error}. Is it a complete directory of torch.distributed.checkpoint?"
        ) from error
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"{key}: {file} is not a file that torch.distributed.checkpoint writes: its content has unexpected types. "
            "Write the checkpoint again."
        ) from error
    return DcpDirectory(folder, tensors, values, key)


def _no_dcp(folder: Path, key: str) -> str:
    """The error message for a path that DCP did not write, with a suggestion."""
    if not folder.is_dir():
        return f"{key}: {folder} is not a directory. Set {key} to a directory that torch.distributed.checkpoint wrote."
    if any(folder.glob("__*.metadata")):
        return (
            f"{key}: {folder} has a .metadata for each rank, which DCP writes without collectives. weft cannot "
            "combine them. Save it with torch.distributed.checkpoint.save(..., no_dist=False)."
        )
    inner = sorted(path.parent for path in folder.glob(f"*/{METADATA}"))
    if inner:
        return f"{key}: {folder} holds no {METADATA}. Did you mean {' or '.join(map(str, inner[-3:]))}?"
    if any(folder.glob("*.safetensors")):
        return f"{key}: {folder} holds no {METADATA}, but safetensors. Set model.path to it, and remove {key}."
    return f"{key}: {folder} holds no {METADATA}, so torch.distributed.checkpoint has not finished writing it."


# ---------------------------------------------------------------- reading .metadata


def _content(folder: Path, metadata: Any) -> tuple[dict[str, StoredTensor], dict[str, ByteRange]]:
    state_dict, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if metadata.name != f"{_CLASSES}Metadata" or type(state_dict) is not dict or type(storage) is not dict:
        raise UnreadableError("it does not describe a checkpoint")
    sizes: dict[str, int] = {}
    locations: dict[tuple[str, tuple[int, ...] | None], ByteRange] = {}
    for index, info in storage.items():
        locations[_name(index.get("fqn")), _sizes(index.get("offset"))] = _byte_range(folder, info, sizes)
    tensors, values = {}, {}
    for name, record in state_dict.items():
        _name(name)
        if record.name == f"{_CLASSES}BytesStorageMetadata":
            if (name, None) not in locations:
                raise UnreadableError(f"it has no position of {name}")
            values[name] = locations[name, None]
        else:
            tensors[name] = _tensor(name, record, locations)
    return tensors, values


def _byte_range(folder: Path, info: Any, sizes: dict[str, int]) -> ByteRange:
    """The byte range that a _StorageInfo describes. sizes: sizes of files by name, a cache that this extends."""
    file, begin, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if type(file) is not str or type(begin) is not int or type(length) is not int:
        raise TypeError
    if not is_own_file(file):
        raise UnreadableError(f"it names {file[:100]!r}, which is not a file of this directory")
    if info.get("transform_descriptors"):
        raise UnreadableError(
            f"{file} was written with extensions of DCP (compression, encryption), which weft does not support"
        )
    if file not in sizes:
        sizes[file] = regular_file(folder / file, "a file of a checkpoint").stat().st_size
    if not 0 <= begin <= begin + length <= sizes[file]:
        raise UnreadableError(
            f"{file} is truncated: it has {sizes[file]:,} bytes instead of at least {begin + length:,}"
        )
    return ByteRange(file, begin, length)


def _tensor(name: str, record: Any, locations: Mapping[tuple[str, tuple[int, ...] | None], ByteRange]) -> StoredTensor:
    if record.name != f"{_CLASSES}TensorStorageMetadata":
        raise TypeError
    shape, properties = _sizes(record.get("size")), record.get("properties")
    dtype = properties.state[0] if type(properties.state) is tuple else properties.get("dtype")
    dtypes = {f"torch.{str(kind).removeprefix('torch.')}": kind for kind in DTYPES.values()}
    if shape is None or type(dtype) is not GlobalName or type(record.get("chunks")) is not list:
        raise TypeError
    if len(shape) > _MOST_DIMENSIONS:
        raise UnreadableError(f"{name} has {len(shape)} dimensions")
    chunks = []
    for chunk in record.get("chunks"):
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            raise TypeError
        box = Box(offsets, sizes)
        if not all(end <= size for end, size in zip(box.end, shape, strict=True)):
            raise UnreadableError(f"a chunk of {name} is outside of the tensor")
        if box.numel:
            if (name, offsets) not in locations:
                raise UnreadableError(f"it has no position of a chunk of {name}")
            location = locations[name, offsets]
            if location.length < box.numel * dtypes[dtype.name].itemsize:
                raise UnreadableError(f"a chunk of {name} is larger than its bytes in {location.file}")
            chunks.append((box, location))
    if not chunks_fill(shape, [box for box, _ in chunks]):
        raise UnreadableError(f"the chunks of {name} do not fill it, or overlap")
    return StoredTensor(dtypes[dtype.name], shape, tuple(chunks))


def _name(text: Any) -> str:
    if type(text) is not str or len(text) > _LONGEST_NAME:
        raise TypeError
    return text


def _sizes(numbers: Any) -> tuple[int, ...] | None:
    """Sizes or offsets, after a check of their types. None for None."""
    if numbers is None:
        return None
    if type(numbers) is not tuple or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise TypeError
    return numbers


def chunks_fill(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether boxes fill a full tensor without overlapping.

    They do if and only if their indicator functions sum to the indicator function of the full box. The corners of a box
    determine its indicator function, if each corner has the sign (-1) ** (number of coordinates that are ends). So the
    signed corners of all boxes must sum to those of the full box.
    """
    corners: dict[tuple[int, ...], int] = {}
    for box, sign in [(Box.from_shape(shape), -1), *((box, 1) for box in boxes)]:
        if not box.numel:
            continue
        for ends in itertools.product((False, True), repeat=len(shape)):
            corner = tuple(e if last else s for s, e, last in zip(box.start, box.end, ends, strict=True))
            corners[corner] = corners.get(corner, 0) + (-sign if sum(ends) % 2 else sign)
    return not any(corners.values())
