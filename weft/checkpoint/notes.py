"""Notes that the ranks of a save leave one another in a folder: they meet without any collective."""

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
    """The folder of one save, which the first rank makes, and removes when all is over. rank: whose notes are left."""

    folder: Path
    rank: int
    world: int

    def begin(self) -> None:
        """Make the folder."""
        self.folder.mkdir()

    def end(self) -> None:
        """Remove it, under another name: a note that comes late would keep the folder there."""
        over = self.folder.with_name(f"{self.folder.name}.over")
        with suppress(FileNotFoundError):
            os.rename(self.folder, over)
        shutil.rmtree(over, ignore_errors=True)

    def seams(self, number: int) -> list[Path]:
        """Where each rank leaves what it hands to others (ranges.py), of engine `number` of those that are saved; none
        for one rank."""
        return [self.folder / f"seams-{number}-{rank:05d}" for rank in range(self.world)] if self.world > 1 else []

    def leave(self, what: str, content: Any = None) -> None:
        """Leave a note, which is there as a whole or not at all."""
        note = self.folder / _name(what, self.rank)
        if content is None:
            note.touch()  # for which even a full disk has room
            return
        draft = note.with_name(f"{note.name}.draft")
        draft.write_text(json.dumps(content), encoding="utf-8")
        os.rename(draft, note)

    def read(self, what: str, rank: int) -> Any:
        """What a note says that is there."""
        return json.loads((self.folder / _name(what, rank)).read_text(encoding="utf-8"))

    def listed(self) -> set[str] | None:
        """The names of all notes; None while the folder is not there yet, or any more.

        Folders are listed, from the outermost: a network file system asks its server for a list, while a name that was
        once missing may be remembered as such for half a minute.
        """
        with suppress(FileNotFoundError):
            if self.folder.name in os.listdir(self.folder.parent):
                return set(os.listdir(self.folder))
        return None

    def all(self, what: str) -> bool:
        """Whether every rank has left this note."""
        return {_name(what, rank) for rank in range(self.world)} <= (self.listed() or set())

    def any(self, what: str) -> bool:
        """Whether some rank has."""
        return any(name.startswith(f"{what}-") for name in self.listed() or ())


def _name(what: str, rank: int) -> str:
    return f"{what}-{rank:05d}"
