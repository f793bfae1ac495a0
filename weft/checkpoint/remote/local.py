"""Local copies of objects on object stores: for a config, whose URLs are replaced, and for commands that read a run, a
checkpoint or a model.

The new values are of type `LocalCopy`: code reads them as local paths; config.yaml, checkpoints and messages show the
URLs.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from weft.checkpoint.remote.enter import begin_run, fetch_run, resume_run
from weft.checkpoint.remote.layout import BEST, CHECKPOINTS, RemoteRun, name_of
from weft.checkpoint.remote.staging import digest, fetch, locked, resolved, staging_folder
from weft.checkpoint.remote.store import BRIEF, Store, StoreError
from weft.config.paths import check_paths
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.urls import is_url, map_paths, url_problem
from weft.errors import UserError
from weft.terminal import set_display_name

Config = TypeVar("Config", bound=SftConfig | RlConfig)
Run = Literal["new", "resumed"]


def with_local_paths(config: Config, run: Run | None = None, *, dry_run: bool = False) -> Config:
    """The config with all URLs replaced; the same config if it has none.

    run: whether a new or a resumed run begins in run.dir; None if neither. dry_run: fetch models without weights, and
    no data. Raises UserError if a store does not deliver an object, or if the object is of the wrong kind for the key.
    """
    staging = staging_folder(config.run.staging)

    def local(key: str, path: str) -> str:
        if not is_url(path) or (dry_run and key.startswith(("data.", "eval."))):
            return path
        if isinstance(config, RlConfig) and config.cluster.address is not None:
            raise UserError(
                f"{key} {path}: with cluster.address, other machines read this path, too. Copy it to a shared file "
                f"system, and set {key} to its path there."
            )
        return fetch(key, path, staging, weights=not dry_run)

    changed: Config = map_paths(config, local)
    if changed != config and (problems := check_paths(changed, weights=not dry_run)):
        raise UserError("\n".join(problems))
    if run is None or dry_run or not is_url(config.run.dir):
        return changed
    url, command = str(config.run.dir), config.command
    if run == "resumed":
        folder = resume_run(url, staging)
    else:
        folder = begin_run(url, staging, overwrite=config.run.overwrite, command=command)
    return replace(changed, run=replace(config.run, dir=folder))


def local_path(
    command: str, path: str, *, step: int | None = None, best: bool = False, records: bool = False, output: bool = True
) -> str:
    """The path itself; for a URL, the path of a local copy, which for a run has its records and its newest checkpoint.

    command: the command, for messages. step, best: fetch only this checkpoint of a run. records: also fetch rollouts
    and evaluations. output: False if the command would write next to its input; then a URL is an error. Raises
    UserError.
    """
    if not is_url(path):
        return path
    if problem := url_problem(command, path):
        raise UserError(problem)
    if not output:
        raise UserError(
            f"{command} {path}: the output would go next to a copy on this machine. Set --output to a path."
        )
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
            raise UserError(
                f"{command} {url}: it has no `best`, because the run was trained without checkpoint.keep_best=true."
            )
    if step not in steps:
        raise UserError(f"{command} {url}: it has checkpoints of steps {', '.join(map(str, steps)) or 'none'}.")
    return f"{url}/{CHECKPOINTS}/{name_of(step)}"


def _run(remote: RemoteRun, url: str, staging: Path, records: bool) -> str:
    objects = remote.store.list()
    marks = (f"{name} {entry.size} {entry.mark}" for name, entry in objects.items())
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
