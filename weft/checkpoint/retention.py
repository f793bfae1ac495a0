"""RUN/checkpoints: names, atomic commits, the links `latest` and `best`, and retention.

A folder is named step-000100 only while it is complete: it is written as step-000100.partial, and renamed to
step-000100.removing before its first file is deleted. Only one process (the first rank) calls these functions.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from weft.errors import UserError
from weft.files import read_object

TRAINER_STATE = "trainer_state"
STATE_FILE = "state.json"
_COMPLETE = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"(step-\d{6,}|trainer_state)\.(partial|removing|ranks-\w+(\.over)?)|(latest|best)\.new")


def step_folder(checkpoints: Path, step: int) -> Path:
    """checkpoints/step-000100."""
    return checkpoints / f"step-{step:06d}"


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    if not checkpoints.is_dir():
        return []
    matches = (_COMPLETE.fullmatch(entry.name) for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def ranks_of(run: Path) -> int | None:
    """Number of ranks that wrote the newest checkpoint that records this number; None if there is none."""
    checkpoints = run / "checkpoints"
    for step in reversed(complete_steps(checkpoints)):
        with suppress(UserError):
            state = read_object(step_folder(checkpoints, step) / TRAINER_STATE / STATE_FILE, "the state of a trainer")
            mesh = state.get("mesh")
            world = mesh.get("world") if isinstance(mesh, dict) else None
            if isinstance(world, int) and world > 0:
                return world
    return None


def commit(partial: Path, target: Path) -> None:
    """Rename a complete folder to its final name, durably. An existing folder of that name is renamed first."""
    for path in [partial, *partial.rglob("*")]:
        _sync(path)
    removing = _removing(target)
    if target.exists():
        shutil.rmtree(removing, ignore_errors=True)
        os.rename(target, removing)
    os.rename(partial, target)
    _sync(target.parent)
    shutil.rmtree(removing, ignore_errors=True)


def point_latest(target: Path) -> None:
    """Atomically point the relative link `latest`, next to a checkpoint, at it."""
    _point("latest", target)


def point_best(target: Path) -> None:
    """Atomically point the relative link `best`, next to a checkpoint, at it."""
    _point("best", target)


def _point(name: str, target: Path) -> None:
    link, draft = target.parent / name, target.parent / f"{name}.new"
    if link.is_symlink() and os.readlink(link) == target.name:
        return
    draft.unlink(missing_ok=True)
    draft.symlink_to(target.name)
    os.replace(draft, link)
    _sync(target.parent)


def forget_best(checkpoints: Path) -> None:
    """Remove the link `best`. Its checkpoint is then subject to retention like any other."""
    (checkpoints / "best").unlink(missing_ok=True)


def best_step(checkpoints: Path) -> int | None:
    """The step that `best` points at; None if that checkpoint is not complete."""
    link = checkpoints / "best"
    match = _COMPLETE.fullmatch(os.readlink(link)) if link.is_symlink() and link.is_dir() else None
    return None if match is None else int(match[1])


def prune(
    checkpoints: Path, *, keep: int | None, keep_every: int | None, trainer_state: Literal["all", "last", "none"]
) -> None:
    """Remove checkpoints that retention does not keep, and old trainer state. Never removes the newest checkpoint or
    `best`."""
    best = best_step(checkpoints)
    for step in superseded(complete_steps(checkpoints), keep, keep_every):
        if step != best:
            remove(step_folder(checkpoints, step))
    if trainer_state == "last":
        for step in complete_steps(checkpoints)[:-1]:
            folder = step_folder(checkpoints, step)
            for state in [
                folder / TRAINER_STATE,
                *folder.glob(f"*/{TRAINER_STATE}"),
            ]:  # the critic has a separate folder
                remove(state)


def chosen_step(checkpoints: Path, path: object, step: int) -> Path:
    """The checkpoint of --step. path: the run as the user named it. Raises UserError if the run has no checkpoint of
    that step."""
    steps = complete_steps(checkpoints)
    if step not in steps:
        raise UserError(f"--step {step}: {path} has checkpoints of steps {', '.join(map(str, steps))}.")
    return step_folder(checkpoints, step)


def superseded(steps: Sequence[int], keep: int | None, keep_every: int | None) -> list[int]:
    """Those of the ascending `steps` that retention does not keep."""
    older = steps[:-keep] if keep is not None else []
    return [step for step in older if keep_every is None or step % keep_every]


def remove(folder: Path) -> None:
    """Rename a folder, then remove it, so that a kill leaves no partial folder under its name."""
    if not folder.exists():
        return
    removing = _removing(folder)
    shutil.rmtree(removing, ignore_errors=True)
    os.rename(folder, removing)
    shutil.rmtree(removing, ignore_errors=True)


def _removing(folder: Path) -> Path:
    return folder.with_name(folder.name + ".removing")


def sweep(checkpoints: Path) -> None:
    """Remove incomplete folders of killed processes, and point `latest` at the newest complete checkpoint."""
    for entry in checkpoints.iterdir() if checkpoints.is_dir() else []:
        inside = [*entry.iterdir(), *entry.glob("*/*")] if _COMPLETE.fullmatch(entry.name) else []
        for leftover in [entry, *inside]:
            if _LEFTOVER.fullmatch(leftover.name):
                shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
    steps = complete_steps(checkpoints)
    if steps:
        point_latest(step_folder(checkpoints, steps[-1]))


def set_aside(checkpoints: Path, after: int) -> list[str]:
    """Rename checkpoints of steps later than `after`, which the run will write again; returns the new names."""
    names = []
    for step in complete_steps(checkpoints):
        if step > after:
            folder, number = step_folder(checkpoints, step), 1
            while (aside := folder.with_name(f"{folder.name}.aside-{number}")).exists():
                number += 1
            os.rename(folder, aside)
            names.append(aside.name)
    return names


def _sync(path: Path) -> None:
    """fsync a file or a folder (its list of names), so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
