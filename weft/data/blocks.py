"""Pieces of a source that one process reads and tokenises at a time. They travel to worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.data.records import Reading, Record, check_unicode, parse_line, parse_row

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Block(Protocol):
    """size: bytes of the source that it stands for."""

    @property
    def size(self) -> int: ...

    def records(self, reading: Reading) -> Iterator[tuple[int, Record]]:
        """(line or row number, document) of each; raises UserError at the first that is none."""


@dataclass(frozen=True, slots=True)
class FileBlock:
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

    def records(self, reading: Reading) -> Iterator[tuple[int, Record]]:
        data, begin, skipped = self._read()
        if self.newlines is not None:
            # Split at "\n" only: str.splitlines would also cut at U+2028, which JSON strings may hold.
            lines = data.split(b"\n")
            for number, line in not_blank(enumerate(lines, start=self.newlines + skipped + 1)):
                yield number, parse_line(where(self.path, number, by_line=True), line, reading)
            return
        for line in data.split(b"\n"):
            if line.strip():
                yield begin, parse_line(f"{self.path}, byte {begin}", line, reading)
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
class LineBlock:
    """Lines of a JSONL file, with their numbers; none is blank."""

    path: str
    lines: Sequence[tuple[int, bytes]]

    @property
    def size(self) -> int:
        return sum(len(line) for _, line in self.lines)

    def records(self, reading: Reading) -> Iterator[tuple[int, Record]]:
        for number, line in self.lines:
            yield number, parse_line(where(self.path, number, by_line=True), line, reading)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows as Python values. numbers: of their lines (by_line) or places. escaped: text may hold half a character."""

    origin: str
    rows: Sequence[Any]
    numbers: Sequence[int]
    by_line: bool
    size: int
    escaped: bool = False

    def records(self, reading: Reading) -> Iterator[tuple[int, Record]]:
        for number, row in zip(self.numbers, self.rows, strict=True):
            record = parse_row(where(self.origin, number, self.by_line), row, reading)
            if self.escaped:
                check_unicode(record)
            yield number, record


@dataclass(frozen=True, slots=True)
class ArrowBlock:
    """Rows of a pyarrow.Table. first: the place of its first row in the whole."""

    origin: str
    table: Any
    first: int
    size: int

    def records(self, reading: Reading) -> Iterator[tuple[int, Record]]:
        for number, row in enumerate(self.table.to_pylist(), start=self.first):
            yield number, parse_row(where(self.origin, number, by_line=False), without_nulls(row), reading)


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
