"""docs/coming-from from the tables of names: `python -m weft.config.coming_from docs/coming-from`."""

from __future__ import annotations

import sys
from pathlib import Path

from weft.config.aliases import with_state
from weft.config.trainers import TRAINERS, Trainer

_WRITTEN = (
    "Written by `python -m weft.config.coming_from docs/coming-from` from weft/config/trainers/{name}.py; a test holds "
    "that it is current."
)
_NAMES = """\
## What weft calls it

You need not look names up: give weft the config you have, as in `weft sft theirs.yaml --dry-run`, or set a key under
its old name, and the answer names what to set, for all keys at once. A name is known by its last part, so the sections
around it do not matter; `name.*` is a section with all that is in it. Keys of weft are in
[config.md](../config.md), with their defaults.
"""


def page(trainer: Trainer) -> str:
    """The page of one trainer, as Markdown."""
    parts = [
        f"# Coming from {trainer.title}\n",
        _WRITTEN.format(name=trainer.name) + "\n",
        trainer.introduction,
        _NAMES,
    ]
    for heading, names in trainer.names.items():
        rows = "\n".join(f"| `{name}` | {_sentence(with_state(text))} |" for name, text in names.items())
        parts.append(f"### {heading}\n\n| {trainer.title} | weft |\n| --- | --- |\n{rows}\n")
    return "\n".join(parts)


def write(folder: Path) -> None:
    """Every page, as FOLDER/NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    for trainer in TRAINERS:
        (folder / f"{trainer.name}.md").write_text(page(trainer), encoding="utf-8")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
