"""Local folders for objects on object stores: copies of data and models, and run folders.

    STAGING/copies/DIGEST/NAME     a copy of a file, or of the files of a folder or a pattern
    STAGING/runs/NAME-DIGEST       the run folder of a run whose run.dir is a URL
    STAGING/locks/...              locks: one process of the machine fetches while others wait

A copy's DIGEST is computed from the URL and from the names, sizes and etags (or times) of the objects. So weft
downloads objects once, and again only when they have changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from weft.checkpoint.remote.layout import BEST, CHECKPOINTS, COMPLETE, CRITIC, LATEST, RemoteRun, name_of
from weft.checkpoint.remote.store import BRIEF, Store, StoredObject, StoreError
from weft.checkpoint.retention import TRAINER_STATE
from weft.config.sources import is_pattern
from weft.config.urls import LocalCopy
from weft.errors import UserError
from weft.terminal import byte_count, say, set_display_name

DEFAULT = "~/.cache/weft/remote"
# Parts of a checkpoint that a model does not need.
_NOT_OF_MODELS = (f"{TRAINER_STATE}/", f"{CRITIC}/", COMPLETE)


def staging_folder(named: str | None) -> Path:
    """The absolute path of run.staging (`named`), or the default path if None."""
    return Path(named or DEFAULT).expanduser().absolute()


def run_folder(url: str, staging: Path) -> LocalCopy:
    """The local folder of a run on a store; messages show its URL instead. Creates nothing."""
    url = url.rstrip("/")
    name = Path(urlsplit(url).path).name or urlsplit(url).netloc
    folder = LocalCopy(str(staging / "runs" / f"{name}-{digest(url)}"), url)
    set_display_name(str(folder), url)
    return folder


def fetch(key: str, url: str, staging: Path, *, weights: bool = True, state: bool = False) -> LocalCopy:
    """Downloads the file, the folder, or the files of a pattern that a URL names, if they have changed. Returns the
    local path.

    key: the config key, for messages. weights, state: whether to download a model's weights, and a checkpoint's trainer
    state and critic. Raises UserError if the URL does not exist, or the store does not deliver it.
    """
    try:
        base, pattern, objects = _look(url, weights, state)
    except StoreError as error:
        raise UserError(f"{key} {url} cannot be read: {error}.") from error
    if not objects:
        raise UserError(f"{key} {url} does not exist, or it contains nothing that can be listed.")
    folder = staging / "copies" / digest(base, *(f"{n} {e.size} {e.mark}" for n, e in objects.items()))
    set_display_name(str(folder), base.rpartition("/")[0] if not pattern else base)
    inner = folder if pattern else folder / base.rpartition("/")[2]
    with locked(staging, folder.name):
        if not folder.is_dir():
            _copy(key, url, Store(base, BRIEF), objects, folder, inner)
    return LocalCopy(str(inner / pattern if pattern else inner), url)


def _look(url: str, weights: bool, state: bool) -> tuple[str, str, dict[str, StoredObject]]:
    """(URL of a folder, the file name or pattern in it, the objects to download by name). For a URL of a folder, the
    second is ""."""
    scheme, _, path = url.rstrip("/").partition("://")
    if is_pattern(path):
        parts = path.split("/")
        first = next(number for number, part in enumerate(parts) if any(letter in part for letter in "*?["))
        base, pattern = f"{scheme}://{'/'.join(parts[:first])}", "/".join(parts[first:])
        return base, pattern, Store(base, BRIEF).match(pattern)
    url = resolved(f"{scheme}://{path}")
    above, _, name = url.rpartition("/")
    if "/" in path and (entry := Store(above, BRIEF).entry(name)) is not None:
        return above, name, {name: entry}
    objects = Store(url, BRIEF).list()
    selected = {name: entry for name, entry in objects.items() if state or not name.startswith(_NOT_OF_MODELS)}
    return url, "", {n: e for n, e in selected.items() if weights or not n.endswith((".safetensors", ".bin", ".pt"))}


def resolved(url: str) -> str:
    """The URL of a checkpoint for RUN/checkpoints/latest (or best); any other URL unchanged."""
    for link in (LATEST, BEST):
        run, separator, suffix = url.rstrip("/").partition(f"/{link}")
        if separator and not suffix:
            step = RemoteRun(Store(run, BRIEF)).named(link)
            return url if step is None else f"{run}/{CHECKPOINTS}/{name_of(step)}"
    return url


def _copy(key: str, url: str, store: Store, objects: Mapping[str, StoredObject], folder: Path, inner: Path) -> None:
    began, partial = time.perf_counter(), folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        for name, entry in objects.items():
            if ".." in name.split("/"):
                raise StoreError(f"{store.url}/{name}: the name points outside its folder")
            target = partial / inner.relative_to(folder) / name
            store.get(name, target)
            if target.stat().st_size != entry.size:
                raise StoreError(f"{store.url}/{name}: {target.stat().st_size} of {entry.size} bytes received")
        os.rename(partial, folder)
    except (StoreError, FileNotFoundError) as error:
        raise UserError(f"{key} {url} cannot be fetched: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = byte_count(sum(entry.size for entry in objects.values()))
    say(f"fetched  {url}: {len(objects)} files, {size} in {time.perf_counter() - began:.1f} s")


@contextmanager
def locked(staging: Path, name: str) -> Iterator[None]:
    """A lock: one process of the machine at a time runs in this context. The kernel releases the lock when the process
    ends. Raises UserError if the folder of locks cannot be written."""
    folder = staging / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / name).open("a")
    except OSError as error:
        raise UserError(
            f"run.staging: {staging} cannot be used ({error.strerror}). Set run.staging to another folder."
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def digest(*parts: str) -> str:
    """A folder name derived from `parts`."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
