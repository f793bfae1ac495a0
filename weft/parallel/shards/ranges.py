"""Files that several ranks write together, with one writer for each block.

Clients of a network file system cache full pages, and do not see each other's pages. If two clients change bytes of one
page, the later write-back may undo the earlier one. So a rank writes to the shared file only the blocks of which it
holds all bytes. It writes its bytes of other blocks, at the seams between ranks, to a separate seam file. After all
ranks have finished, one rank per shared file copies the seam bytes into the shared file. No file is open on one rank
while another rank writes it, so close-to-open consistency is sufficient.

Shards along the first dimension are long ranges with two seams each. Boxes along other dimensions have ranges shorter
than a block. All their bytes go through the seam file, and are written twice.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType

from torch import Tensor

from weft.parallel.shards.boxes import Box
from weft.parallel.shards.safetensors_files import RangeFile, TensorEntry, bytes_of, runs

BLOCK = 1 << 16  # bytes: the largest page size in use (arm64), and a multiple of all smaller page sizes
_RECORD = struct.Struct("<QQ")  # first byte in the file, length


class RangeWriter:
    """Writes one rank's boxes into existing files of the final size.

    seams: path of the rank's seam file; None if no other rank writes these files.
    """

    def __init__(self, folder: Path, seams: Path | None) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._files: dict[str, RangeFile] = {}
        self._seams = None if seams is None else self._stack.enter_context(_SeamWriter(seams))

    @property
    def handed(self) -> int:
        """Bytes written to the seam file."""
        return 0 if self._seams is None else self._seams.bytes

    def write(self, file: str, entry: TensorEntry, part: Box, box: Box, values: Tensor) -> None:
        """Write a box of a tensor. part: all of the tensor that this rank writes, in one or several calls. values: on
        the CPU, with the box's shape and the file's dtype."""
        assert tuple(values.shape) == box.size and values.dtype == entry.dtype, (file, values.shape, values.dtype)
        values = values.contiguous()
        view, offset = bytes_of(values).data, 0
        ranges = list(islice(runs(entry, part), 2))
        whole_blocks = self._whole_blocks(*ranges[0]) if len(ranges) == 1 else None
        for begin, length in runs(entry, box):
            self._write(file, begin, view[offset : offset + length], whole_blocks or self._whole_blocks(begin, length))
            offset += length

    def _whole_blocks(self, begin: int, length: int) -> tuple[int, int]:
        """(first byte, end) of the blocks that are completely inside a range. If only this rank writes, the full
        range."""
        if self._seams is None:
            return begin, begin + length
        return -(-begin // BLOCK) * BLOCK, (begin + length) // BLOCK * BLOCK

    def _write(self, file: str, begin: int, view: memoryview, whole_blocks: tuple[int, int]) -> None:
        end = begin + len(view)
        first = min(max(begin, whole_blocks[0]), end)
        last = max(min(end, whole_blocks[1]), first)
        if first < last:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(RangeFile(self._folder / file))
            self._files[file].write(view[first - begin : last - begin], first)
        for start, stop in ((begin, first), (last, end)):
            if start < stop:
                assert self._seams is not None
                self._seams.add(file, view[start - begin : stop - begin], start)

    def __enter__(self) -> RangeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                for file in self._files.values():
                    file.fsync()


class _SeamWriter:
    """Writes a seam file. It consists of records (first byte, length, bytes), a JSON list of the positions of the
    records of each shared file, [file, begin, end], and the length of the JSON."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._parts: list[tuple[str, int, int]] = []
        self.bytes = 0

    def add(self, file: str, view: memoryview, offset: int) -> None:
        begin = self._stream.tell()
        self._stream.write(_RECORD.pack(offset, len(view)))
        self._stream.write(view)
        self.bytes += len(view)
        if self._parts and self._parts[-1][0] == file:
            begin = self._parts.pop()[1]
        self._parts.append((file, begin, self._stream.tell()))

    def __enter__(self) -> _SeamWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            index = json.dumps(self._parts).encode()
            self._stream.write(index + len(index).to_bytes(8, "little"))
            self._stream.flush()
            os.fsync(self._stream.fileno())


def join_seams(folder: Path, file: str, seams: Iterable[Path]) -> int:
    """Copy the seam bytes of all ranks into one file, and fsync it. Returns the number of copied bytes.

    Exactly one rank must call this, after every rank's seam file is complete.
    """
    copied = 0
    with RangeFile(folder / file) as opened:
        for path in seams:
            for offset, content in _read_seams(path, file):
                opened.write(memoryview(content), offset)
                copied += len(content)
        opened.fsync()
    return copied


def _read_seams(path: Path, file: str) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as stream:
        end = stream.seek(-8, os.SEEK_END)
        length = int.from_bytes(stream.read(8), "little")
        stream.seek(end - length)
        for name, begin, stop in json.loads(stream.read(length)):
            if name == file:
                stream.seek(begin)
                while stream.tell() < stop:
                    offset, size = _RECORD.unpack(stream.read(_RECORD.size))
                    yield offset, stream.read(size)
