"""Checks the tokens of preferences, and finds the common beginning of answers without a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.data.encode import Encoded
from weft.data.records import Record
from weft.data.table import common_beginning
from weft.errors import BadRowError


def separate_answers(records: Sequence[Record], encoded: Sequence[Encoded]) -> list[Encoded]:
    """The documents of preferences, checked. For `text` documents, the common beginning of both answers is the prompt,
    which is not trained. Raises BadRowError for a row whose answers have the same tokens, or no tokens."""
    out = list(encoded)
    for first, second in _pairs(records):
        location, chosen, rejected = records[first].location, encoded[first], encoded[second]
        if chosen.ids == rejected.ids:
            raise BadRowError(f"{location}: `chosen` and `rejected` have the same tokens. Remove the row.")
        if records[first].format == "text":
            shared = common_beginning(chosen.ids, rejected.ids)
            for index in (first, second):
                ids = encoded[index].ids
                out[index] = replace(encoded[index], trained=[int(position >= shared) for position in range(len(ids))])
    for record, document in zip(records, out, strict=True):
        if not any(document.trained[1:]):
            name = record.role if record.role in ("chosen", "rejected") else "completion"
            raise BadRowError(f"{record.location}: `{name}` has no token after the prompt. Remove the row.")
    return out


def _pairs(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """Yields the indices of chosen and rejected answers."""
    for index, record in enumerate(records):
        if record.role == "chosen":
            yield index, index + 1
