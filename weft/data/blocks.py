"""Pieces of a source that one process reads and tokenises at a time; they are sent to worker processes.

A source that cannot be read raises UserError. A row that is no document is given to the callback `bad`, which may
return to skip it.
"""

from __future__ import annotations

import gzip
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, AnyStr, Generic, Protocol, TypeVar

from weft.data.records import Reading, Record, check_unicode, json_row, parse_row
from weft.errors import UserError, first_line
from weft.files import regular_file

# As data.max_row_bytes has it by default.
MAX_ROW_BYTES = 32 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_Item = TypeVar("_Item")
_Line = TypeVar("_Line", str, bytes, covariant=True)


@dataclass(frozen=True, slots=True)
class Row:
    """number: of its line, or its index. where: for messages. escaped: the text may hold half of a surrogate pair.
    position: as in Record."""

    number: int
    where: str
    values: Mapping[str, Any]
    escaped: bool = False
    position: int | None = None


OnBad = Callable[[int, UserError], None]  # is given the number of a row, and what is wrong with it


def refuse(number: int, error: UserError) -> None:
    """The callback that raises the error of a bad row."""
    raise leave_out(error)


def leave_out(error: UserError) -> UserError:
    """The error of a bad row, with the advice to set data.bad_rows=drop."""
    return UserError(f"{error} Or set data.bad_rows=drop, which leaves such rows out.")


class Block(Protocol):
    """size: the bytes of the source that it covers."""

    @property
    def size(self) -> int: ...

    def folder(self) -> str:
        """What paths in its rows are relative to."""

    def rows(self, bad: OnBad = refuse) -> Iterator[Row]:
        """Its readable rows, in order."""

    def records(self, reading: Reading, bad: OnBad = refuse) -> Iterator[tuple[int, Record]]:
        """(line or row number, document) of each valid row."""


class _Rows(ABC, Generic[_Item]):
    """What all kinds of blocks share."""

    __slots__ = ()

    @abstractmethod
    def _items(self) -> Iterator[tuple[int, str, _Item]]:
        """Yield each row's number, its name in messages, and what `_row` reads it from."""

    @abstractmethod
    def _row(self, number: int, name: str, item: _Item) -> Row: ...

    @abstractmethod
    def _origin(self) -> str:
        """The file or table of the rows."""

    def folder(self) -> str:
        """What paths in its rows are relative to."""
        origin = self._origin()
        return origin if os.path.isdir(origin) else os.path.dirname(origin)

    def rows(self, bad: OnBad = refuse) -> Iterator[Row]:
        for number, name, item in self._items():
            try:
                row = self._row(number, name, item)
            except UserError as error:
                bad(number, error)
            else:
                yield row

    def records(self, reading: Reading, bad: OnBad = refuse) -> Iterator[tuple[int, Record]]:
        folder = self.folder()
        for row in self.rows(bad):
            try:
                record = parse_row(row.where, row.values, reading, folder)
                if record.images:
                    record = replace(record, position=row.position)
                if row.escaped:
                    check_unicode(record.where, record.value)
            except UserError as error:
                bad(row.number, error)
            else:
                yield row.number, record


@dataclass(frozen=True, slots=True)
class FileBlock(_Rows[tuple[int, bytes]]):
    """The lines of a JSONL file that begin in its bytes start..stop, each with its first byte. newlines: in the bytes
    before `start`; None if not counted: then a line's number is its first byte. most: bytes of a line. stamp: the state
    of the file when it was opened, for the check that it did not change."""

    path: str
    start: int
    stop: int
    newlines: int | None
    most: int = MAX_ROW_BYTES
    stamp: Stamp | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    def _items(self) -> Iterator[tuple[int, str, tuple[int, bytes]]]:
        data, begin, skipped = self._read()
        # Split at "\n" only: str.splitlines would also cut at U+2028, which JSON strings may hold.
        lines = data.split(b"\n")
        starts = accumulate((len(line) + 1 for line in lines), initial=begin)
        if self.newlines is not None:
            first = self.newlines + skipped + 1
            places = dict(zip(range(first, first + len(lines)), starts, strict=False))
            for number, line in not_blank(enumerate(lines, start=first)):
                yield number, where(self.path, number, by_line=True), (places[number], line)
            return
        for start, line in zip(starts, lines, strict=False):
            if line.strip():
                yield start, f"{self.path}, byte {start}", (start, line)

    def _origin(self) -> str:
        return self.path

    def _row(self, number: int, name: str, item: tuple[int, bytes]) -> Row:
        start, line = item
        if len(line) > self.most:
            raise too_large(name, self.most)
        return replace(_row_of_line(number, name, line), position=start)

    def _read(self) -> tuple[bytes, int, int]:
        """Whole lines, where the first begins, and 1 where a line that began earlier was skipped.

        Of a line that is longer than `most` no more is read than shows it; the block that it begins in says so.
        """
        with reading(self.path, self.stamp), open(self.path, "rb") as file:
            skipped = 0
            if self.start:
                file.seek(self.start - 1)
                rest = file.readline(self.most + 1)
                skipped = int(rest != b"\n")
                while len(rest) > self.most and not rest.endswith(b"\n") and file.tell() < self.stop:
                    rest = file.readline(self.most + 1)
            begin = file.tell()
            data = file.read(max(0, self.stop - begin))
            if data and not data.endswith(b"\n"):
                data += file.readline(self.most + 1)
        return data, begin, skipped


@dataclass(frozen=True, slots=True)
class LineBlock(_Rows[bytes]):
    """Lines of a JSONL file, with their numbers; none is blank."""

    path: str
    lines: Sequence[tuple[int, bytes]]

    @property
    def size(self) -> int:
        return sum(len(line) for _, line in self.lines)

    def _items(self) -> Iterator[tuple[int, str, bytes]]:
        for number, line in self.lines:
            yield number, where(self.path, number, by_line=True), line

    def _origin(self) -> str:
        return self.path

    def _row(self, number: int, name: str, item: bytes) -> Row:
        return _row_of_line(number, name, item)


@dataclass(frozen=True, slots=True)
class RowBlock(_Rows[Any]):
    """Rows as Python values, with an error in place of an unreadable one. numbers: of their lines (by_line), or
    indices. escaped: as in Row. again: whether a number is enough to read its row again."""

    origin: str
    values: Sequence[Any]
    numbers: Sequence[int]
    by_line: bool
    size: int
    escaped: bool = False
    again: bool = False

    def _origin(self) -> str:
        return self.origin

    def _items(self) -> Iterator[tuple[int, str, Any]]:
        for number, values in zip(self.numbers, self.values, strict=True):
            yield number, where(self.origin, number, self.by_line), values

    def _row(self, number: int, name: str, item: Any) -> Row:
        if isinstance(item, UserError):
            raise item
        return Row(number, name, item, self.escaped, number if self.again else None)


@dataclass(frozen=True, slots=True)
class ArrowBlock(_Rows[Any]):
    """Rows of a pyarrow.Table. first: the index of its first row in the whole table. most: bytes of a row. again: as in
    RowBlock."""

    origin: str
    table: Any
    first: int
    size: int
    most: int = MAX_ROW_BYTES
    again: bool = False

    def _origin(self) -> str:
        return self.origin

    def _items(self) -> Iterator[tuple[int, str, Any]]:
        large = self.table.nbytes > self.most
        rows = (self.table.slice(place, 1) for place in range(len(self.table))) if large else self.table.to_pylist()
        for number, values in enumerate(rows, start=self.first):
            yield number, where(self.origin, number, by_line=False), values

    def _row(self, number: int, name: str, item: Any) -> Row:
        if not isinstance(item, dict):  # a table of one row, of some that are large
            if item.nbytes > self.most:
                raise too_large(name, self.most)
            item = item.to_pylist()[0]
        return Row(number, name, without_nulls(item), position=number if self.again else None)


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class Stamp:
    """Size and modification time of a file, which change when it is written."""

    size: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Stamp:
        """The present stamp of a file. Raises UserError for anything but a regular file."""
        with reading(path):
            found = regular_file(Path(path), "a file of data").stat()
            return cls(found.st_size, found.st_mtime_ns)


@contextmanager
def reading(path: str, stamp: Stamp | None = None, key: str = "data.path") -> Iterator[None]:
    """Inside, errors of reading a file become UserErrors. stamp: the file must still have it at the end."""
    try:
        yield
        if stamp is not None:
            now = os.stat(path)
            if Stamp(now.st_size, now.st_mtime_ns) != stamp:
                raise UserError(f"{path}: has changed while it was read. Start again when nothing writes to it.")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is not a whole gzip file: {first_line(error)}. Write it again.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8."
        ) from None
    except OSError as error:
        raise UserError(f"{key}: cannot read {path}: {error.strerror or first_line(error)}.") from None


class _Lines(Protocol[_Line]):
    def readline(self, size: int, /) -> _Line: ...


def lines_of(file: _Lines[AnyStr], path: str, most: int) -> Iterator[tuple[int, AnyStr]]:
    """Yield numbered lines. Raises UserError at the first line longer than `most` bytes, without reading all of it."""
    number = 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise too_large(where(path, number, by_line=True), most)
        yield number, line


def too_large(name: str, most: int) -> UserError:
    """The error of a row that is larger than data.max_row_bytes."""
    return UserError(
        f"{name}: is larger than data.max_row_bytes = {most:,} bytes. Remove it; or if it is a document, set "
        f"data.max_row_bytes to more."
    )


def _row_of_line(number: int, name: str, line: bytes) -> Row:
    return Row(number, name, json_row(name, line), escaped=b"\\ud" in line or b"\\uD" in line)


def not_blank(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without blank ones and without a byte order mark."""
    for number, line in lines:
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            yield number, text


def where(origin: str, number: int, by_line: bool) -> str:
    """A document's name in messages: file:line, or file[row] with rows counted from 0."""
    return f"{origin}:{number}" if by_line else f"{origin}[{number}]"


def without_nulls(value: Any) -> Any:
    """The value without nulls in its objects: in a table every object has the keys of all others."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
