"""Parses rows of `weft distill` that contain a teacher's predictions or the name of their teacher.

{..., "teacher_top_ids": [[ids], ...], "teacher_top_logprobs": [[log-probabilities], ...]}    in any document {...,
"subject": "math"}    the column of distill.teacher_column, a name of distill.teachers

The lists have an entry for each token of the document, or for each trained token: the likeliest tokens in the teacher's
prediction of that token. Entries of untrained tokens may be empty or null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config.distill_schema import TOP_IDS as IDS
from weft.config.distill_schema import TOP_LOGPROBS as LOGPROBS
from weft.config.yaml12 import override
from weft.data.columns import add_named_columns
from weft.data.messages import describe_type
from weft.data.records import ParseOptions, Record, TopLists, parse_row
from weft.errors import BadRowError, UserError

if TYPE_CHECKING:
    from weft.data.encode import Encoded

_MASS = 1e-3  # tolerance for a sum of rounded (bf16) probabilities above 1
_LARGEST = 2**31 - 1


def parse_taught(location: str, row: Mapping[str, Any], reading: ParseOptions, folder: str = "") -> Record:
    """The document of a row, with its teacher and its lists. Arguments: as in parse_row. Raises UserError."""
    names = [IDS, LOGPROBS, *([reading.teacher_column] if reading.teachers else [])]
    columns = {name: path for name, path in reading.columns.items() if name in names}
    lists = {name: columns.pop(name) for name in (IDS, LOGPROBS) if name in columns}
    teacher, is_listed = 0, reading.listed == "all"
    if reading.teachers:
        teacher = _teacher(location, add_named_columns(location, row, columns), reading)
        is_listed = reading.teachers[teacher] in reading.listed
    document = {name: value for name, value in row.items() if name not in names}
    columns = {name: path for name, path in reading.columns.items() if name not in names}
    record = parse_row(location, document, replace(reading, columns=columns), folder)
    return replace(
        record, teacher=teacher, lists=_lists(location, add_named_columns(location, row, lists)) if is_listed else None
    )


def _teacher(location: str, row: Mapping[str, Any], reading: ParseOptions) -> int:
    name, value = reading.teacher_column, row.get(reading.teacher_column)
    teachers = ", ".join(reading.teachers)
    if value is None:
        raise UserError(
            f"{location}: has no `{name}`, the column of distill.teacher_column. It must name a row's teacher: one of "
            f"{teachers}."
        )
    if value not in reading.teachers:
        raise UserError(
            f"{location}: `{name}` is {value!r:.60}, which is not a name in distill.teachers. Names: {teachers}."
        )
    return reading.teachers.index(value)


def _lists(location: str, row: Mapping[str, Any]) -> TopLists:
    for name in (IDS, LOGPROBS):
        if row.get(name) is None:
            raise UserError(
                f"{location}: has no `{name}`, but its teacher is `data`. Name the column in data.columns, as in "
                f"{override('data.columns', {name: name.removeprefix('teacher_')})}."
            )
        if not isinstance(row[name], Sequence) or isinstance(row[name], str):
            raise UserError(f"{location}: `{name}` must be a list of lists, not {describe_type(row[name])}.")
    ids, logprobs = ([entry if entry is not None else [] for entry in row[name]] for name in (IDS, LOGPROBS))
    for index, pair in enumerate(zip(ids, logprobs, strict=False)):
        if not all(isinstance(entry, list) for entry in pair):
            raise UserError(f"{location}: entry {index} of `{IDS}` or `{LOGPROBS}` is not a list.")
        if len(pair[0]) != len(pair[1]):
            raise UserError(
                f"{location}: entry {index} has {len(pair[0])} ids and {len(pair[1])} log-probabilities. Each id needs "
                "one."
            )
    if len(ids) != len(logprobs):
        raise UserError(f"{location}: `{IDS}` has {len(ids)} entries, but `{LOGPROBS}` has {len(logprobs)}.")
    width = max(map(len, ids), default=0)
    try:
        ids_TK = np.array([[*entry, *[-1] * (width - len(entry))] for entry in ids]).reshape(len(ids), width)
        numbers = [[*entry, *[-np.inf] * (width - len(entry))] for entry in logprobs]
        logprobs_TK = np.array(numbers, np.float64).reshape(len(ids), width)
    except (ValueError, TypeError, OverflowError):
        raise UserError(
            f"{location}: `{IDS}` must hold lists of integers, and `{LOGPROBS}` lists of numbers."
        ) from None
    if ids_TK.size and not np.issubdtype(ids_TK.dtype, np.integer):
        raise UserError(f"{location}: `{IDS}` must hold lists of integers, from 0.")
    is_used = np.arange(width) < np.array([len(entry) for entry in ids])[:, None]
    _refuse_entry(location, (ids_TK < 0) & is_used | (ids_TK > _LARGEST), "has an id that is not a token")
    ordered = np.sort(np.where(is_used, ids_TK, -1 - np.arange(width)), 1)
    _refuse_entry(location, ordered[:, 1:] == ordered[:, :-1], "has an id twice")
    wrong = ~np.isfinite(logprobs_TK) & is_used | (logprobs_TK > _MASS)
    _refuse_entry(location, wrong, "has a log-probability that is not a finite number up to 0")
    mass = np.exp(logprobs_TK).sum(1, keepdims=True)
    _refuse_entry(
        location, mass > 1 + _MASS, "has probabilities with a sum above 1. Write log-probabilities, not logits"
    )
    return TopLists(ids_TK.astype(np.int32), np.minimum(logprobs_TK, 0.0).astype(np.float32))


def _refuse_entry(location: str, wrong_TK: Any, problem: str) -> None:
    if wrong_TK.any():
        index = int(np.flatnonzero(wrong_TK.any(1))[0])
        raise UserError(f"{location}: entry {index} of `{IDS}` and `{LOGPROBS}` {problem}.")


def with_lists(records: Sequence[Record], encoded: Sequence[Encoded]) -> list[Encoded]:
    """The documents with the lists of their rows, an entry for each token. Raises BadRowError if the number of entries
    is neither that of all tokens nor that of trained tokens, or if a trained token has no entry."""
    return [
        document if record.lists is None else replace(document, lists=_placed(record.location, record.lists, document))
        for record, document in zip(records, encoded, strict=True)
    ]


def _placed(location: str, lists: TopLists, document: Encoded) -> TopLists:
    is_trained = np.array(document.trained, bool)
    is_trained[:1] = False  # the first token is never predicted
    tokens, trained, width = len(is_trained), int(is_trained.sum()), lists.ids.shape[1]
    if len(lists.ids) not in (tokens, trained):
        raise BadRowError(
            f"{location}: `{IDS}` has {len(lists.ids)} entries, but the document has {tokens} tokens, of which "
            f"{trained} are trained. Write an entry for each token or each trained token. If the teacher has other "
            "tokens, use rows of `input_ids`, which weft does not tokenise again."
        )
    if len(lists.ids) < tokens:
        ids, logprobs = np.full((tokens, width), -1, np.int32), np.full((tokens, width), -np.inf, np.float32)
        ids[is_trained], logprobs[is_trained] = lists.ids, lists.logprobs
        lists = TopLists(ids, logprobs)
    if (missing := np.flatnonzero(is_trained & ~(lists.ids >= 0).any(1))).size:
        raise BadRowError(f"{location}: token {missing[0]} is trained, but its entry of `{IDS}` is empty.")
    return lists
