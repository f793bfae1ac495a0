"""Digests of written tensors, computed in memory; the commit of a checkpoint compares them with the disk.

digests.json lies next to the weights: {"files": {file: {tensor: [[start, size, sha256], ...]}}}, with one entry per box
written. A digest is of the box's bytes in row-major order.
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
        """values: the box's elements on the CPU, in the file's dtype and order of dimensions."""
        return BoxDigest(file, tensor, box.start, box.size, sha256(values))

    @property
    def box(self) -> Box:
        return Box(tuple(self.start), tuple(self.size))


def sha256(values: Tensor) -> str:
    """The SHA-256 of a tensor's bytes, row-major."""
    values = values.contiguous()
    return hashlib.sha256(bytes_of(values).data).hexdigest()


def check_boxes(checkpoint: Path, folder: str, digests: Iterable[BoxDigest], writer: int) -> None:
    """Read back the boxes that a rank has written into a checkpoint's folder and compare. Raises StorageError, with
    file, tensor and writer, if one differs. writer: that rank."""
    for name, of_file in groupby(digests, key=lambda digest: digest.file):
        with TensorFile.open(checkpoint / folder / name) as file:
            for digest in of_file:
                if sha256(file.read(digest.tensor, digest.box)) != digest.sha256:
                    raise not_as_written(f"{Path(folder, name)}: {digest.tensor}", writer)


def check_digests(folder: Path, rank: int = 0, world: int = 1) -> int:
    """Compare this rank's share of a folder's weights with digests.json; returns the bytes compared. Raises UserError,
    with file and tensor, if they differ, or if digests.json is malformed."""
    compared = 0
    for name, tensors in sorted(_read_digests(folder).items()):
        with TensorFile.open(folder / name) as file:
            unlike = sorted(tensors.keys() ^ file.entries.keys())
            if unlike:
                raise UserError(f"{folder / name}: {unlike[0]} is in only one of this file and {DIGESTS}.")
            for tensor, boxes in sorted(tensors.items())[rank::world]:
                if not _is_as_written(file, tensor, boxes):
                    raise UserError(f"{folder / name}: {tensor} was changed after it was written: its digest differs.")
            compared += file.bytes_read
    return compared


def _read_digests(folder: Path) -> dict[str, dict[str, Any]]:
    files = read_object(folder / DIGESTS, "the digests of weights").get("files")
    if not isinstance(files, dict) or not all(isinstance(tensors, dict) for tensors in files.values()):
        raise UserError(f"{folder / DIGESTS}: does not say what was written into which file.")
    for name in files:
        if not is_own_file(name):
            raise UserError(f"{folder / DIGESTS}: {name!r} is no file of its own folder.")
    return files


def _is_as_written(file: TensorFile, tensor: str, boxes: Any) -> bool:
    """Whether these boxes fill the tensor, and have the bytes that were written."""
    whole_box, filled = Box.from_shape(file.entries[tensor].shape), 0
    try:
        digests = [BoxDigest(file.path.name, tensor, *fields) for fields in boxes]
        for digest in digests:
            if digest.box != whole_box and overlap(digest.box, whole_box) != digest.box:
                return False
            filled += digest.box.numel
            if sha256(file.read(tensor, digest.box)) != digest.sha256:
                return False
    except (TypeError, ValueError):  # no boxes, or boxes of another tensor
        return False
    return filled == whole_box.numel


def not_as_written(name: str, writer: int) -> StorageError:
    """The error for a digest that differs."""
    return StorageError(
        f"{name}, written by rank {writer}, has other bytes on the disk than were written (checkpoint.verify): the "
        "file system lost or changed them"
    )


def write_digests(folder: Path, digests: Iterable[BoxDigest]) -> None:
    """Write digests.json of a folder from the digests of all ranks."""
    files: dict[str, dict[str, list[Any]]] = {}
    for digest in digests:
        boxes = files.setdefault(digest.file, {}).setdefault(digest.tensor, [])
        boxes.append([list(digest.start), list(digest.size), digest.sha256])
    with (folder / DIGESTS).open("w", encoding="utf-8") as stream:
        json.dump({"files": files}, stream)
        stream.flush()
        os.fsync(stream.fileno())
