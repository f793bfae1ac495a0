"""The schema as a flat table of dotted keys."""

from __future__ import annotations

import functools
import keyword
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from weft.config.conditions import Unread
from weft.config.ranges import Range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Section = TypeVar("Section", bound="DataclassInstance")

# (key, value) that a later version will support. weft refuses them until then.
NOT_YET_VALUES: set[tuple[str, str]] = set()


def key(
    help: str,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    *,
    within: Range | None = None,
    unread: tuple[Unread, ...] = (),
    formerly: str = "",
) -> Any:
    """A config key: a dataclass field with its documentation. A key without a default is required. within: the
    permitted values, if the type does not define them; null is always permitted. unread: the conditions under which the
    key has no effect; weft then refuses it, and omits it from the resolved config. A condition of all keys of a section
    is in the metadata of the section's field instead. formerly: the previous name of the key in the same section, which
    configs may still use."""
    metadata = {"help": help, "within": within, "unread": unread, "formerly": formerly}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def with_former_names(section: type[Section]) -> type[Section]:
    """Let Python code also read and set the keys of a section by their former names, because users' functions receive
    sections as arguments."""
    names = {spec.metadata["formerly"]: spec.name for spec in fields(section) if spec.metadata.get("formerly")}
    make = section.__init__

    @functools.wraps(make)
    def init(self: Any, **values: Any) -> None:
        for former in names.keys() & values.keys():
            if names[former] in values:
                raise TypeError(f"{former} is the former name of {names[former]}: set only {names[former]}.")
            values[names[former]] = values.pop(former)
        make(self, **values)

    def get_former(self: Any, name: str) -> Any:
        if name in names:
            return getattr(self, names[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    setattr(section, "__init__", init)  # noqa: B010 - mypy refuses the plain assignments
    setattr(section, "__getattr__", get_former)  # noqa: B010
    return section


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a schema: dotted name, type, default (MISSING if the key is required), documentation, range,
    conditions under which it has no effect, and its former dotted name ("" for none)."""

    name: str
    type: Any
    default: Any
    help: str
    within: Range | None = None
    unread: tuple[Unread, ...] = ()
    formerly: str = ""

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
    of_section = {spec.name: spec.metadata.get("unread", ()) for spec in fields(schema)}
    for section, section_type in sections(schema).items():
        hints = typing.get_type_hints(section_type)
        for spec in fields(section_type):
            name = f"{section}.{spec.name.removesuffix('_')}"
            former = f"{section}.{spec.metadata['formerly']}" if spec.metadata.get("formerly") else ""
            help = str(spec.metadata.get("help", "")) + (f" Formerly {former}." if former else "")
            table[name] = Key(
                name,
                hints[spec.name],
                default_of(spec),
                help,
                spec.metadata.get("within"),
                (*of_section[section], *spec.metadata.get("unread", ())),
                former,
            )
    return table


def former_names(schema: type) -> dict[str, str]:
    """Former dotted name -> current name, for renamed keys."""
    return {key.formerly: key.name for key in schema_keys(schema).values() if key.formerly}


def with_current_names(config: Mapping[str, Any], schema: type) -> dict[str, Any]:
    """A config written by an earlier version, section -> key -> value, with the current names of its keys."""
    current = dict(config)
    for former, name in former_names(schema).items():
        section, _, leaf = former.partition(".")
        if isinstance(current.get(section), Mapping) and leaf in current[section]:
            values = dict(current[section])
            values.setdefault(name.rpartition(".")[2], values.pop(leaf))
            current[section] = values
    return current


def get(config: Any, name: str) -> Any:
    """The value of a dotted key."""
    for part in name.split("."):
        config = getattr(config, attribute(part))
    return config


def attribute(leaf: str) -> str:
    """The name of a key's dataclass field: the key's name, with an underscore if it is a Python keyword (`async`)."""
    return f"{leaf}_" if keyword.iskeyword(leaf) else leaf


def default_of(spec: Field[Any]) -> Any:
    """The default of a dataclass field, or MISSING."""
    return spec.default_factory() if spec.default_factory is not MISSING else spec.default
