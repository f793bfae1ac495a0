"""The schema as a flat table of dotted keys."""

from __future__ import annotations

import functools
import keyword
import typing
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

# (key, value) that are planned and refused until the feature exists.
NOT_YET_VALUES = {("model.recompute", "selective"), ("optimizer.name", "muon")}


def key(help: str, default: Any = MISSING, default_factory: Any = MISSING) -> Any:
    """A config key: a dataclass field that carries its documentation. Without a default it is required."""
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a schema: dotted name, type, default (MISSING if the key is required) and documentation."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


def sections(schema: type) -> dict[str, type]:
    """Section name -> dataclass, in the order of the schema. Cached: do not modify it."""
    return _sections(schema)


def schema_keys(schema: type) -> dict[str, Key]:
    """Dotted name -> Key, for all sections, in the order of the schema. Cached: do not modify it."""
    return _schema_keys(schema)


@functools.cache
def _sections(schema: type) -> dict[str, type]:
    hints = typing.get_type_hints(schema)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


@functools.cache
def _schema_keys(schema: type) -> dict[str, Key]:
    table: dict[str, Key] = {}
    for section, section_type in sections(schema).items():
        hints = typing.get_type_hints(section_type)
        for spec in fields(section_type):
            name = f"{section}.{spec.name.removesuffix('_')}"
            table[name] = Key(name, hints[spec.name], default_of(spec), str(spec.metadata.get("help", "")))
    return table


def get(config: Any, name: str) -> Any:
    """The value of a dotted key."""
    for part in name.split("."):
        config = getattr(config, attribute(part))
    return config


def attribute(leaf: str) -> str:
    """The name of a key's dataclass field: that of the key, with an underscore if it is a keyword (`async`)."""
    return f"{leaf}_" if keyword.iskeyword(leaf) else leaf


def default_of(spec: Field[Any]) -> Any:
    """The default of a dataclass field, or MISSING."""
    return spec.default_factory() if spec.default_factory is not MISSING else spec.default
