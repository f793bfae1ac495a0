"""Notes: small files by which the ranks of a save coordinate without collectives."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Notes:
    """The notes of one save, in a folder that the first rank creates and removes. rank: the rank that writes notes."""

    folder: Path
    rank: int
    world: int

    def begin(self) -> None:
        """Create the folder."""
        self.folder.mkdir()

    def end(self) -> None:
        """Rename the folder, then remove it, so that a late note cannot keep it alive."""
        over = self.folder.with_name(f"{self.folder.name}.over")
        with suppress(FileNotFoundError):
            os.rename(self.folder, over)
        shutil.rmtree(over, ignore_errors=True)

    def seams(self, number: int) -> list[Path]:
        """The seam file of each rank (ranges.py) for the saved engine of index `number`; none for one rank."""
        return [self.folder / f"seams-{number}-{rank:05d}" for rank in range(self.world)] if self.world > 1 else []

    def leave(self, what: str, content: Any = None) -> None:
        """Write a note atomically."""
        note = self.folder / _name(what, self.rank)
        if content is None:
            note.touch()  # works even on a full disk
            return
        draft = note.with_name(f"{note.name}.draft")
        draft.write_text(json.dumps(content), encoding="utf-8")
        os.rename(draft, note)

    def read(self, what: str, rank: int) -> Any:
        """The content of an existing note."""
        return json.loads((self.folder / _name(what, rank)).read_text(encoding="utf-8"))

    def listed(self) -> set[str] | None:
        """The names of all notes; None while the folder does not exist.

        Folders are listed, from the outermost, because a network file system asks its server for a listing, but may
        cache for half a minute that a name did not exist.
        """
        with suppress(FileNotFoundError):
            if self.folder.name in os.listdir(self.folder.parent):
                return set(os.listdir(self.folder))
        return None

    def all(self, what: str) -> bool:
        """Whether every rank has written this note."""
        return {_name(what, rank) for rank in range(self.world)} <= (self.listed() or set())

    def any(self, what: str) -> bool:
        """Whether any rank has written this note."""
        return any(name.startswith(f"{what}-") for name in self.listed() or ())


def _name(what: str, rank: int) -> str:
    return f"{what}-{rank:05d}"
