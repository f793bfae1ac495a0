"""Reads tables in YAML as typed records. Errors contain the file and the key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from weft.config.coerce import MismatchError, coerce, describe
from weft.config.yaml12 import Loader, Node, show

try:
    from yaml import CSafeLoader as _Base
except ImportError:  # without libyaml PyYAML is slower, but still reads all tables in a tenth of a second
    from yaml import SafeLoader as _Base  # type: ignore[assignment]

Record = TypeVar("Record")


class TableError(ValueError):
    """A table is invalid. The message contains the file, the key and the problem."""


class _Loader(_Base):
    """YAML 1.2, as for configs; a duplicate key is an error."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            keys = [str(key.value) for key, _ in node.value]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"`{repeated}` stands twice", node.start_mark)
        return mapping


def read_table(path: Path, kind: type[Record]) -> Record:
    """The file as an instance of the dataclass `kind`. Raises TableError for unknown keys and wrong types."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TableError(f"{path.name}: cannot be read: {error}") from error
    return _fitted(content, kind, f"{path.name}:")


def _fitted(value: Any, kind: Any, location: str) -> Any:
    """A value converted to the type `kind`. Mappings and dataclasses are converted key by key."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    record = next((member for member in members if is_dataclass(member)), None)
    if record is not None and isinstance(value, dict):
        return _record(value, record, location)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {word(key): _fitted(child, get_args(kind)[1], f"{location} {key}:") for key, child in value.items()}
    try:
        return coerce(Node(value, ""), kind)
    except MismatchError:
        raise TableError(f"{location} must be {describe(kind)}, not {show(value)}.") from None


def _record(value: Mapping[str, Any], kind: Any, location: str) -> Any:
    known_fields = {field.name: field for field in fields(kind)}
    for name in value:
        if name not in known_fields:
            near = difflib.get_close_matches(str(name), known_fields, n=1) or list(known_fields)
            raise TableError(f"{location} `{name}` is not a key of a table: did you mean {' or '.join(near)}?")
    for name, field in known_fields.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise TableError(f"{location} `{name}` is missing.")
    hints = get_type_hints(kind)
    return kind(**{name: _fitted(child, hints[name], f"{location} {name}:") for name, child in value.items()})


def word(value: Any) -> str:
    """The key of a YAML scalar in tables: `true` for true, `none` for null. Strings keep their case."""
    return value if isinstance(value, str) else str(value).lower()


def inverse(groups: Mapping[str, Iterable[Any]], location: str) -> dict[str, str]:
    """name -> the group that contains it. Raises TableError for a name in two groups."""
    group_of: dict[str, str] = {}
    for group, names in groups.items():
        for name in map(word, names):
            if name in group_of:
                raise TableError(f"{location} {name} is under both {group_of[name]} and {group}: remove one.")
            group_of[name] = group
    return group_of
