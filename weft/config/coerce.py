"""Strict conversion of YAML values to the types of the schema. Nothing is rounded, parsed or guessed.

An integer is accepted for a number. A value of any other type is refused.
"""

from __future__ import annotations

import math
import re
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from weft.config.yaml12 import Node, show

_YAML_1_1_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_PLAIN = re.compile(r"[\w./][\w./ @+-]*")  # strings that need no quotes in a list


class MismatchError(Exception):
    """A value has the wrong type. The message proposes a correction, or is empty."""


def coerce(node: Node, hint: Any) -> Any:
    """The value of `node`, converted to the type `hint`. Raises MismatchError."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _coerce_union(node, get_args(hint))
    if origin is Literal:
        return _coerce_literal(node, get_args(hint))
    if origin is tuple:
        return _coerce_tuple(node, get_args(hint))
    if origin is dict:
        return _coerce_mapping(node, get_args(hint))
    if is_dataclass(hint):
        return _coerce_record(node, hint)
    if hint is Any:
        return node.value
    return _coerce_scalar(node, hint)


def describe(hint: Any) -> str:
    """A type in words, such as `an integer or null` or `one of adamw, sgd`."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if origin is tuple:
        return _describe_tuple(get_args(hint))
    if origin is dict:
        return f"a mapping of names to {describe(get_args(hint)[1])}"
    if is_dataclass(hint):
        return f"a mapping of {', '.join(field.name for field in fields(hint))}"
    if hint is Any:
        return "values"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}[hint]


def _describe_tuple(members: tuple[Any, ...]) -> str:
    if members[-1] is not ...:
        return f"a list of {len(members)} numbers"
    if get_origin(members[0]) is Literal:
        return f"a list of {', '.join(get_args(members[0]))}"
    plural = {str: "a list of strings", int: "a list of integers"}
    return plural.get(members[0]) or f"a list, each {describe(members[0])}"


def _coerce_union(node: Node, members: tuple[Any, ...]) -> Any:
    hints = []
    # str comes last: `run.dir=null` on the command line means null, not a folder with that name, and a string in the
    # syntax of a list or a mapping is converted if the union has such a type.
    for member in sorted(members, key=lambda member: member is str):
        try:
            return coerce(node, member)
        except MismatchError as error:
            hints.append(str(error))
    raise MismatchError(next((hint for hint in hints if hint), ""))


def _coerce_literal(node: Node, choices: tuple[Any, ...]) -> Any:
    text = node.raw if node.raw is not None and not isinstance(node.value, str) else node.value
    for choice in choices:
        if text == choice and type(text) is type(choice):
            return choice
    raise MismatchError("")


def _coerce_tuple(node: Node, members: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(node.value, list):
        is_list_of_any_length = members[-1] is ... and isinstance(node.value, str | int)
        raise MismatchError(f"write {_as_list(str(node.value))}" if is_list_of_any_length else "")
    if members[-1] is ...:
        return tuple(coerce(Node(value, node.location), members[0]) for value in node.value)
    if len(node.value) != len(members):
        raise MismatchError(f"it has {len(node.value)} values")
    return tuple(coerce(Node(value, node.location), hint) for value, hint in zip(node.value, members, strict=True))


def _as_list(text: str) -> str:
    """A string as a YAML list: of one item, or of the items of a list that YAML could not read, such as [*.norm]."""
    listed = text.startswith("[") and text.endswith("]")
    items = [item.strip() for item in text[1:-1].split(",")] if listed else [text]
    return f"[{', '.join(item if _PLAIN.fullmatch(item) else repr(item) for item in items)}]"


def _coerce_mapping(node: Node, members: tuple[Any, ...]) -> dict[str, Any]:
    if not isinstance(node.value, dict):
        raise MismatchError("")
    return {name: coerce(Node(value, node.location), members[1]) for name, value in node.value.items()}


def _coerce_record(node: Node, hint: Any) -> Any:
    """An instance of a dataclass from a mapping of its fields."""
    if not isinstance(node.value, dict):
        raise MismatchError("")
    hints = get_type_hints(hint)
    unknown = [name for name in node.value if name not in hints]
    if unknown:
        raise MismatchError(f"`{unknown[0]}` is not one of {', '.join(hints)}")
    required = [f.name for f in fields(hint) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in required if name not in node.value]
    if missing:
        raise MismatchError(f"`{missing[0]}` is missing")
    values = {}
    for name, value in node.value.items():
        try:
            values[name] = coerce(Node(value, node.location), hints[name])
        except MismatchError as error:
            advice = f": {error}" if str(error) else ""
            raise MismatchError(f"`{name}` must be {describe(hints[name])}, not {show(value)}{advice}") from error
    return hint(**values)


def _coerce_scalar(node: Node, hint: type) -> Any:
    value = node.value
    if hint is str and not isinstance(value, str) and node.raw is not None:
        return node.raw  # the shell has removed the quotes: `data.path=2024` is a path
    if hint is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise MismatchError("it must be finite")
        return float(value)
    if type(value) is hint:
        return value
    raise MismatchError(_advice(value, hint))


def _advice(value: Any, hint: type) -> str:
    if hint is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if hint is bool and isinstance(value, str) and value.lower() in _YAML_1_1_WORDS:
        return f"write {_YAML_1_1_WORDS[value.lower()]}"
    if hint is bool and type(value) is int and value in (0, 1):
        return f"write {str(bool(value)).lower()}"
    if hint in (int, float) and isinstance(value, str):
        return _unquoted(value, hint)
    if hint is str and value is not None and not isinstance(value, list | dict):
        return f'write "{show(value)}" in quotes'
    return ""


def _unquoted(text: str, hint: type) -> str:
    try:
        number = hint(text.replace(",", ""))
    except ValueError:
        return ""
    return f"write {show(number)}"
