"""Reads tensors from files that torch.save wrote, box by box, without unpickling.

Such a file, or part of a larger file, is a zip archive with uncompressed members. data.pkl describes the content, and
data/0, data/1, ... are the bytes of each storage. So a box of a tensor is a few byte ranges of the file.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.parallel.shards.boxes import Box
from weft.parallel.shards.pickles import PERSISTENT, Constructor, GlobalName, UnreadableError, new_dict, read_pickle
from weft.parallel.shards.safetensors_files import DTYPES, TensorEntry, read_box

_LONGEST_PICKLE = 1 << 26
_LONGEST_DIRECTORY = 1 << 26
_STORAGES = {
    "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip
_DTYPES = {f"torch.{str(dtype).removeprefix('torch.')}": dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a file. entry: the tensor with dimensions in the order of the file. order[i]: the tensor's dimension
    that is dimension i of the entry."""

    entry: TensorEntry
    order: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry.shape[self.order.index(dim)] for dim in range(len(self.order)))

    def read(self, descriptor: int, box: Box, name: str) -> Tensor:
        """A box of the tensor, on the CPU. name: file and tensor, for messages."""
        inside = Box(tuple(box.start[dim] for dim in self.order), tuple(box.size[dim] for dim in self.order))
        values = read_box(descriptor, self.entry, inside, name)
        return values.permute([self.order.index(dim) for dim in range(len(self.order))])


def read_archive(
    descriptor: int, begin: int, length: int, allowed: Mapping[str, Constructor | None] | None = None
) -> Any:
    """The object that torch.save wrote into these bytes of an open file. Each tensor is a SavedTensor. allowed: further
    names that it may refer to, as in `read_pickle`. Raises UnreadableError if it is not such an archive."""
    archive = _Archive(descriptor, begin, length)
    pickled, size = archive.find("data.pkl")
    if size > _LONGEST_PICKLE:
        raise UnreadableError(f"its data.pkl has {size:,} bytes")
    return read_pickle(os.pread(descriptor, size, pickled), archive.allowed | dict(allowed or {}))


class _Archive:
    def __init__(self, descriptor: int, begin: int, length: int) -> None:
        self._descriptor, self._begin = descriptor, begin
        window = _Window(descriptor, begin, length)
        try:
            with zipfile.ZipFile(window) as archive:  # reads only the archive's directory
                members = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        except UnreadableError:
            raise
        except Exception as error:  # zipfile raises about ten types of exceptions for damaged archives
            raise UnreadableError("it is not an archive of torch.save") from error
        self._members, self._length = members, length
        if "byteorder" in members:
            first_byte, size = self.find("byteorder")
            if os.pread(descriptor, min(size, 16), first_byte) != b"little":
                raise UnreadableError("it was written on a big-endian machine")

    @property
    def allowed(self) -> dict[str, Constructor | None]:
        """The names that data.pkl may refer to: storages, constructors of tensors, and plain containers."""
        plain: dict[str, Constructor | None] = dict.fromkeys(
            (*_DTYPES, *(f"torch.{name}Storage" for name in _STORAGES))
        )
        plain |= dict.fromkeys(("torch.storage.UntypedStorage", "torch.device", PERSISTENT))
        return plain | {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "collections.OrderedDict": new_dict,
            "collections.defaultdict": new_dict,
            "torch.Size": lambda sizes=(): tuple(sizes),
        }

    def find(self, name: str) -> tuple[int, int]:
        """(first byte in the file, number of bytes) of a member."""
        member = self._members.get(name)
        if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise UnreadableError(f"it has no uncompressed {name}")
        header = self._begin + member.header_offset
        is_outside = not self._begin <= header <= self._begin + self._length
        fixed = b"" if is_outside else os.pread(self._descriptor, 30, header)
        if len(fixed) < 30 or fixed[:4] != b"PK\x03\x04":
            raise UnreadableError(f"its {name} is not at the position that its directory lists")
        begin = header + 30 + int.from_bytes(fixed[26:28], "little") + int.from_bytes(fixed[28:30], "little")
        if begin + member.file_size > self._begin + self._length:
            raise UnreadableError(f"its {name} is outside of the file")
        return begin, member.file_size

    def _tensor(
        self, storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, *more_args: Any
    ) -> Any:
        """The SavedTensor for the arguments of torch's _rebuild_tensor_v2 or _v3. In v3, `more_args` starts with the
        dtype."""
        storage_class, key = storage.args[0][1], storage.args[0][2]
        if type(storage_class) is not GlobalName or type(key) is not str or not key.isdecimal():
            raise TypeError
        if storage_class.name == "torch.storage.UntypedStorage":
            dtype = _DTYPES.get(more_args[0].name) if type(more_args[0]) is GlobalName else None
        else:
            dtype = _STORAGES.get(storage_class.name.removeprefix("torch.").removesuffix("Storage"))
        if dtype is None or not all(_are_sizes(numbers) for numbers in (shape, strides, (offset,))):
            raise TypeError
        storage_begin, size = self.find(f"data/{key}")
        order = _order_of(shape, strides)
        sizes: tuple[int, ...] = shape
        begin = storage_begin + offset * dtype.itemsize
        end = begin + math.prod(sizes) * dtype.itemsize
        if end > storage_begin + size:
            raise UnreadableError("a tensor is larger than its storage")
        return SavedTensor(TensorEntry(dtype, tuple(sizes[dim] for dim in order), begin, end), order)


def _are_sizes(numbers: Any) -> bool:
    return type(numbers) is tuple and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


def _order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions by descending stride. Raises UnreadableError if the elements are not contiguous in that order."""
    if len(shape) != len(strides):
        raise TypeError
    order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim] if shape[dim] != 1 else 0))
    count, step = math.prod(shape), 1
    for dim in reversed(order):
        if count and shape[dim] != 1 and strides[dim] != step:
            raise UnreadableError("a tensor has gaps between its elements, or shares them")
        step *= shape[dim]
    return order


class _Window(io.RawIOBase):
    """A part of a file, for zipfile. A read of more than _LONGEST_DIRECTORY bytes is an error."""

    def __init__(self, descriptor: int, begin: int, length: int) -> None:
        self._descriptor, self._begin, self._length, self._position = descriptor, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("before the beginning")
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        available = max(0, self._length - self._position)
        size = available if size < 0 else min(size, available)
        if size > _LONGEST_DIRECTORY:
            raise UnreadableError(f"its directory has {size:,} bytes")
        data = os.pread(self._descriptor, size, self._begin + self._position)
        self._position += len(data)
        return data
