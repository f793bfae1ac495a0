"""Digests of written tensors. They are computed in memory, and compared with the disk when a checkpoint is committed.

digests.json is next to the weights: {"files": {file: {tensor: [[start, size, sha256], ...]}}}, with one entry per
written box. The digest covers the box's bytes in row-major order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.errors import StorageError, UserError
from weft.files import is_own_file, read_object
from weft.parallel.shards.boxes import Box, overlap
from weft.parallel.shards.safetensors_files import TensorFile, bytes_of

DIGESTS = "digests.json"


@dataclass(frozen=True, slots=True)
class BoxDigest:
    """The digest of a box of a tensor in a file."""

    file: str
    tensor: str
    start: Sequence[int]
    size: Sequence[int]
    sha256: str

    @staticmethod
    def compute(file: str, tensor: str, box: Box, values: Tensor) -> BoxDigest:
        """The digest of these values. values: the box's elements on the CPU, in the file's dtype and order of
        dimensions."""
        return BoxDigest(file, tensor, box.start, box.size, sha256(values))

    @property
    def box(self) -> Box:
        return Box(tuple(self.start), tuple(self.size))


def sha256(values: Tensor) -> str:
    """The SHA-256 of a tensor's bytes, row-major."""
    values = values.contiguous()
    return hashlib.sha256(bytes_of(values).data).hexdigest()


def check_boxes(checkpoint: Path, folder: str, digests: Iterable[BoxDigest], writer: int) -> None:
    """Read the boxes that a rank has written into a checkpoint's folder, and compare them with their digests. writer:
    the rank. Raises StorageError, with file, tensor and writer, if a box differs."""
    for name, file_digests in groupby(digests, key=lambda digest: digest.file):
        with TensorFile.open(checkpoint / folder / name) as file:
            for digest in file_digests:
                if sha256(file.read(digest.tensor, digest.box)) != digest.sha256:
                    raise not_as_written(f"{Path(folder, name)}: {digest.tensor}", writer)


def check_digests(folder: Path, rank: int = 0, world: int = 1) -> int:
    """Compare this rank's share of a folder's weights with digests.json. Returns the number of compared bytes. Raises
    UserError, with file and tensor, if they differ, or if digests.json is malformed."""
    compared = 0
    for name, tensors in sorted(_read_digests(folder).items()):
        with TensorFile.open(folder / name) as file:
            unmatched = sorted(tensors.keys() ^ file.entries.keys())
            if unmatched:
                raise UserError(f"{folder / name}: {unmatched[0]} is in only one of this file and {DIGESTS}.")
            for tensor, boxes in sorted(tensors.items())[rank::world]:
                if not _is_as_written(file, tensor, boxes):
                    raise UserError(f"{folder / name}: {tensor} was changed after it was written: its digest differs.")
            compared += file.bytes_read
    return compared


def _read_digests(folder: Path) -> dict[str, dict[str, Any]]:
    files = read_object(folder / DIGESTS, "the digests of weights").get("files")
    if not isinstance(files, dict) or not all(isinstance(tensors, dict) for tensors in files.values()):
        raise UserError(f"{folder / DIGESTS}: has no list of the tensors in each file.")
    for name in files:
        if not is_own_file(name):
            raise UserError(f"{folder / DIGESTS}: {name!r} is not a file of this folder.")
    return files


def _is_as_written(file: TensorFile, tensor: str, boxes: Any) -> bool:
    """Whether these boxes fill the tensor, and their bytes on disk match the digests."""
    full_box, filled = Box.from_shape(file.entries[tensor].shape), 0
    try:
        digests = [BoxDigest(file.path.name, tensor, *fields) for fields in boxes]
        for digest in digests:
            if digest.box != full_box and overlap(digest.box, full_box) != digest.box:
                return False
            filled += digest.box.numel
            if sha256(file.read(tensor, digest.box)) != digest.sha256:
                return False
    except (TypeError, ValueError):  # entries that are not boxes, or boxes with another number of dimensions
        return False
    return filled == full_box.numel


def not_as_written(name: str, writer: int) -> StorageError:
    """The error for a digest that differs."""
    return StorageError(
        f"{name}, written by rank {writer}, has other bytes on the disk than were written (checkpoint.verify): the "
        "file system lost or changed them"
    )


def write_digests(folder: Path, digests: Iterable[BoxDigest]) -> None:
    """Write digests.json into a folder. digests: of all ranks."""
    files: dict[str, dict[str, list[Any]]] = {}
    for digest in digests:
        boxes = files.setdefault(digest.file, {}).setdefault(digest.tensor, [])
        boxes.append([list(digest.start), list(digest.size), digest.sha256])
    with (folder / DIGESTS).open("w", encoding="utf-8") as stream:
        json.dump({"files": files}, stream)
        stream.flush()
        os.fsync(stream.fileno())
