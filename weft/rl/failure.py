"""The report of a failed run of `weft rl`: evidence, what is left of the run, and how to resume."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from weft.cluster.failures import describe_what_is_left
from weft.cluster.rays import ActorGroup
from weft.cluster.status import kind_of
from weft.errors import ActorError, StorageError


@contextmanager
def report_failures(folder: Path, groups: Mapping[str, ActorGroup], again: str) -> Iterator[None]:
    """Inside, after an actor's failure, the evidence of all actors is written to RUN, and the error gets a note with
    the command that resumes. A file that cannot be written becomes a StorageError.

    groups: actor groups by the subfolder of RUN for their evidence. again: the command that resumes.
    """
    try:
        yield
    except ActorError as error:
        for name, group in groups.items():
            group.keep_evidence(folder / name)
        if error.kind != "user":
            error.add_note(describe_what_is_left(str(folder)).strip() + f"\nGo on with: {again}")
        raise
    except OSError as error:
        if kind_of(error, str(folder)) != "storage":
            raise
        raise StorageError(_said(error, folder, again)) from error


def _said(error: OSError, folder: Path, again: str) -> str:
    where = f"{error.filename}: " if error.filename else ""
    latest, stands = folder / "checkpoints" / "latest", ""
    if latest.exists():
        stands = f" The last whole checkpoint is {latest.parent / os.readlink(latest)}."
    return (
        f"could not write {where}{error.strerror or error}. The storage is full, read-only or gone: look at `df -h` "
        f"and at the folder.{stands} Then go on: {again}"
    )
