"""Parsing and checks of data sources in a config: columns, splits, names. Imports no torch."""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.yaml12 import show

# The columns of each format. COLUMNS_BESIDE: columns that rows of any format may have.
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
    "instruction": ("instruction", "input", "output"),
    "input_ids": ("input_ids", "labels", "loss_mask"),
}
COLUMNS_BESIDE = ("system", "tools", "chat_template_kwargs", "history", "images", "videos")
COLUMNS = (*(name for names in FORMATS.values() for name in names), *COLUMNS_BESIDE)

# Roles of messages in chat templates. Only the assistant's answers are trained.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
_PART = re.compile(r"(?P<name>[\w.-]*)(?:\[(?P<start>-?\d*%?):(?P<stop>-?\d*%?)\])?")


@dataclass(frozen=True, slots=True)
class Split:
    """`name[start:stop]`. name: "" if the text has none. start, stop: as in Python's slices, in rows or as "10%"."""

    name: str = ""
    start: str = ""
    stop: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.start and not self.stop

    def rows(self, n: int) -> range:
        """The indices of the selected rows, out of n rows."""
        return range(n)[slice(_row(self.start, n), _row(self.stop, n))]


def _row(text: str, n: int) -> int | None:
    if not text:
        return None
    return round(n * int(text[:-1]) / 100) if text.endswith("%") else int(text)


def parse_split(text: str | None) -> Split:
    """Parse data.split. `split_problems` must have found no problem in it."""
    match = _PART.fullmatch(text or "")
    assert match is not None
    return Split(match["name"], match["start"] or "", match["stop"] or "")


def split_problems(text: str | None) -> Iterator[str]:
    """The problems of a split."""
    match = _PART.fullmatch(text or "")
    if match is None or any(bound in ("%", "-", "-%") for bound in (match["start"], match["stop"])):
        yield f"{text} is not a split: write a name, a part such as [:1000] or [10%:], or both: train[:1000]."


def column_problems(columns: Mapping[str, str], free: bool = False) -> Iterator[str]:
    """The problems of data.columns, weft's column -> its path in the data: unknown columns of weft, or columns of two
    formats. free: whether columns may have any name, such as the columns that rewards receive."""
    for name, path in columns.items():
        if name not in COLUMNS and not free:
            hint = f"Did you mean {close[0]}?" if (close := difflib.get_close_matches(name, COLUMNS, 1)) else ""
            if path in COLUMNS:
                hint = f"Write weft's name first: {{{path}: {name}}}."
            yield f"weft has no column {name}; it has {', '.join(COLUMNS)}. {hint}".rstrip()
        elif not path or not all(path.split(".")):
            yield f"{name}: {show(path)} is not the name of a column: write a name, or names joined by dots."
    named = [form for form, names in FORMATS.items() if any(name in columns for name in names)]
    if len(named) > 1 and (not free or {"messages", "prompt"} <= set(columns)):
        yield f"{show(dict(columns))} has columns of several formats ({' and '.join(named)}): keep those of one format."


def role_problems(roles: Mapping[str, str]) -> Iterator[str]:
    """The problems of data.roles: values that are neither roles of weft nor the data's role itself."""
    for foreign, role in roles.items():
        if role not in ROLES and role != foreign:
            turned = f" Write the data's role first: {{{role}: {foreign}}}." if foreign in ROLES else ""
            yield f"{foreign}: {show(role)} is not one of {', '.join(ROLES)}, and not {foreign} itself.{turned}"


MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "train")


def key_problems(keys: Mapping[str, str]) -> Iterator[str]:
    """The problems of data.message_keys, weft's key -> the data's key: keys that weft does not know, or two of weft's
    keys with the same key of the data."""
    for key, foreign in keys.items():
        if key not in MESSAGE_KEYS:
            turned = f" Write weft's name first: {{{foreign}: {key}}}." if foreign in MESSAGE_KEYS else ""
            yield f"{key} is not a message key of weft; the keys are {', '.join(MESSAGE_KEYS)}.{turned}"
        elif not foreign:
            yield f"{key}: {show(foreign)} is not the name of a key."
    for name in sorted({name for name in keys.values() if list(keys.values()).count(name) > 1}):
        yield f"{show(dict(keys))} reads {name} twice: remove one of the entries."


def source_problems(sources: Sequence[Any], path: str = "data.path", free: bool = False) -> Iterator[str]:
    """The problems of data.sources or a similar key. path: the key that it replaces. free: see column_problems."""
    if not sources:
        yield f"is empty: write at least one source, or set {path}."
    for source in sources:
        texts = [f"columns: {text}" for text in column_problems(source.columns, free)]
        texts += [f"split: {text}" for text in split_problems(source.split)]
        if source.weight <= 0:
            texts.append(f"weight is {show(source.weight)}; it must be above 0. To omit the source, remove it.")
        if source.name is not None and not re.fullmatch(r"[\w.-]+", source.name):
            texts.append(f"name: {show(source.name)} may have only letters, digits, dots, dashes and underscores.")
        yield from (f"{source.path}: {text}" for text in texts)
    names = [source_name(source) for source in sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two sources have the name {name}: set a name for each, as in {{name: {name}-2, path: ...}}."


def source_name(source: Any) -> str:
    """The name of a source in reports and metrics: its key `name`, or a name made from the file's name."""
    if source.name is not None:
        return str(source.name)
    name = Path(source.path).name.removesuffix(".gz")
    for suffix in DATA_SUFFIXES:
        name = name.removesuffix(suffix)
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "data"


def may_be_text(path: str) -> bool:
    """Whether a data path is the name of a plain text file, or a pattern that may match one."""
    name = path.removesuffix(".gz")
    return name.endswith(".txt") or (is_pattern(path) and not name.endswith(DATA_SUFFIXES))


def looks_like_hub_dataset(path: str) -> bool:
    """Whether a path that does not exist here can be `owner/name` on the hub."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith("."):
        return False
    return not path.removesuffix(".gz").endswith(DATA_SUFFIXES) and not Path(path).parent.is_dir()


HUB_NAME = "OWNER/NAME, as on the hub: letters, digits, dots, dashes and underscores, at most 96"


def is_hub_name(name: str) -> bool:
    """Whether the hub can have a repository of this name."""
    parts = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", name, re.ASCII)
    wrong = "--" in name or ".." in name or name.endswith((".git", ".", "-")) or len(name) > 96
    return parts is not None and not wrong


def is_pattern(path: str) -> bool:
    """Whether a path is a pattern for several files."""
    return any(letter in path for letter in "*?[") and not Path(path).expanduser().exists()


def matching_files(path: str) -> list[str]:
    """The files that match a pattern, sorted."""
    return sorted(name for name in glob.glob(str(Path(path).expanduser()), recursive=True) if Path(name).is_file())
