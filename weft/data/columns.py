"""data.columns: the mapping from weft's column names to the user's columns."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from weft.config.sources import BESIDE, FORMATS
from weft.data.row_columns import MEANT
from weft.errors import UserError

_OPTIONAL = ("input", *BESIDE)


def rename_columns(location: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with weft's column names.

    If `columns` names a column of a format, the row has that format and the columns of other formats are left out; so a
    table may hold several. Raises UserError if a required path is not in the row.
    """
    named = [form for form, names in FORMATS.items() if any(name in columns for name in names)]
    kept = {name for form in named or FORMATS for name in FORMATS[form]} | {*BESIDE, *MEANT}
    # An optional column that has another name in `columns` is not read under its own, too: {instruction: input}.
    moved = {*columns, *(path for path in columns.values() if path in _OPTIONAL)}
    out = {name: value for name, value in row.items() if name not in moved and (name in kept or not named)}
    for name, path in columns.items():
        value = _find(location, row, name, path)
        if value is not None or name not in _OPTIONAL:
            out[name] = value
    return out


def add_named_columns(location: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with all its columns, plus those in `columns` under weft's names. Raises UserError as `renamed` does."""
    found = {name: _find(location, row, name, path) for name, path in columns.items()}
    return {**row, **{name: value for name, value in found.items() if value is not None or name not in _OPTIONAL}}


def _find(location: str, row: Mapping[str, Any], name: str, path: str) -> Any:
    """The value at a path: a column of exactly this name, else keys and list indices joined by dots."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.removeprefix("-").isdigit() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        elif name in _OPTIONAL:
            return None
        else:
            hint = divided_columns(location, row)
            raise UserError(f"{location}: data.columns: {name} is to be `{path}`, but {_missing(value, part)}.{hint}")
    return value


def _missing(value: Any, part: str) -> str:
    if isinstance(value, Mapping):
        return f"there is no `{part}` among {', '.join(f'`{key}`' for key in value) or 'no keys'}"
    if isinstance(value, list):
        return f"`{part}` is no place in a list of {len(value)}"
    return f"`{part}` would be inside {'null' if value is None else 'a ' + type(value).__name__}, which has no parts"


def divided_columns(location: str, row: Mapping[str, Any]) -> str:
    """As divided_otherwise, for a row of a .csv or .tsv file. location: its file and line."""
    return divided_otherwise(location.rpartition(":")[0], next(iter(row))) if len(row) == 1 else ""


def divided_otherwise(path: str, header: str) -> str:
    """Advice, as a sentence behind another, for a .csv or .tsv file whose header seems to be divided by something else;
    "" for other files and headers."""
    name = path.removesuffix(".gz")
    if not name.endswith((".csv", ".tsv")):
        return ""
    tabs = name.endswith(".tsv")
    sign = max((";", "|", "," if tabs else "\t"), key=header.count)
    if sign not in header:
        return ""
    if sign in ",\t":
        other, ending = ("commas", ".csv") if tabs else ("tabs", ".tsv")
        return f" Its columns seem to be divided by {other}: call the file {ending}."
    said = f" Its columns seem to be divided by `{sign}`"
    if name != path:
        return f"{said}: write them with commas."
    code = f'import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter="{sign}"))'
    command = f"python3 -c {shlex.quote(code)} < {shlex.quote(path)} > {shlex.quote(name[:-4] + '-commas.csv')}"
    return f"{said}. The command {command} writes them with commas."
