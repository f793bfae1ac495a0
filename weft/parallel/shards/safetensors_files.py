"""Reads and writes safetensors files box by box (format: github.com/huggingface/safetensors, "Format").

A file consists of 8 bytes with the length of the header, a JSON header, and the tensors, row-major. So a box of a
tensor is a few byte ranges. Ranks that share a file system can write one file together (ranges.py), and a rank reads
only the boxes that it needs."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import UserError, first_line
from weft.files import regular_file
from weft.parallel.shards.boxes import Box
from weft.strict_json import unique

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the limit of the format


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file. begin, end: byte offsets from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """The layout of a file to be written. header: the bytes before the tensors. entries: in file order."""

    header: bytes
    entries: dict[str, TensorEntry]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return max((entry.end for entry in self.entries.values()), default=len(self.header))


class TensorFile:
    """One safetensors file, open for reading."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises UserError if the file is missing, truncated or malformed."""
        self.path, self.bytes_read = regular_file(path, "a safetensors file"), 0
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{path}: cannot be opened: {error.strerror}.") from error
        try:
            self.entries, self.metadata = _read_header(path, self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    @staticmethod
    def open(path: Path) -> TensorFile:
        """Open a file for reading."""
        return TensorFile(path)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, on the CPU in the file's dtype. Increases `bytes_read`."""
        entry = self.entries[name]
        values = read_box(self._descriptor, entry, box or Box.from_shape(entry.shape), f"{self.path}: {name}")
        self.bytes_read += values.nbytes
        return values

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RangeFile:
    """An existing file, opened write-only, so that a client of a network file system does not read its pages."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY)

    def write(self, view: memoryview, offset: int) -> None:
        """Write all bytes at this offset."""
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def fsync(self) -> None:
        """Wait until the writes are on disk."""
        os.fsync(self._descriptor)

    def __enter__(self) -> RangeFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def read_box(descriptor: int, entry: TensorEntry, box: Box, name: str) -> Tensor:
    """A box of a tensor of an open file, on the CPU in the file's dtype. name: file and tensor, for messages. Raises
    UserError if the file ends inside the box."""
    # A box outside the tensor would read bytes of other tensors or of the header.
    assert all(0 <= a <= b <= n for a, b, n in zip(box.start, box.end, entry.shape, strict=True)), (name, box)
    out, offset = torch.empty(box.size, dtype=entry.dtype), 0
    view = memoryview(out.reshape(-1).view(torch.uint8).numpy())
    for begin, length in runs(entry, box):
        _read_into(descriptor, view[offset : offset + length], begin, name)
        offset += length
    return out


def _read_into(descriptor: int, view: memoryview, offset: int, name: str) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise UserError(f"{name}: the file is truncated: it ends inside of this tensor. Fetch or write it again.")
        view, offset = view[count:], offset + count


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """The layout of a file with these tensors, which may be on meta."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begin = 0
    # Tensors with wide elements come first, so that every tensor is aligned to its element size.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    del header["__metadata__"]
    entries = {name: _entry(fields, 8 + len(text)) for name, fields in header.items()}
    return FileLayout(len(text).to_bytes(8, "little") + text, entries)


def create(path: Path, layout: FileLayout) -> None:
    """Create a file of the final size, with its header."""
    with path.open("wb") as stream:
        stream.write(layout.header)
        stream.truncate(layout.size)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A view of the bytes of a contiguous CPU tensor. Keep the tensor alive while it is used. Tensor.numpy() would make
    the storage non-resizable, and Engine.sleep resizes storages."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(tensor.data_ptr()))


def _read_header(path: Path, descriptor: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise UserError(f"{path}: is not a safetensors file, or is truncated: {size:,} bytes. Fetch or write it again.")
    try:
        header = json.loads(os.pread(descriptor, length, 8), object_pairs_hook=unique)
        metadata = header.pop("__metadata__", None) or {}
        entries = {name: _entry(fields, 8 + length) for name, fields in header.items()}
        needed = max((entry.end for entry in entries.values()), default=8 + length)
        if needed <= size:  # safe_open then refuses unknown types, and ranges that overlap, leave gaps or are outside
            with safe_open(path, framework="np"):
                return entries, metadata
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError) as error:
        raise UserError(
            f"{path}: is not a safetensors file: its header cannot be read ({first_line(error)}). Fetch or write it "
            "again."
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or first_line(error)}.") from error
    raise UserError(f"{path}: is truncated: it has {size:,} bytes and should have {needed:,}. Fetch it again.")


def _entry(fields: Mapping[str, Any], origin: int) -> TensorEntry:
    dtype, shape = DTYPES.get(fields["dtype"]), tuple(int(n) for n in fields["shape"])
    if dtype is None:
        raise ValueError(f"weft reads no dtype {fields['dtype']!r}")
    begin, end = fields["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for a {fields['dtype']} of {list(shape)}")
    return TensorEntry(dtype, shape, origin + begin, origin + end)


def runs(entry: TensorEntry, box: Box) -> Iterator[tuple[int, int]]:
    """(first byte, length) of the contiguous ranges of a box, in row-major order."""
    size = entry.dtype.itemsize
    strides = [math.prod(entry.shape[dim + 1 :]) * size for dim in range(len(entry.shape))]
    split = len(entry.shape)  # a box is contiguous along the dimensions from `split` on
    while split > 0 and (split == len(entry.shape) or box.size[split] == entry.shape[split]):
        split -= 1
    length = box.numel // math.prod(box.size[:split]) * size if box.numel else 0
    if not length:
        return
    first = entry.begin + sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    for index in itertools.product(*(range(n) for n in box.size[:split])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length
