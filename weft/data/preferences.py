"""Splits rows of preferences into rows of single answers, which records.py parses like other rows.

{"prompt": ..., "chosen": ..., "rejected": ...}     TRL: text or messages; without `prompt`, the common beginning
{"conversations": [...], "chosen": {...}, "rejected": {...}}, {"instruction": ..., "input": ..., "chosen": ..., ...}
                                                    LLaMA-Factory
{"messages": [...], "chosen": {...}, "rejected": {...}}, {"system": ..., "question": ..., "chosen": ..., ...}    axolotl
{"prompt": ..., "completion": ..., "label": true}   TRL's unpaired answers; LLaMA-Factory's `messages` and `kto_tag`

A pair has two answers, chosen and rejected; an unpaired row has one. Further columns (system, tools, images, ...) are
part of the prompt, and so apply to both answers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.data.columns import add_named_columns
from weft.data.messages import describe_type, finite_number
from weft.data.records import CONVERSATIONS, QUESTIONS, ParseOptions, Record, Role, is_json_list, parse_row
from weft.errors import UserError
from weft.strict_json import parse

NEEDED = "`prompt`, `chosen` and `rejected`, `chosen` and `rejected` alone, or `prompt`, `completion` and `label`"

_PAIR = ("chosen", "rejected")
_LABELS = ("label", "kto_tag")
# Columns of the prompt. The first that a row has is read.
_PROMPTS = ("prompt", "messages", *CONVERSATIONS, "instruction", *QUESTIONS)


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """An answer of a row. values: a row of documents; `text` begins with the prompt, the common beginning of both
    answers."""

    role: Role
    values: Mapping[str, Any]
    margin: float = 0.0


def split_preferences(location: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> list[AnswerRow]:
    """The answers of a row, chosen before rejected. columns: as data.columns. Raises UserError."""
    named = add_named_columns(location, row, columns) if columns else row
    present = {name: _unquoted(value) for name, value in named.items() if value is not None}
    label = next((name for name in _LABELS if name in present), None)
    if all(name in present for name in _PAIR):
        return _pair(location, present)
    if label is None or not any(name in present for name in ("completion", "messages", *CONVERSATIONS)):
        names = ", ".join(f"`{name}`" for name in row) or "no columns"
        raise UserError(
            f"{location}: has {names}, but preferences need {NEEDED}. Map your columns to them in data.columns."
        )
    if not isinstance(present[label], bool) and present[label] not in (0, 1):
        raise UserError(f"{location}: `{label}` must be true or false, not {describe_type(present[label])}.")
    values = {name: value for name, value in present.items() if name not in _LABELS}
    if "completion" not in values:  # LLaMA-Factory: the last answer of a conversation
        column = next(name for name in ("messages", *CONVERSATIONS) if name in values)
        turns = values.pop(column)
        if not isinstance(turns, list) or len(turns) < 2:
            raise UserError(f"{location}: `{column}` must be a list of messages that ends with the answer.")
        values |= {"prompt": turns[:-1], "completion": turns[-1:]}
    _check_answer(location, "completion", values["completion"])
    return [AnswerRow("desired" if present[label] else "undesired", values)]


def parse_answers(location: str, row: Mapping[str, Any], reading: ParseOptions, folder: str = "") -> list[Record]:
    """The documents of a row of preferences. Arguments: as in parse_row. Raises UserError."""
    options, records = replace(reading, columns={}), []
    for answer in split_preferences(location, row, reading.columns):
        record = parse_row(location, answer.values, options, folder)
        records.append(replace(record, role=answer.role, margin=answer.margin))
    if records[0].images != records[-1].images:
        raise UserError(f"{location}: the answers have different images. Images must be in the prompt.")
    return records


def _pair(location: str, row: Mapping[str, Any]) -> list[AnswerRow]:
    chosen, rejected = row["chosen"], row["rejected"]
    for name in _PAIR:
        _check_answer(location, name, row[name])
    if type(chosen) is not type(rejected):
        raise UserError(
            f"{location}: `chosen` is {describe_type(chosen)} but `rejected` {describe_type(rejected)}. Write both as "
            "text, or both as messages."
        )
    if chosen == rejected:
        raise UserError(f"{location}: `chosen` and `rejected` are equal: there is nothing to prefer. Remove the row.")
    margin = finite_number(location, "margin", row.get("margin", 0.0))
    prompt = next((name for name in _PROMPTS if name in row), None)
    shared = {n: v for n, v in row.items() if n not in (*_PAIR, *_PROMPTS, *_LABELS, "margin", "completion")}
    texts = isinstance(chosen, str)
    question = None if prompt is None else row[prompt]
    if prompt == "instruction":  # Alpaca's columns
        names = [name for name in ("instruction", "input") if row.get(name)]
        question = "\n".join(str(row[name]) for name in names)
    if texts and prompt is None:
        halves = [{"text": chosen}, {"text": rejected}]
    elif texts and (isinstance(question, list) or prompt != "prompt"):
        if isinstance(question, str):
            question = [{"role": "user", "content": question}]
        halves = [
            {"prompt": question, "completion": [{"role": "assistant", "content": text}]} for text in (chosen, rejected)
        ]
    elif texts:
        halves = [{"prompt": question, "completion": text} for text in (chosen, rejected)]
    else:
        halves = _conversations(
            location, question, *(turns if isinstance(turns, list) else [turns] for turns in (chosen, rejected))
        )
    return [
        AnswerRow("chosen", {**shared, **halves[0]}, margin),
        AnswerRow("rejected", {**shared, **halves[1]}, margin),
    ]


def _conversations(
    location: str, question: Any, chosen: Sequence[Any], rejected: Sequence[Any]
) -> list[dict[str, Any]]:
    """Prompt and completion of two answers in messages. Without a prompt of messages, or if the answers repeat it,
    their common beginning is the prompt."""
    prompt = list(question) if isinstance(question, list) else []
    if not prompt or chosen[: len(prompt)] == prompt:
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if shared:
            prompt, chosen, rejected = list(chosen[:shared]), chosen[shared:], rejected[shared:]
    if not prompt and isinstance(question, str):
        prompt = [{"role": "user", "content": question}]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise UserError(f"{location}: `{name}` has no answer after the common beginning of both conversations.")
    if not prompt:
        raise UserError(f"{location}: `chosen` and `rejected` have no common beginning, and the row has no `prompt`.")
    return [{"prompt": prompt, "completion": list(answer)} for answer in (chosen, rejected)]


def _unquoted(value: Any) -> Any:
    """Messages parsed from JSON text, as in tables without nested columns."""
    return parse(value) if isinstance(value, str) and is_json_list(value) else value


def _check_answer(location: str, name: str, value: Any) -> None:
    empty = not value if isinstance(value, str | list | dict) else None
    if isinstance(value, dict) and value:
        empty = value.get("content", value.get("value")) in ("", None) and not value.get("tool_calls")
    if empty is None:
        raise UserError(f"{location}: `{name}` must be text or messages, not {describe_type(value)}.")
    if empty or (isinstance(value, str) and not value.strip()):
        raise UserError(f"{location}: `{name}` is empty. Remove the row, or write the answer.")
