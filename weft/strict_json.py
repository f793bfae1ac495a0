"""JSON from outside: json.loads, but deep nesting, duplicate keys and huge integers raise JsonError."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from weft.errors import UserError, first_line

_DEEPEST = 100  # lists and objects in one another
_TOO_DEEP = f"it is nested more than {_DEEPEST} deep"


class JsonError(ValueError):
    """The text is no JSON, or JSON that is refused; the message is a part of a sentence."""


def parse(text: str | bytes) -> Any:
    """The value of a text. Raises JsonError, and UnicodeDecodeError for bytes that are not UTF-8."""
    decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = _DECODER.decode(decoded)
    except json.JSONDecodeError as error:
        raise JsonError(f"{named(error)} at column {error.colno}") from None
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    return checked(decoded, value)


def item(text: str, start: int) -> tuple[Any, int]:
    """(the value that begins at `start`, the index after it). Raises JsonError, and json.JSONDecodeError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    return checked(text, value, start, end), end


def named(error: json.JSONDecodeError) -> str:
    """The error's message, with an invisible NUL byte named."""
    if error.doc[error.pos : error.pos + 1] == "\0":
        return "it holds a NUL byte (the file is truncated, or not UTF-8)"
    return error.msg


def checked(text: str, value: Any, begin: int = 0, end: int = sys.maxsize) -> Any:
    """The value, or JsonError if it is nested too deeply for code that renders and writes it recursively."""
    brackets = text.count("[", begin, end) + text.count("{", begin, end)
    if brackets > _DEEPEST and is_deeper(value, _DEEPEST):
        raise JsonError(_TOO_DEEP)
    return value


def is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested more than `limit` levels deep; recursion over them may fail."""
    level = [value]
    for _ in range(limit + 1):
        level = [container for container in level if isinstance(container, dict | list)]
        if not level:
            return False
        level = [
            child for container in level for child in (container.values() if isinstance(container, dict) else container)
        ]
    return True


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises JsonError for duplicate keys: readers differ in which of them they take."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"an object has the key `{repeated[:80]}` twice; keep one")
    return mapping


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # Python's own limit
        raise JsonError(f"a number has {len(digits):,} digits: {first_line(error).partition(':')[0]}") from None


_DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_int=_integer)


def plain(value: Any) -> Any:
    """`value` with None in place of numbers that JSON does not know (NaN, infinities)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def check_unicode(location: str, value: Any) -> None:
    """Raises UserError for half of a surrogate pair: JSON can write it, but tokenizers fail on it without naming the
    line."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start]
        raise UserError(f"{location}: holds {bad!r}, half of a surrogate pair and no character. Remove it.") from None
