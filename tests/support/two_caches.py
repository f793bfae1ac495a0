"""A stand-in for clients of a network file system whose page caches do not see one another.

It takes the place of `os` in weft/parallel/shards/safetensors_files.py. Of a file that is open for writing it reads
each page at the first touch, changes it in its cache, and writes the whole page back at fsync or close: what a client
may do that knows only whole pages. What others have written into a page meanwhile is lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CacheClient:
    """One process's. meet: called once, before the first page of all is written back: every client has read by then
    whatever it is going to change, which is the worst that may happen."""

    def __init__(self, page: int, meet: Callable[[], None]) -> None:
        self.page, self._meet, self._met = page, meet, False
        self._pages: dict[int, dict[int, bytearray]] = {}  # of each descriptor for writing
        self.read_back = 0  # pages that were read in order to change them

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        descriptor = os.open(path, flags & ~os.O_ACCMODE | os.O_RDWR if writes else flags, mode)
        if writes:
            self._pages[descriptor] = {}
        return descriptor

    def pwrite(self, descriptor: int, view: memoryview, offset: int) -> int:
        number, start = divmod(offset, self.page)
        pages = self._pages[descriptor]
        if number not in pages:
            pages[number] = bytearray(os.pread(descriptor, self.page, number * self.page))
            self.read_back += 1
        count = min(len(view), self.page - start)
        pages[number][start : start + count] = view[:count]
        return count

    def fsync(self, descriptor: int) -> None:
        self._write_back(descriptor)
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        if descriptor in self._pages:
            self._write_back(descriptor)
            del self._pages[descriptor]
        os.close(descriptor)

    def _write_back(self, descriptor: int) -> None:
        pages = self._pages.get(descriptor)
        if not pages:
            return
        if not self._met:
            self._meet()
            self._met = True
        for number, content in pages.items():
            os.pwrite(descriptor, content, number * self.page)
        pages.clear()


def meeting(folder: Path, rank: int, world: int) -> Callable[[], None]:
    """Waits in `folder`, which is there, until all ranks are at it; no collective, since a thread calls it."""

    def meet() -> None:
        (folder / str(rank)).touch()
        deadline = time.monotonic() + 20
        while len(list(folder.iterdir())) < world:
            assert time.monotonic() < deadline, "the other ranks have written nothing"
            time.sleep(0.01)

    return meet
