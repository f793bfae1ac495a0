"""Replaces URLs of object stores in a config by local copies; recipes get the resulting config.

The new values are `LocalCopy`s: code reads them as local paths; config.yaml, checkpoints and messages show the URLs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar

from weft.checkpoint.remote.enter import begin_run, resume_run
from weft.checkpoint.remote.staging import fetch, staging_folder
from weft.config.paths import check_paths
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.urls import is_url, map_paths
from weft.errors import UserError

Config = TypeVar("Config", SftConfig, RlConfig)
Run = Literal["new", "resumed"]


def with_local_paths(config: Config, run: Run | None = None, *, dry_run: bool = False) -> Config:
    """The config with all URLs replaced; the same config if it has none.

    run: whether a new or a resumed run is about to begin in run.dir; None if neither. dry_run: fetch the models without
    weights, and no data. Raises UserError if a store does not deliver an object, or its kind does not fit the key.
    """
    staging = staging_folder(config.run.staging)

    def local(key: str, path: str) -> str:
        if not is_url(path) or (dry_run and key.startswith(("data.", "eval."))):
            return path
        if isinstance(config, RlConfig) and config.cluster.address is not None:
            raise UserError(
                f"{key} {path}: with cluster.address other machines read it, too: put it on a file system that they "
                "share, and name its path there."
            )
        return fetch(key, path, staging, weights=not dry_run)

    changed: Config = map_paths(config, local)
    if changed != config and (problems := check_paths(changed, weights=not dry_run)):
        raise UserError("\n".join(problems))
    if run is None or dry_run or not is_url(config.run.dir):
        return changed
    url, command = str(config.run.dir), "rl" if isinstance(config, RlConfig) else "sft"
    if run == "resumed":
        folder = resume_run(url, staging)
    else:
        folder = begin_run(url, staging, overwrite=config.run.overwrite, command=command)
    return replace(changed, run=replace(config.run, dir=folder))
