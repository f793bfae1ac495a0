"""Creates the local folder of a run on an object store before the ranks start: empty, or with the files to resume.

One process per machine does this. STAGING/runs/X/.writer.json and URL/writer.json contain the same token as long as the
local folder has every file of the store. If another machine wrote last, weft renames the local folder and fetches the
run again.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.checkpoint.remote.layout import (
    BEST,
    CHECKPOINTS,
    COMPLETE,
    CRITIC,
    TOKEN,
    WRITER,
    Manifest,
    RemoteRun,
    name_of,
)
from weft.checkpoint.remote.staging import locked, run_folder
from weft.checkpoint.remote.store import BRIEF, Store, StoreError
from weft.checkpoint.retention import commit, complete_steps, point_best, point_latest, step_folder
from weft.config.urls import LocalCopy, url_problem
from weft.errors import UserError
from weft.launch.scratch import scratch_folder
from weft.terminal import byte_count, say

_RECORDS = ("rollouts/", "evaluations/")


def begin_run(url: str, staging: Path, *, overwrite: bool, command: str) -> LocalCopy:
    """The local folder of a new run. Raises UserError if the store cannot be written or already holds a run. command:
    weft's command, for messages."""
    folder = run_folder(url, staging)
    with _store_errors("run.dir", url), locked(staging, Path(folder).name):
        remote = RemoteRun(Store(url, BRIEF))
        if not overwrite and remote.holds_a_run():
            raise UserError(
                f"run.dir: {url} already contains a run. Set run.dir to another URL, set run.overwrite=true to remove "
                f"that run, or resume it: weft {command} --resume {url}"
            )
        if not _is_ours(remote, Path(folder)):
            _put_aside(Path(folder))
            _claim(remote, Path(folder))
    return folder


@contextmanager
def fetched_config(url: str) -> Iterator[Path]:
    """Yields a temporary folder with the config.yaml of a run on a store, for `--resume`. Raises UserError."""
    if problem := url_problem("--resume", url):
        raise UserError(problem)
    with _store_errors("--resume", url):
        content = Store(url, BRIEF).read("config.yaml")
    if content is None:
        raise UserError(
            f"--resume {url}: no config.yaml there, so it is not the folder of a run. Pass the run's run.dir."
        )
    with scratch_folder("config-") as folder:
        (folder / "config.yaml").write_bytes(content)
        yield folder


def resume_run(url: str, staging: Path) -> LocalCopy:
    """The local folder of a resumed run, with every file that resuming needs. Fetches the run unless this machine has
    the newest state. Raises UserError."""
    folder = run_folder(url, staging)
    with _store_errors("--resume", url), locked(staging, Path(folder).name):
        remote, local = RemoteRun(Store(url, BRIEF)), Path(folder)
        newest = max(remote.steps(), default=0)
        if not _is_ours(remote, local) or max(complete_steps(local / CHECKPOINTS), default=0) < newest:
            scratch = local.with_name(f"{local.name}.fetching")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            fetch_run(remote, scratch, resumable=True)
            _put_aside(local)
            os.rename(scratch, local)
            _claim(remote, local)
    return folder


def _is_ours(remote: RemoteRun, folder: Path) -> bool:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return own_token(folder) == remote.writer()
    return False


def own_token(folder: Path) -> str:
    """The writer token of a local folder."""
    return str(json.loads((folder / TOKEN).read_text(encoding="utf-8"))["token"])


def _claim(remote: RemoteRun, folder: Path) -> None:
    token = uuid.uuid4().hex
    remote.claim(token, {"host": socket.gethostname(), "pid": os.getpid()})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKEN).write_text(json.dumps({"token": token}), encoding="utf-8")


def _put_aside(folder: Path) -> None:
    """Renames the local folder of an earlier run of this URL that does not match the store. Removes a folder without
    results."""
    if not folder.is_dir():
        return
    if not any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "rollouts")):
        shutil.rmtree(folder)
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    os.rename(folder, aside)
    say(f"aside    another machine wrote to this run later; this machine's copy is now {aside}", as_is=True)


# ---------------------------------------------------------------- fetching


def fetch_run(remote: RemoteRun, folder: Path, *, resumable: bool, records: bool = False) -> None:
    """Downloads the records of a run, its newest complete checkpoint, and its `best` checkpoint.

    resumable: download the newest checkpoint with trainer state. records: also download rollouts and evaluations, which
    may be large; without a checkpoint, they are always downloaded.
    """
    names, steps = remote.store.list(), remote.steps()
    top_level = (name for name in names if "/" not in name and name != WRITER)
    record_names = (name for name in names if name.startswith(_RECORDS) and (records or not steps))
    for name in [*top_level, *record_names]:
        remote.store.get(name, folder / name)
    newest = _newest(remote, steps, folder, lambda manifest: manifest.resumable or not resumable)
    if newest is not None:
        point_latest(step_folder(folder / CHECKPOINTS, newest))
    best = remote.named(BEST)
    if best in steps and best is not None:
        if best != newest:
            _newest(remote, [best], folder, lambda manifest: True)
        if best in complete_steps(folder / CHECKPOINTS):
            point_best(step_folder(folder / CHECKPOINTS, best))


def _newest(remote: RemoteRun, steps: list[int], folder: Path, serves: Callable[[Manifest], bool]) -> int | None:
    for step in reversed(steps):
        manifest = remote.manifest(step)
        if manifest is None or not serves(manifest):
            continue
        try:
            _fetch_checkpoint(remote, manifest, folder)
        except (StoreError, FileNotFoundError) as error:
            say(f"skipped  {remote.store.url}/{CHECKPOINTS}/{name_of(step)}: {error}")
            continue
        return step
    return None


def _fetch_checkpoint(remote: RemoteRun, manifest: Manifest, folder: Path) -> None:
    """Downloads a checkpoint. The folder gets its final name only when it is complete."""
    began, scratch = time.perf_counter(), folder / "fetching"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        remote.download(manifest, scratch)
        for inner in (f"{CRITIC}/{CHECKPOINTS}", CHECKPOINTS):
            folder_of_step = scratch / inner / name_of(manifest.step)
            if folder_of_step.is_dir():
                (folder / inner).mkdir(parents=True, exist_ok=True)
                commit(folder_of_step, folder / inner / folder_of_step.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    size = byte_count(sum(size for size, _ in manifest.files.values()))
    say(f"fetched  {remote.store.url}/{CHECKPOINTS}/{name_of(manifest.step)}: {size} in "
        f"{time.perf_counter() - began:.1f} s; matches its {COMPLETE}")  # fmt: skip


@contextmanager
def _store_errors(key: str, url: str) -> Iterator[None]:
    """A context that turns errors of the store into UserErrors about `key`, a config key or an option."""
    try:
        yield
    except (StoreError, FileNotFoundError) as error:
        raise UserError(f"{key}: {url} cannot be used: {error}.") from error
