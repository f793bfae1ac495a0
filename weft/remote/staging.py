"""Folders of this machine for what lies on object stores: copies of data and models, and the folders of runs.

    STAGING/copies/DIGEST/NAME     a file, or the files of a folder or a pattern, as they were then
    STAGING/runs/NAME-DIGEST       the run folder of a run whose run.dir is a URL
    STAGING/locks/...              held while one process of the machine fetches, and others wait

DIGEST is of the URL and of names, sizes and etags (or times), so that a copy is made once, and anew where a store has
something else.
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

from weft.checkpoint.retention import TRAINER_STATE
from weft.config.sources import is_pattern
from weft.config.urls import LocalCopy
from weft.errors import UserError
from weft.remote.layout import BEST, CHECKPOINTS, COMPLETE, CRITIC, LATEST, RemoteRun, name_of
from weft.remote.store import BRIEF, Entry, Store, StoreError
from weft.terminal import byte_count, say, set_display_name

DEFAULT = "~/.cache/weft/remote"
# Of a checkpoint, what a model that is trained or run from it does not need.
_NOT_OF_MODELS = (f"{TRAINER_STATE}/", f"{CRITIC}/", COMPLETE)


def staging_folder(named: str | None) -> Path:
    """run.staging, or its default."""
    return Path(named or DEFAULT).expanduser().absolute()


def run_folder(url: str, staging: Path) -> LocalCopy:
    """The folder on this machine of a run on a store; messages call it by its URL."""
    url = url.rstrip("/")
    name = Path(urlsplit(url).path).name or urlsplit(url).netloc
    folder = LocalCopy(str(staging / "runs" / f"{name}-{digest(url)}"), url)
    set_display_name(str(folder), url)
    return folder


def fetch(key: str, url: str, staging: Path, *, weights: bool = True, state: bool = False) -> LocalCopy:
    """Download the file, the folder, or the files of a pattern that a URL names; the local path.

    key: the config key, for messages. weights, state: whether to download a model's weights and a checkpoint's trainer
    state, too. UserError where there is nothing, or the store does not deliver it.
    """
    try:
        base, rest, found = _look(url, weights, state)
    except StoreError as error:
        raise UserError(f"{key} {url} cannot be read: {error}.") from error
    if not found:
        raise UserError(f"{key} {url} does not exist, or nothing that can be listed lies there.")
    folder = staging / "copies" / digest(base, *(f"{n} {e.size} {e.mark}" for n, e in found.items()))
    set_display_name(str(folder), base.rpartition("/")[0] if not rest else base)
    inner = folder if rest else folder / base.rpartition("/")[2]
    with locked(staging, folder.name):
        if not folder.is_dir():
            _copy(key, url, Store(base, BRIEF), found, folder, inner)
    return LocalCopy(str(inner / rest if rest else inner), url)


def _look(url: str, weights: bool, state: bool) -> tuple[str, str, dict[str, Entry]]:
    """(URL of a folder or of a file, what is to be named in that folder, the objects in it by name; "" of a file)."""
    scheme, _, path = url.rstrip("/").partition("://")
    if is_pattern(path):
        parts = path.split("/")
        first = next(number for number, part in enumerate(parts) if any(letter in part for letter in "*?["))
        base, rest = f"{scheme}://{'/'.join(parts[:first])}", "/".join(parts[first:])
        return base, rest, Store(base, BRIEF).match(rest)
    url = resolved(f"{scheme}://{path}")
    above, _, name = url.rpartition("/")
    if "/" in path and (entry := Store(above, BRIEF).entry(name)) is not None:
        return above, name, {name: entry}
    found = Store(url, BRIEF).list()
    wanted = {name: entry for name, entry in found.items() if state or not name.startswith(_NOT_OF_MODELS)}
    return url, "", {n: e for n, e in wanted.items() if weights or not n.endswith((".safetensors", ".bin", ".pt"))}


def resolved(url: str) -> str:
    """The checkpoint's URL for RUN/checkpoints/latest (or best); other URLs as they are."""
    for link in (LATEST, BEST):
        run, found, rest = url.rstrip("/").partition(f"/{link}")
        if found and not rest:
            step = RemoteRun(Store(run, BRIEF)).named(link)
            return url if step is None else f"{run}/{CHECKPOINTS}/{name_of(step)}"
    return url


def _copy(key: str, url: str, store: Store, found: Mapping[str, Entry], folder: Path, inner: Path) -> None:
    began, partial = time.perf_counter(), folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        for name, entry in found.items():
            if ".." in name.split("/"):
                raise StoreError(f"{store.url}/{name}: leads out of its folder")
            target = partial / inner.relative_to(folder) / name
            store.get(name, target)
            if target.stat().st_size != entry.size:
                raise StoreError(f"{store.url}/{name}: gave {target.stat().st_size} of {entry.size} bytes")
        os.rename(partial, folder)
    except (StoreError, FileNotFoundError) as error:
        raise UserError(f"{key} {url} cannot be fetched: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = byte_count(sum(entry.size for entry in found.values()))
    say(f"fetched  {url}: {len(found)} files, {size} in {time.perf_counter() - began:.1f} s")


@contextmanager
def locked(staging: Path, name: str) -> Iterator[None]:
    """Inside, no other process of the machine is in the body; the kernel releases the lock when this process ends."""
    folder = staging / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / name).open("a")
    except OSError as error:
        raise UserError(
            f"run.staging: {staging} cannot be used ({error.strerror}): set it to another folder."
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def digest(*parts: str) -> str:
    """A folder name derived from `parts`."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
