"""Local copies of runs, checkpoints and models on an object store, for commands that read them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from weft.checkpoint.remote.enter import fetch_run
from weft.checkpoint.remote.layout import BEST, CHECKPOINTS, RemoteRun, name_of
from weft.checkpoint.remote.staging import digest, fetch, locked, resolved, staging_folder
from weft.checkpoint.remote.store import BRIEF, Store, StoreError
from weft.config.urls import is_url, url_problem
from weft.errors import UserError
from weft.terminal import set_display_name


def local_path(
    command: str, path: str, *, step: int | None = None, best: bool = False, records: bool = False, output: bool = True
) -> str:
    """The path itself, or for a URL the path of its local copy; of a run, its records and its newest checkpoint.

    command: the command, for messages. step, best: fetch only this checkpoint of a run. records: fetch rollouts and
    evaluations, too. output: False if the command would write beside its input; then a URL is an error. Raises
    UserError.
    """
    if not is_url(path):
        return path
    if problem := url_problem(command, path):
        raise UserError(problem)
    if not output:
        raise UserError(f"{command} {path}: what it writes would go to a copy on this machine: name it with --output.")
    staging = staging_folder(None)
    try:
        url = resolved(path.rstrip("/"))
        if step is not None or best:
            return fetch(command, _checkpoint(command, url, step), staging, state=True)
        remote = RemoteRun(Store(url, BRIEF))
        if remote.store.read("config.yaml") is None:
            return fetch(command, url, staging, state=True)
        return _run(remote, url, staging, records)
    except (StoreError, FileNotFoundError) as error:
        raise UserError(f"{command} {path} cannot be read: {error}.") from error


def _checkpoint(command: str, url: str, step: int | None) -> str:
    remote = RemoteRun(Store(url, BRIEF))
    steps = remote.steps()
    if step is None:
        step = remote.named(BEST)
        if step is None:
            raise UserError(f"{command} {url}: it has no `best`: the run had no checkpoint.keep_best=true.")
    if step not in steps:
        raise UserError(f"{command} {url}: it has checkpoints of steps {', '.join(map(str, steps)) or 'none'}.")
    return f"{url}/{CHECKPOINTS}/{name_of(step)}"


def _run(remote: RemoteRun, url: str, staging: Path, records: bool) -> str:
    there = remote.store.list()
    marks = (f"{name} {entry.size} {entry.mark}" for name, entry in there.items())
    folder = staging / "copies" / digest(url, str(records), *marks) / url.rpartition("/")[2]
    set_display_name(str(folder), url)
    with locked(staging, folder.parent.name):
        if not folder.is_dir():
            partial = folder.parent.with_name(f"{folder.parent.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            (partial / folder.name).mkdir(parents=True)
            fetch_run(remote, partial / folder.name, resumable=False, records=records)
            os.rename(partial, folder.parent)
    return str(folder)
