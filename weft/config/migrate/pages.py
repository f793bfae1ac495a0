"""Writes docs/coming-from from the tables: `python -m weft.config.migrate.pages docs/coming-from`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.config.keys import schema_keys
from weft.config.load import show_default
from weft.config.migrate.check import check
from weft.config.migrate.trainer import TABLES, Trainer
from weft.config.presets import LIKE
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.yaml12 import show
from weft.rl.algorithms import ALGORITHMS

_WRITTEN = (
    "Written by `python -m weft.config.migrate.pages docs/coming-from` from weft/config/migrate/tables/{name}.yaml and "
    "{name}.md; a test holds that it is current."
)
_MOVE = """\
## Move over

```bash run
weft migrate {file} --nproc 8 > mine.yaml
```

makes a draft of weft's config: what has the same meaning, the defaults that nobody wrote down, and below it what was
not taken over, with what to do about it. `--nproc` is the number of GPUs of the old run, by which a per-device batch is
multiplied; those that shared documents count once. Read it through, and look at what it would do with
`weft sft mine.yaml --dry-run`.

{drafts} Preference tuning and distillation are not in this version.
"""
_NAMES = """\
## What weft calls it

You need not look names up: give weft the config you have, as in `weft sft theirs.yaml --dry-run`, or set a key under
its old name, and the answer names what to set, for all keys at once. A name is known by its last part, so the sections
around it do not matter; `name.*` is a section with all that is in it. Keys of weft are in
[config.md](../reference/config.md), with their defaults.
"""


_DEFAULTS = """\
## Defaults that differ

`weft migrate` writes these into its draft where the old config says nothing:

| key of weft | {title} | weft |
| --- | --- | --- |
"""


_IMAGES = """\
For models with images, it writes what these say:

| {title} | where nothing is said |
| --- | --- |
"""


_REINFORCEMENT = """\
## Reinforcement learning

What `weft rl` answers to these names; formulas and presets are in [algorithms.md](../reference/algorithms.md).

| {title} | weft |
| --- | --- |
"""


_LIKE = """\
## Algorithms that differ

`rl.algorithm` sets what the paper of an algorithm has. {title} has other defaults for these keys of `rl`, and
`rl.preset: {name}` sets all of them that you have not set:

| `rl.algorithm` | key | {title} | weft |
| --- | --- | --- | --- |
"""


def _like(trainer: Trainer) -> str:
    """The table of values of rl.preset that differ from the algorithm's preset, or else from the schema's default."""
    rows = []
    for algorithm, keys in LIKE.get(trainer.name, {}).items():
        for leaf, value in keys.items():
            schema = schema_keys(RlConfig)[f"rl.{leaf}"]
            default = list(schema.default) if isinstance(schema.default, tuple) else schema.default
            preset = ALGORITHMS[algorithm].preset.get(leaf, default)
            if value != preset:
                rows.append(f"| `{algorithm}` | `{leaf}` | {show(value)} | {show(preset)} |")
    return _LIKE.format(title=trainer.short, name=trainer.name) + "\n".join(rows) + "\n"


def page(trainer: Trainer) -> str:
    """The page of one trainer, as Markdown."""
    introduction = TABLES.introduction(trainer)
    parts = [
        f"# Coming from {trainer.title}\n",
        _WRITTEN.format(name=trainer.name) + "\n",
        introduction,
        _MOVE.format(
            file="theirs.sh" if "file=theirs.sh" in introduction else "theirs.yaml",
            drafts=TABLES.drafts,
        ),
    ]
    defaults = {key: value for key, value in trainer.table.defaults.items() if key in schema_keys(SftConfig)}
    if defaults:
        rows = "".join(_default_row(key, value) for key, value in defaults.items())
        parts.append(_DEFAULTS.format(title=trainer.title) + rows)
    if trainer.table.vision:
        rows = "".join(f"| `{name}` | {show(value)} |\n" for name, value in trainer.table.vision.items())
        parts.append(_IMAGES.format(title=trainer.title) + rows)
    parts.append(_NAMES)
    for heading, names in trainer.headings.items():
        parts.append(f"### {heading}\n\n| {trainer.title} | weft |\n| --- | --- |\n{_rows(names)}")
    if trainer.rl:
        parts.append(_REINFORCEMENT.format(title=trainer.title) + _rows(trainer.rl))
    if trainer.name in LIKE:
        parts.append(_like(trainer))
    return "\n".join(parts)


def write(folder: Path) -> None:
    """Write every page, as FOLDER/NAME.md."""
    check(TABLES)
    folder.mkdir(parents=True, exist_ok=True)
    for trainer in TABLES.trainers:
        (folder / f"{trainer.name}.md").write_text(page(trainer), encoding="utf-8")


def _default_row(key: str, value: Any) -> str:
    return f"| `{key}` | {show(value)} | {show_default(schema_keys(SftConfig)[key])} |\n"


def _rows(names: Mapping[str, str]) -> str:
    """Rows of a table, one for each answer, with all names to which it is the answer."""
    by_answer: dict[str, list[str]] = {}
    for name, text in names.items():
        by_answer.setdefault(text, []).append(f"`{name}`")
    return "".join(f"| {', '.join(names)} | {text[0].upper() + text[1:]} |\n" for text, names in by_answer.items())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
