"""Columns of rows: data.columns maps weft's names to the user's columns. Data for other trainers have further columns
next to the messages. weft reads such a column if weft has a column with the same meaning. It reads or refuses columns
that change the trained tokens, and ignores all others, because most data sets have some."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.config.sources import COLUMNS_BESIDE, FORMATS
from weft.config.yaml12 import override
from weft.data.messages import Message, describe_type, leave_out_key, parse_json_list
from weft.errors import UserError

_OPTIONAL = ("input", *COLUMNS_BESIDE)


def rename_columns(location: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with weft's column names.

    If `columns` names a column of a format, the row has that format, and the columns of other formats are omitted; so a
    table may have columns of several formats. Raises UserError if a required path is not in the row.
    """
    formats = [form for form, names in FORMATS.items() if any(name in columns for name in names)]
    readable = {name for form in formats or FORMATS for name in FORMATS[form]} | {*COLUMNS_BESIDE, *MEANT}
    # An optional column with another name in `columns` is not also read under its default name: {instruction: input}.
    moved = {*columns, *(path for path in columns.values() if path in _OPTIONAL)}
    out = {name: value for name, value in row.items() if name not in moved and (name in readable or not formats)}
    for name, path in columns.items():
        value = _find(location, row, name, path)
        if value is not None or name not in _OPTIONAL:
            out[name] = value
    return out


def add_named_columns(location: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with all its columns, plus those in `columns` under weft's names. Raises UserError as `rename_columns`
    does."""
    named = {name: _find(location, row, name, path) for name, path in columns.items()}
    return {**row, **{name: value for name, value in named.items() if value is not None or name not in _OPTIONAL}}


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
            raise UserError(f"{location}: data.columns reads {name} from `{path}`, but {_missing(value, part)}.{hint}")
    return value


def _missing(value: Any, part: str) -> str:
    if isinstance(value, Mapping):
        return f"there is no `{part}` among {', '.join(f'`{key}`' for key in value) or 'no keys'}"
    if isinstance(value, list):
        return f"`{part}` is not an index of a list of {len(value)}"
    return f"the value above `{part}` is {'null' if value is None else 'a ' + type(value).__name__}, which has no keys"


def divided_columns(location: str, row: Mapping[str, Any]) -> str:
    """Same as divided_otherwise, for a row of a .csv or .tsv file. location: its file and line."""
    return divided_otherwise(location.rpartition(":")[0], next(iter(row))) if len(row) == 1 else ""


def divided_otherwise(path: str, header: str) -> str:
    """Advice for a .csv or .tsv file whose header seems to have another separator, as a sentence to append; "" for
    other files and headers."""
    name = path.removesuffix(".gz")
    if not name.endswith((".csv", ".tsv")):
        return ""
    tabs = name.endswith(".tsv")
    sign = max((";", "|", "," if tabs else "\t"), key=header.count)
    if sign not in header:
        return ""
    if sign in ",\t":
        separator, ending = ("commas", ".csv") if tabs else ("tabs", ".tsv")
        return f" Its columns seem to be separated by {separator}: rename the file to {ending}."
    finding = f" Its columns seem to be separated by `{sign}`"
    if name != path:
        return f"{finding}: separate them by commas."
    code = f'import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter="{sign}"))'
    command = f"python3 -c {shlex.quote(code)} < {shlex.quote(path)} > {shlex.quote(name[:-4] + '-commas.csv')}"
    return f"{finding}. The command {command} separates them by commas."


# ---------------------------------------------------------------- columns of other trainers' data

TOOLS = ("functions", "tool_defs")  # OpenAI's older name; the name of verifiers and prime-rl
SYSTEMS = ("system_prompt", "system_message")
_MASKS = ("loss_mask", "loss_masks", "step_loss_mask", "step_loss_masks", "train_mask")
# Switches of other trainers in rows -> the value that equals weft's behaviour.
_SWITCHES = {
    "unmask": False, "train_on_inputs": False, "train_on_input": False, "train_on_prompt": False,
    "train_on_source": False, "mask_inputs": True, "mask_input": True, "mask_prompt": True, "mask_source": True,
}  # fmt: skip
_MEDIA = {"image": "images", "video": "videos"}
_BOXES = ("<bbox>", "<ref-object>")  # ms-swift replaces them by the column `objects`
# Columns that are read even if data.columns names the columns of a format.
MEANT = frozenset((
    *TOOLS, *SYSTEMS, *_MASKS, *_SWITCHES, *_MEDIA, "enable_thinking", "mask_history", "mask", "history", "objects",
    "audio",
))  # fmt: skip


def tools_of(location: str, row: Mapping[str, Any]) -> Any:
    """The row's tools, from `tools` or a column with the same meaning; None without any. Raises UserError."""
    if row.get("tools"):
        return row["tools"]
    for name in TOOLS:
        value = parse_json_list(location, name, row.get(name)) if row.get(name) else None
        if isinstance(value, list) and value and all(map(_is_tool, value)):
            return [item if "function" in item else {"type": "function", "function": item} for item in value]
    return None


def _is_tool(item: Any) -> bool:
    """Whether this is the schema of a function, not another value of a column `functions`."""
    function = item.get("function", item) if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return "parameters" in function or "description" in function or set(function) <= {"name", "type", "strict"}


def system_of(location: str, row: Mapping[str, Any]) -> tuple[str, Any]:
    """(the column with the row's system message, its value), or ("", None). Raises UserError."""
    named = [name for name in ("system", *SYSTEMS) if row.get(name)]
    for name in named[1:]:
        if row[name] != row[named[0]]:
            raise UserError(f"{location}: `{named[0]}` and `{name}` differ. {leave_out_key(name)}")
    return (named[0], row[named[0]]) if named else ("", None)


def template_switches(location: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template with a separate column (verl). Raises UserError."""
    value = row.get("enable_thinking")
    if value is None:
        return {}
    if not isinstance(value, bool):
        raise UserError(
            f"{location}: `enable_thinking` must be true or false, not {describe_type(value)}. "
            f"{leave_out_key('enable_thinking')}"
        )
    return {"enable_thinking": value}


def apply_train_columns(
    location: str, row: Mapping[str, Any], messages: Sequence[Message], first: int
) -> list[Message]:
    """The messages, with `train` set according to the row's columns. first: index of the first message that can be
    trained. Raises UserError for a column that would change the trained tokens but cannot be read."""
    if MEANT.isdisjoint(row):
        return list(messages)
    out = [dict(message) for message in messages]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    for name in _MASKS:
        for index, trained in _mask(location, name, row.get(name), messages, answers):
            _mark(location, name, out, index, trained)
    history = row.get("mask_history")
    if history is not None:
        if not isinstance(history, bool | int) or history not in (0, 1):
            raise UserError(f"{location}: `mask_history` must be true or false, not {describe_type(history)}.")
        for index in answers[:-1] if history else ():
            _mark(location, "mask_history", out, index, False)
    for name, usual in _SWITCHES.items():
        if isinstance(row.get(name), bool | int) and row[name] != usual:
            raise UserError(
                f"{location}: has `{name}: {json.dumps(row[name])}`, which weft does not read from rows. Set "
                f"data.train_on=all to train every token of all rows, or {override('data.ignore', [name])} to train "
                "only answers."
            )
    _refuse_mask(location, row.get("mask"), len(messages), len(answers))
    if row.get("history"):
        raise UserError(
            f"{location}: has `history` in addition to messages, and it would be lost. Write it as messages. "
            f"{leave_out_key('history')}"
        )
    _refuse_media(location, row, messages)
    return out


def _mask(
    location: str, name: str, value: Any, messages: Sequence[Message], answers: Sequence[int]
) -> Iterator[tuple[int, bool]]:
    """Yields (index of an answer, whether it is trained) from a column with a value for each message or each answer."""
    value = parse_json_list(location, name, value)
    if value is None or value == [] or (not isinstance(value, list) and value in (1, True)):
        return
    if not isinstance(value, list) or not all(
        isinstance(item, bool | int | float) and item in (0, 1) for item in value
    ):
        raise UserError(
            f"{location}: `{name}` must be a list of 0 (not trained) and 1, one for each message or each answer. "
            f"{leave_out_key(name)}"
        )
    if len(value) == len(messages):
        for index, item in enumerate(value):
            if index in answers:
                yield index, bool(item)
            elif item:
                raise UserError(
                    f"{location}: `{name}` has 1 for message {index + 1}, but only answers of the assistant can be "
                    "trained. Write 0, or set data.train_on=all."
                )
    elif len(value) == len(answers):
        yield from ((index, bool(item)) for index, item in zip(answers, value, strict=True))
    else:
        raise UserError(
            f"{location}: `{name}` has {len(value)} values, for {len(messages)} messages and {len(answers)} answers. "
            "Write one value for each message or each answer."
        )


def _mark(location: str, name: str, messages: list[Message], index: int, trained: bool) -> None:
    if messages[index].get("train", trained) != trained:
        raise UserError(f"{location}: `{name}` and the `train` of message {index + 1} contradict each other. Keep one.")
    messages[index]["train"] = trained


def _refuse_mask(location: str, value: Any, messages: int, answers: int) -> None:
    """Raises UserError for a column `mask` that selects the trained messages. NeMo's `mask` names the speaker who is
    not trained: the user, as in weft. Other data sets store masks of images there."""
    speaker = isinstance(value, str) and value.strip().lower() not in ("", "user", "human", "system")
    flags = isinstance(value, list) and len(value) in (messages, answers) and bool(value)
    if speaker or (flags and all(isinstance(item, bool | int) and item in (0, 1) for item in value)):
        raise UserError(
            f"{location}: has `mask`, which is ambiguous: it marks trained messages for some trainers, untrained "
            f"messages for others. Write `loss_mask` (1 is trained), or set {override('data.ignore', ['mask'])}."
        )


def _refuse_media(location: str, row: Mapping[str, Any], messages: Sequence[Message]) -> None:
    for name, column in _MEDIA.items():
        if row.get(name) and not row.get(column) and not _has_place(messages, name):
            raise UserError(
                f"{location}: has `{name}`, which its messages do not contain. Set "
                f"{override('data.columns', {column: name})} to put it before the first question, or "
                f"{override('data.ignore', [name])} if the row is complete without it."
            )
    if row.get("audio"):
        raise UserError(f"{location}: `audio` is not read in this version. {leave_out_key('audio')}")
    if row.get("objects") and any(mark in _text(message) for message in messages for mark in _BOXES):
        raise UserError(
            f"{location}: `objects` is not read: the marks {' and '.join(_BOXES)} would be trained as text. Replace "
            "these marks in the texts by their values."
        )


def _has_place(messages: Sequence[Message], name: str) -> bool:
    return any(
        f"<{name}>" in _text(message)
        or (
            isinstance(message.get("content"), list)
            and any(isinstance(part, dict) and part.get("type") == name for part in message["content"])
        )
        for message in messages
    )


def _text(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return str(content or "")
    return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
