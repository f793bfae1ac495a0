"""Messages about unknown keys: all unknown keys of a file together, grouped by advice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.commands import SCHEMAS
from weft.config.keys import schema_keys, sections
from weft.config.migrate.names import advice_for, entry_of, likely_trainer, task_of
from weft.config.migrate.trainer import REINFORCEMENT, TABLES
from weft.config.schema import SftConfig
from weft.config.yaml12 import Node

_PLURALS = (
    ("is not a key", "are not keys"),
    ("is not an option", "are not options"),
    ("belongs to", "belong to"),
    ("leave it out", "leave them out"),
    ("remove it", "remove them"),
    ("it is an option of", "they are options of"),
)


@dataclass(frozen=True, slots=True)
class Unknown:
    """An unknown key or section. name: dotted. location: its position in a file. answer: the advice. foreign: whether
    it is a name of another trainer."""

    name: str
    location: str
    answer: str
    foreign: bool = False


def unknown_keys(name: str, node: Node, schema: type) -> list[Unknown]:
    """The unknown keys in `name`, a key or section that is not in the schema."""
    section = name.partition(".")[0]
    owners = [command for command, owner in SCHEMAS.items() if section in sections(owner)]
    if owners and section not in sections(schema):
        commands = " and ".join(f"`weft {command}`" for command in owners)
        task = "supervised fine-tuning" if schema is SftConfig else f"`weft {getattr(schema, 'command', 'sft')}`"
        return [Unknown(name, node.location, f"belongs to {commands}: remove it for {task}.")]
    advice = advice_for(name, reinforcement="rl" in sections(schema))
    of_section = [key for key in schema_keys(schema) if key.startswith(f"{section}.")]
    if entry_of(name) == f"{section}.*" and difflib.get_close_matches(name, of_section, n=1, cutoff=0.9):
        advice = None  # a misspelt key of weft; the advice applies to a section of another trainer
    message = f"is not a key of weft: {advice or _nearest(name, schema)}"
    if node.is_section and node.value and not _is_typo(name, node, schema):
        inside = [key for leaf, child in node.value.items() for key in unknown_keys(f"{name}.{leaf}", child, schema)]
        if advice is None or any(key.foreign and key.answer != message for key in inside):
            return inside
    return [Unknown(name, node.location, message, advice is not None)]


def messages(unknown: Sequence[Unknown]) -> list[str]:
    """One line per advice, in the order of the file, with all keys to which it applies."""
    by_answer: dict[str, list[Unknown]] = {}
    for key in unknown:
        by_answer.setdefault(key.answer, []).append(key)
    return [_line(keys, answer) for answer, keys in by_answer.items()]


def foreign_config(unknown: Sequence[Unknown], settings: Mapping[str, Any], schema: type) -> tuple[list[str], str, str]:
    """(The lines about unknown keys, the text before them, the text after them). If the keys are another trainer's,
    weft may not support this kind of config, or only in another command; the lines then contain only this information.
    settings: all names in the config with their values."""
    trainer = likely_trainer(key.name for key in unknown if key.foreign)
    if trainer is None:
        return messages(unknown), "", ""
    task = task_of(trainer, settings)
    places = unknown[0].location.rpartition(":")[0] or unknown[0].location
    page = f"docs/coming-from/{trainer.name}.md lists all of them with weft's keys."
    drafted = (
        f"These look like keys of {trainer.title}: weft migrate FILE makes a draft of a weft config from them, and "
    )
    this_command = getattr(schema, "command", "")
    if task is None or (task.is_drafted and (task.kind == REINFORCEMENT or task.command == this_command)):
        return messages(unknown), "", drafted + page
    if task.kind != REINFORCEMENT or "rl" not in sections(schema):
        return [], f"{places}: this is {task}", ""
    return messages(unknown), f"{places}: this is {task}", page


def _line(keys: list[Unknown], answer: str) -> str:
    names = list(dict.fromkeys(key.name for key in keys))
    if len(names) > 1:
        for singular, plural in _PLURALS:
            answer = answer.replace(singular, plural)
    return f"{_places(key.location for key in keys)}: {_all_of(names)} {answer}"


def _places(places: Iterable[str]) -> str:
    """`a.yaml:3, 7; command line`."""
    lines: dict[str, list[str]] = {}
    for location in dict.fromkeys(places):
        file, colon, line = location.rpartition(":")
        lines.setdefault(file if colon else location, []).append(line if colon else "")
    return "; ".join(file + (f":{', '.join(numbers)}" if numbers != [""] else "") for file, numbers in lines.items())


def _all_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _is_typo(name: str, node: Node, schema: type) -> bool:
    """Whether this is a misspelt section of weft: all its keys are keys of that section."""
    near = difflib.get_close_matches(name, sections(schema), n=1, cutoff=0.75)
    return bool(near) and all(f"{near[0]}.{leaf}" in schema_keys(schema) for leaf in node.value)


def _nearest(name: str, schema: type) -> str:
    """Advice with the nearest known keys: a key of the same name in another section, otherwise similar names, otherwise
    all keys of the section."""
    keys = schema_keys(schema)
    section, _, leaf = name.rpartition(".")
    candidates = [key.name for key in keys.values() if key.leaf == leaf]
    candidates = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75) or candidates
    if not candidates and not section:
        candidates = difflib.get_close_matches(name, sections(schema), n=1, cutoff=0.75)
    if not candidates and section in sections(schema):
        near = {key.leaf: key.name for key in keys.values() if key.name.startswith(section + ".")}
        near |= {key.formerly.rpartition(".")[2]: key.name for key in keys.values() if key.name in near.values()}
        candidates = list(dict.fromkeys(near[match] for match in difflib.get_close_matches(leaf, near, n=2)))
    if not candidates:
        meant = difflib.get_close_matches(leaf, TABLES.names, n=1, cutoff=0.9)  # a misspelt name of another trainer
        if meant:
            return f"did you mean {meant[0]}? If so: {advice_for(meant[0], reinforcement='rl' in sections(schema))}"
        candidates = difflib.get_close_matches(name, keys, n=2, cutoff=0.7)
    if candidates:
        return f"did you mean {' or '.join(candidates)}?"
    if section in sections(schema):
        leaves = [key.leaf for key in keys.values() if key.name.startswith(section + ".")]
        return f"{section} has {', '.join(leaves)}."
    return f"the sections are {', '.join(sections(schema))} (docs/reference/config.md lists their keys)."
