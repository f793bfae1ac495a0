"""docs/coming-from from the tables of names: `python -m weft.config.coming_from docs/coming-from`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from weft.config.aliases import with_state
from weft.config.keys import schema_keys
from weft.config.load import show_default
from weft.config.schema import SftConfig
from weft.config.trainers import TRAINERS, Trainer
from weft.config.yaml12 import show

_WRITTEN = (
    "Written by `python -m weft.config.coming_from docs/coming-from` from weft/config/trainers/{name}.py; a test holds "
    "that it is current."
)
_NAMES = """\
## What weft calls it

`weft migrate theirs.yaml > mine.yaml` makes a draft of a weft config, and says below it what has not been taken over.
You need not look names up either: give weft the config you have, as in `weft sft theirs.yaml --dry-run`, or set a key
under its old name, and the answer names what to set, for all keys at once. A name is known by its last part, so the
sections around it do not matter; `name.*` is a section with all that is in it. Keys of weft are in
[config.md](../config.md), with their defaults.
"""


_DEFAULTS = """\
## Defaults that differ

What nobody wrote down is different too. `weft migrate` writes these into its draft:

| key of weft | {title} | weft |
| --- | --- | --- |
"""


def page(trainer: Trainer) -> str:
    """The page of one trainer, as Markdown."""
    parts = [
        f"# Coming from {trainer.title}\n",
        _WRITTEN.format(name=trainer.name) + "\n",
        trainer.introduction,
    ]
    defaults = {key: value for key, value in trainer.defaults.items() if key in schema_keys(SftConfig)}
    if defaults:
        rows = "\n".join(_default_row(key, value) for key, value in defaults.items())
        parts.append(_DEFAULTS.format(title=trainer.title) + rows + "\n")
    parts.append(_NAMES)
    for heading, names in trainer.names.items():
        rows = "\n".join(f"| `{name}` | {_sentence(with_state(text))} |" for name, text in names.items())
        parts.append(f"### {heading}\n\n| {trainer.title} | weft |\n| --- | --- |\n{rows}\n")
    return "\n".join(parts)


def write(folder: Path) -> None:
    """Every page, as FOLDER/NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    for trainer in TRAINERS:
        (folder / f"{trainer.name}.md").write_text(page(trainer), encoding="utf-8")


def _default_row(key: str, value: Any) -> str:
    return f"| `{key}` | {show(value)} | {show_default(schema_keys(SftConfig)[key])} |"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
