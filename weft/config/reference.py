"""docs/config.md from the schema: `python -m weft.config.reference > docs/config.md`."""

from __future__ import annotations

from weft.config.aliases import NOT_YET
from weft.config.checks import RANGES
from weft.config.coerce import describe
from weft.config.keys import Key, schema_keys, sections
from weft.config.load import show_default
from weft.config.schema import SftConfig

_INTRODUCTION = """\
# Configuration

Written by `python -m weft.config.reference > docs/config.md`; a test holds that it is current.

A config is one or more YAML (or TOML) files, merged left to right, and `section.key=value` on the command line:

    weft sft base.yaml mine.yaml optimizer.lr=2e-5 step.documents=32 data.max_length=null

`model.path` and `data.path` are required; no file is. Numbers and booleans are those of YAML 1.2: `1e-5` is a
number, `yes` is a string. An unknown key, a value of another type, and a key that would have no effect are errors.
`weft sft --dry-run` prints the resolved config. Paths are relative to where the command is run.
"""


def reference() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION]
    for section, section_type in sections(SftConfig).items():
        keys = [key for key in schema_keys(SftConfig).values() if key.name.startswith(section + ".")]
        rows = "\n".join(_row(key) for key in keys)
        parts.append(
            f"## {section}\n\n{section_type.__doc__}\n\n| key | type | default | meaning |\n"
            f"| --- | --- | --- | --- |\n{rows}\n"
        )
    planned = ", ".join(f"`{name}`" for name in NOT_YET)
    parts.append(f"## Not in this version yet\n\nThese are refused by name: {planned}.\n")
    return "\n".join(parts)


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{show_default(key)}`"
    kind = describe(key.type)
    if key.name in RANGES:
        kind += f"; {RANGES[key.name][1]}"
    return f"| `{key.name}` | {kind} | {default} | {key.help} |"


if __name__ == "__main__":
    print(reference(), end="")
