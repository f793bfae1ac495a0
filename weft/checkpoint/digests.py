"""Digests of what was written, taken from memory: what the commit of a checkpoint compares with what lies on the disk.

They stay beside the weights in digests.json: {"files": {file: {tensor: [[start, size, sha256], ...]}}}, one for each
box that was written at once, of its bytes in row-major order.
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

from weft.checkpoint.boxes import Box
from weft.checkpoint.files import TensorFile, bytes_of
from weft.errors import StorageError

DIGESTS = "digests.json"


@dataclass(frozen=True, slots=True)
class BoxDigest:
    """Of a box of a tensor of a file."""

    file: str
    tensor: str
    start: Sequence[int]
    size: Sequence[int]
    sha256: str

    @staticmethod
    def of(file: str, tensor: str, box: Box, values: Tensor) -> BoxDigest:
        """values: of the box, on the CPU, in the file's dtype and order of dimensions."""
        return BoxDigest(file, tensor, box.start, box.size, sha256(values))

    @property
    def box(self) -> Box:
        return Box(tuple(self.start), tuple(self.size))


def sha256(values: Tensor) -> str:
    """Of a tensor's bytes, row-major."""
    values = values.contiguous()
    return hashlib.sha256(bytes_of(values).data).hexdigest()


def check_boxes(checkpoint: Path, folder: str, digests: Iterable[BoxDigest], writer: int) -> None:
    """Read what a rank has written into the files of a folder of a checkpoint, and compare. StorageError that names
    file, tensor and writer."""
    for name, of_file in groupby(digests, key=lambda digest: digest.file):
        with TensorFile.open(checkpoint / folder / name) as file:
            for digest in of_file:
                if sha256(file.read(digest.tensor, digest.box)) != digest.sha256:
                    raise not_as_written(f"{Path(folder, name)}: {digest.tensor}", writer)


def not_as_written(what: str, writer: int) -> StorageError:
    """The error where a digest differs."""
    return StorageError(
        f"{what}, written by rank {writer}, has other bytes on the disk than were written (checkpoint.verify): the "
        "file system lost or changed them"
    )


def write_digests(folder: Path, digests: Iterable[BoxDigest]) -> None:
    """digests.json of a folder, from those of all ranks."""
    files: dict[str, dict[str, list[Any]]] = {}
    for digest in digests:
        boxes = files.setdefault(digest.file, {}).setdefault(digest.tensor, [])
        boxes.append([list(digest.start), list(digest.size), digest.sha256])
    with (folder / DIGESTS).open("w", encoding="utf-8") as stream:
        json.dump({"files": files}, stream)
        stream.flush()
        os.fsync(stream.fileno())
