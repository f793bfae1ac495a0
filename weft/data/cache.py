"""A content-addressed cache of tokens on disk: all ranks of a machine and later runs share one tokenisation."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from weft.data import table as tables
from weft.data.places import MediaLocation
from weft.data.sources import SourcePart
from weft.data.table import Chunk, DamagedTableError, TokenTable
from weft.errors import StorageError
from weft.launch import flight
from weft.version import __version__

if TYPE_CHECKING:
    from weft.data.tokenise import TokeniseTask

_SECONDS = 0.2  # between two attempts to take a lock
_LOOKING = 16  # threads that stat image files


def key(part: SourcePart, work: TokeniseTask) -> str | None:
    """Digest of everything that the tokens depend on: the bytes of the data, how rows are parsed, the tokenizer, the
    code. None if the data have no digest or the tokenizer is not a fast one: such tokens are not cached."""
    tokenizer = work.tokenizer
    if part.digest is None or not tokenizer.is_fast:
        return None
    said = [
        part.digest(), str(part.by_line), repr(work.reading),
        type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template),
        str(sorted(tokenizer.special_tokens_map.items())), repr(work.encoding),
        version("tokenizers"), version("transformers"), __version__, _code(), *_of_images(part, work),
    ]  # fmt: skip
    return hashlib.blake2b("\0".join(said).encode(), digest_size=16).hexdigest()


def _of_images(part: SourcePart, work: TokeniseTask) -> list[str]:
    """What the tokens and places of images depend on besides the rows. It has the path of the data, because image paths
    in rows are relative to it."""
    images = work.images
    if images is None:
        return []
    return [images.settings, images.problem, str(images.template), repr(images.checks), os.path.abspath(part.origin)]


def table(folder: str, name: str, part: SourcePart, chunks: Callable[[], Generator[Chunk]]) -> TokenTable:
    """The table `name` of a cache folder. The first process to ask builds it from `chunks`; other processes wait. A
    damaged table is built again: a crash may lose recent writes. Raises StorageError if the folder cannot be used."""
    root = Path(folder).expanduser() / "tokens"
    kept = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        found = _whole(kept, part)
        if found is None:
            with _locked(root / f"{name}.lock"):
                found = _whole(kept, part)
                if found is None:
                    _make(kept, chunks)
                    found = tables.read(kept, part.origin, part.by_line)
        return found
    except OSError as error:
        raise StorageError(
            f"data.cache: {root} cannot be used: {error.strerror or error}. Set data.cache to a folder on a disk with "
            "room, or to null, to keep nothing."
        ) from error


def _whole(kept: Path, part: SourcePart) -> TokenTable | None:
    """The cached table; None if it is missing, damaged, or refers to image files that have changed since."""
    try:
        found = tables.read(kept, part.origin, part.by_line) if kept.is_dir() else None
    except DamagedTableError:
        return None
    if found is None or not found.images.any():
        return found
    with ThreadPoolExecutor(_LOOKING) as pool:  # stat mostly waits for the file system
        return found if all(pool.map(MediaLocation.is_as_it_was, found.image_files())) else None


def _make(kept: Path, chunks: Callable[[], Generator[Chunk]]) -> None:
    """Build and publish a table. The caller holds its lock, so any partial folder found here was abandoned."""
    for given_up in kept.parent.glob(f"{kept.name}.*.partial"):
        shutil.rmtree(given_up, ignore_errors=True)
    partial = kept.with_name(f"{kept.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        with closing(chunks()) as made:
            tables.write(partial, made)
        shutil.rmtree(kept, ignore_errors=True)
        partial.rename(kept)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of one table. The kernel releases the lock when its holder exits, even by a crash."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                flight.beat()
                time.sleep(_SECONDS)
        yield


@cache
def _code() -> str:
    """Digest of the source files of weft.data, which read and tokenise."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.is_file() and path.suffix in (".py", ".jinja"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
