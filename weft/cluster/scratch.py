"""Scratch folders in the temporary directory, removed at the end of their context. The next start removes those of
killed processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "weft-"
_LOCK = "in-use"  # a file that is locked by those who use the folder


@contextmanager
def scratch_folder(kind: str = "", base: str | None = None) -> Iterator[Path]:
    """A folder that only this user can read, removed with the context. kind: prefix of its name. base: its parent, if
    not the temporary directory."""
    base = base or tempfile.gettempdir()
    remove_abandoned(base)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}", dir=base))
    unlocked = folder / f"{_LOCK}.new"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unlocked.rename(folder / _LOCK)  # nobody sees it before it is locked
        yield folder
    finally:
        _remove(folder)
        os.close(descriptor)


def remove_abandoned(base: str) -> None:
    """Remove folders whose users are gone: nobody holds their lock."""
    for folder in Path(base).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder; retry for two seconds, because processes that are ending may still write to it."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
