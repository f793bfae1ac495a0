"""The files of a checkpoint under other names, so that an upload can go on when the checkpoint is removed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from weft.checkpoint.retention import TRAINER_STATE

# Of a checkpoint: what resuming takes, what is compared with, and what is trained beside the model.
_OWN = (TRAINER_STATE, "digests.json", "critic", ".cache", ".git")


def files_of_model(checkpoint: Path) -> list[Path]:
    """The files that a user of the model needs: all but weft's own, relative to the folder."""
    files = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    return sorted(path for path in files if path.parts[0] not in _OWN)


def link_files(folder: Path, files: Iterable[Path], into: Path) -> None:
    """Hard links, which cost nothing, and stay when the folder goes; symbolic ones where the file system has none.

    Raises FileNotFoundError where a file is gone already.
    """
    into.mkdir(parents=True)
    for file in files:
        target = into / file
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(folder / file, target)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without hard links
            target.symlink_to((folder / file).resolve(strict=True))
