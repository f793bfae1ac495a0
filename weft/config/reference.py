"""Writes docs/reference/config.md from the schema: `python -m weft.config.reference > docs/reference/config.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.checks import RANGES, Test
from weft.config.coerce import describe
from weft.config.keys import Key, schema_keys, sections
from weft.config.load import show_default
from weft.config.presets import ADAPTER_DEFAULTS
from weft.config.rl_checks import RANGES as RL_RANGES
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.yaml12 import show

_INTRODUCTION = """\
# Configuration

Written by `python -m weft.config.reference > docs/reference/config.md`; a test holds that it is current.

A config is one or more YAML (or TOML) files, merged left to right, and `section.key=value` on the command line:

    weft sft base.yaml mine.yaml optimizer.lr=2e-5 step.documents=32 data.max_length=null

`model.path` and `data.path` are required; no file is. Numbers and booleans are those of YAML 1.2: `1e-5` is a
number, `yes` is a string. An unknown key, a value of another type, and a key that would have no effect are errors.
`weft sft --dry-run` prints the resolved config. Paths are relative to where the command is run.
"""

_REINFORCEMENT = """\
# Keys of `weft rl`

Beside the sections above, of which `eval` is another one here, and `profile` is none. Of `optimizer` and `schedule`
only the keys are listed whose defaults differ.
"""


def reference() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION, *_tables(SftConfig, sections(SftConfig), RANGES), _REINFORCEMENT]
    shared = sections(SftConfig).values()
    own = {section: kind for section, kind in sections(RlConfig).items() if kind not in shared}
    parts += _tables(RlConfig, own, RL_RANGES)
    return "\n".join(parts)


def _tables(config: type, own: Mapping[str, type], ranges: Mapping[str, tuple[Test, str]]) -> Iterator[str]:
    """One table for each of these sections of a config. Of a section that `weft sft` has with other defaults, only the
    keys whose defaults differ."""
    command = "rl" if config is RlConfig else "sft"
    for section, kind in own.items():
        keys = [key for key in schema_keys(config).values() if key.name.startswith(section + ".")]
        if kind.__base__ is not object:
            keys = [key for key in keys if key.leaf in kind.__annotations__]
        rows = "\n".join(_row(key, ranges, ADAPTER_DEFAULTS[command]) for key in keys)
        yield (
            f"## {section}\n\n{kind.__doc__}\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |\n{rows}\n"
        )


def _row(key: Key, ranges: Mapping[str, tuple[Test, str]], adapted: Mapping[str, Any]) -> str:
    default = "required" if key.required else f"`{show_default(key)}`"
    if key.name in adapted:
        default += f", with lora `{show(adapted[key.name])}`"
    kind = describe(key.type)
    if key.name in ranges:
        kind += f"; {ranges[key.name][1]}"
    return f"| `{key.name}` | {kind} | {default} | {key.help} |"


if __name__ == "__main__":
    print(reference(), end="")
