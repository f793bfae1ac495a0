"""Pieces of a source that one process reads and tokenises at a time. They travel to worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.data.records import Reading, Record, check_unicode, json_row, parse_row

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """number: of its line, or its place. where: in messages. escaped: its text may hold half a character."""

    number: int
    where: str
    values: Mapping[str, Any]
    escaped: bool = False


class Block(Protocol):
    """size: bytes of the source that it stands for."""

    @property
    def size(self) -> int: ...

    def rows(self) -> Iterator[Row]:
        """Its rows in order; raises UserError at the first that cannot be read."""

    def records(self, reading: Reading) -> Iterator[tuple[int, Record]]:
        """(line or row number, document) of each row; raises UserError at the first that is none."""


class _Rows:
    """What all blocks do alike with their rows."""

    __slots__ = ()

    def rows(self) -> Iterator[Row]:
        raise NotImplementedError

    def records(self, reading: Reading) -> Iterator[tuple[int, Record]]:
        for row in self.rows():
            record = parse_row(row.where, row.values, reading)
            if row.escaped:
                check_unicode(record.where, record.value)
            yield row.number, record


@dataclass(frozen=True, slots=True)
class FileBlock(_Rows):
    """The lines of a JSONL file that begin in its bytes start..stop.

    newlines: in the bytes before start; None where nobody has counted: then lines are numbered by their first byte.
    """

    path: str
    start: int
    stop: int
    newlines: int | None

    @property
    def size(self) -> int:
        return self.stop - self.start

    def rows(self) -> Iterator[Row]:
        data, begin, skipped = self._read()
        if self.newlines is not None:
            # Split at "\n" only: str.splitlines would also cut at U+2028, which JSON strings may hold.
            lines = data.split(b"\n")
            for number, line in not_blank(enumerate(lines, start=self.newlines + skipped + 1)):
                yield _row_of_line(number, where(self.path, number, by_line=True), line)
            return
        for line in data.split(b"\n"):
            if line.strip():
                yield _row_of_line(begin, f"{self.path}, byte {begin}", line)
            begin += len(line) + 1

    def _read(self) -> tuple[bytes, int, int]:
        """Whole lines, where the first begins, and 1 where a line that began earlier was skipped."""
        with open(self.path, "rb") as file:
            skipped = 0
            if self.start:
                file.seek(self.start - 1)
                skipped = int(file.readline() != b"\n")
            begin = file.tell()
            data = file.read(max(0, self.stop - begin))
            if data and not data.endswith(b"\n"):
                data += file.readline()
        return data, begin, skipped


@dataclass(frozen=True, slots=True)
class LineBlock(_Rows):
    """Lines of a JSONL file, with their numbers; none is blank."""

    path: str
    lines: Sequence[tuple[int, bytes]]

    @property
    def size(self) -> int:
        return sum(len(line) for _, line in self.lines)

    def rows(self) -> Iterator[Row]:
        for number, line in self.lines:
            yield _row_of_line(number, where(self.path, number, by_line=True), line)


@dataclass(frozen=True, slots=True)
class RowBlock(_Rows):
    """Rows as Python values. numbers: of their lines (by_line) or places. escaped: text may hold half a character."""

    origin: str
    values: Sequence[Any]
    numbers: Sequence[int]
    by_line: bool
    size: int
    escaped: bool = False

    def rows(self) -> Iterator[Row]:
        for number, values in zip(self.numbers, self.values, strict=True):
            yield Row(number, where(self.origin, number, self.by_line), values, self.escaped)


@dataclass(frozen=True, slots=True)
class ArrowBlock(_Rows):
    """Rows of a pyarrow.Table. first: the place of its first row in the whole."""

    origin: str
    table: Any
    first: int
    size: int

    def rows(self) -> Iterator[Row]:
        for number, values in enumerate(self.table.to_pylist(), start=self.first):
            yield Row(number, where(self.origin, number, by_line=False), without_nulls(values))


def _row_of_line(number: int, name: str, line: bytes) -> Row:
    return Row(number, name, json_row(name, line), escaped=b"\\ud" in line or b"\\uD" in line)


def not_blank(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without blank ones, and without a byte order mark."""
    for number, line in lines:
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            yield number, text


def where(origin: str, number: int, by_line: bool) -> str:
    """How messages name a document: file:line, or file[row] with rows counted from 0 as tables are."""
    return f"{origin}:{number}" if by_line else f"{origin}[{number}]"


def without_nulls(value: Any) -> Any:
    """A value without the nulls in its objects: in a table every object has the keys of all."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
