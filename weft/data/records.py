"""Reading JSONL: each line is one document in one of three formats, checked before anything is tokenised.

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"prompt": "...", "completion": "..."}
{"text": "..."}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.errors import UserError
from weft.observe import flight

_BEAT = 1000  # lines between two signs of life

Format = Literal["messages", "prompt", "text"]
ALL_FORMATS: tuple[Format, ...] = ("messages", "prompt", "text")
FORMATS = "`messages`, `prompt` and `completion`, or `text`"

# Keys that change what a document means: ignoring them would train on something else than the user wrote.
UNREAD_KEYS = ("tools", "images", "videos", "audios", "documents")
UNREAD_MESSAGE_KEYS = ("weight",)

# What users bring from other libraries, and what to write instead.
FOREIGN_KEYS = {
    "conversations": "write `messages` with `role` and `content` instead of `conversations` with `from` and `value`",
    "instruction": "write `prompt` (instruction and input) and `completion` (output)",
    "question": "write `prompt` (question) and `completion` (answer)",
    "response": "write `completion` instead of `response`",
    "output": "write `completion` instead of `output`",
    "content": "write `text` instead of `content`",
    "chosen": "preference pairs are not for supervised fine-tuning: write the chosen answer as `completion`",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One checked line. where: "file:line", for messages."""

    where: str
    format: Format
    value: dict[str, Any]


def read_records(path: str) -> list[Record]:
    """Every document of a JSONL file, in the order of its lines; blank lines are skipped.

    Raises UserError, naming file and line, for anything that is not one document in one format.
    """
    records = [parse_line(where, line) for where, line in _lines(path)]
    if not records:
        raise UserError(f"{path}: holds no documents. data.path must name a JSONL file with {FORMATS} in each line.")
    return records


def parse_line(where: str, line: bytes) -> Record:
    """The document that one line of JSON holds; where ("file:line") goes into the errors."""
    try:
        value = json.loads(line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: is not valid JSON: {error.msg} at column {error.colno}.{_json_advice(line)}"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: holds {_kind(value)}, not an object.{_json_advice(line)}")
    record = Record(where, _format(where, value), value)
    _CHECKS[record.format](record)
    _check_unicode(record, line)
    return record


def _lines(path: str) -> Iterator[tuple[str, bytes]]:
    if Path(path).is_dir():
        raise UserError(f"data.path: {path} is a folder. Name one JSONL file in it.")
    try:
        # Split at "\n" only: str.splitlines would also cut at U+2028, which JSON strings may hold.
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number % _BEAT == 0:
                    flight.beat()
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"{path}:{number}", line
    except FileNotFoundError:
        raise UserError(f"data.path: there is no file {path} (looked from {Path.cwd()}).") from None
    except OSError as error:
        raise UserError(f"data.path: cannot read {path}: {error.strerror}.") from None


def _json_advice(line: bytes) -> str:
    if line.lstrip().startswith(b"["):
        return " JSONL has one object per line and no list around them."
    if line.strip() in (b"{", b"}", b"},"):
        return " JSONL has one whole object per line; this one spreads over several."
    return " Each line must be one JSON object."


def _format(where: str, value: dict[str, Any]) -> Format:
    """The one format a line is in. Null counts as absent: exported tables hold every column in every line."""
    present = {key for key, item in value.items() if item is not None}
    if unread := [key for key in UNREAD_KEYS if key in present]:
        raise UserError(
            f"{where}: `{unread[0]}` is not yet in this version. Remove it if the document is right without it."
        )
    found: list[Format] = [name for name in ALL_FORMATS if name in present]
    if "completion" in present and "prompt" not in present:
        found.append("prompt")
    if len(found) > 1:
        names = " and ".join(f"`{name}`" for name in found)
        raise UserError(f"{where}: is in more than one format ({names}). Keep one of {FORMATS}.")
    if not found:
        hints = [hint for key, hint in FOREIGN_KEYS.items() if key in present]
        keys = ", ".join(f"`{key}`" for key in value) or "no keys"
        raise UserError(f"{where}: has {keys}; it needs {FORMATS}." + (f" To mend it, {hints[0]}." if hints else ""))
    return found[0]


def _check_text(record: Record) -> None:
    _check_string(record, "text")


def _check_prompt(record: Record) -> None:
    for name, other in (("prompt", "completion"), ("completion", "prompt")):
        if record.value.get(name) is None:
            advice = " A document without a prompt is written as `text`." if name == "prompt" else ""
            raise UserError(f"{record.where}: has `{other}` but no `{name}`. Add `{name}`.{advice}")
        _check_string(record, name)


def _check_string(record: Record, name: str) -> None:
    value = record.value[name]
    if not isinstance(value, str):
        advice = " A list of messages goes under `messages`." if isinstance(value, list) else ""
        raise UserError(f"{record.where}: `{name}` must be a string, not {_kind(value)}.{advice}")


def _check_messages(record: Record) -> None:
    messages = record.value["messages"]
    if not isinstance(messages, list):
        raise UserError(
            f"{record.where}: `messages` must be a list of objects with `role` and `content`, not {_kind(messages)}."
        )
    if not messages:
        raise UserError(
            f"{record.where}: `messages` is empty. Add at least one message of the assistant, or remove the line."
        )
    for number, message in enumerate(messages, start=1):
        _check_message(f"{record.where}: message {number}", message)


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise UserError(f"{where} must be an object with `role` and `content`, not {_kind(message)}.")
    if not isinstance(message.get("role"), str):
        advice = " `from` and `value` are called `role` and `content` here." if "from" in message else ""
        raise UserError(f'{where}: `role` must be a string such as "user", not {_kind(message.get("role"))}.{advice}')
    if unread := [key for key in UNREAD_MESSAGE_KEYS if key in message]:
        raise UserError(f"{where}: `{unread[0]}` is not yet in this version (all answers are trained). Remove it.")
    content = message.get("content")
    # A message that only calls tools has no content; its template knows what to do.
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        advice = " Join its parts into one string." if isinstance(content, list) else ""
        raise UserError(f"{where}: `content` must be a string, not {_kind(content)}.{advice}")


_CHECKS = {"messages": _check_messages, "prompt": _check_prompt, "text": _check_text}


def _check_unicode(record: Record, line: bytes) -> None:
    """JSON can write half of a surrogate pair, which is no text: tokenizers fail on it without naming the line."""
    if b"\\ud" not in line and b"\\uD" not in line:
        return
    try:
        json.dumps(record.value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start]
        raise UserError(
            f"{record.where}: holds {bad!r}, half of a surrogate pair and no character. Remove it."
        ) from None


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
