"""Blocks: the pieces of a source that one process reads and tokenises at a time. Blocks are sent to worker processes.

A source that cannot be read raises UserError. A row that is not a valid document is passed to the callback `bad`; the
row is skipped if the callback returns.
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

# The default of data.max_row_bytes.
MAX_ROW_BYTES = 32 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_Item = TypeVar("_Item")
_Line = TypeVar("_Line", str, bytes, covariant=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source.

    number: the number of its line (from 1), or its index (from 0). where: its name in messages. escaped: whether the
    text may hold half of a surrogate pair. position: as in Record.
    """

    number: int
    where: str
    values: Mapping[str, Any]
    escaped: bool = False
    position: int | None = None


OnBad = Callable[[int, UserError], None]  # (number of the row, what is wrong with it)


def refuse(number: int, error: UserError) -> None:
    """The callback for data.bad_rows=error: raises the error, with the advice of `leave_out`."""
    raise leave_out(error)


def leave_out(error: UserError) -> UserError:
    """Returns the error of a bad row with the advice to set data.bad_rows=drop."""
    return UserError(f"{error} Or set data.bad_rows=drop, which leaves such rows out.")


class Block(Protocol):
    """size: bytes of the source that the block covers, about."""

    @property
    def size(self) -> int: ...

    def folder(self) -> str:
        """The folder that paths in the rows are relative to."""

    def rows(self, bad: OnBad = refuse) -> Iterator[Row]:
        """Yields the readable rows, in order."""

    def records(self, reading: Reading, bad: OnBad = refuse) -> Iterator[tuple[int, Record]]:
        """Yields (line or row number, document) for each valid row."""


class _Rows(ABC, Generic[_Item]):
    """The base class of all blocks."""

    __slots__ = ()

    @abstractmethod
    def _items(self) -> Iterator[tuple[int, str, _Item]]:
        """Yields (number of the row, its name in messages, the item that `_row` makes the row from)."""

    @abstractmethod
    def _row(self, number: int, name: str, item: _Item) -> Row: ...

    @abstractmethod
    def _origin(self) -> str:
        """The file or table of the rows."""

    def folder(self) -> str:
        """The folder that paths in the rows are relative to."""
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
    """The lines of a JSONL file whose first byte is in start..stop (stop excluded).

    newlines: line ends before byte `start`; None if not counted, and then a line's number is the offset of its first
    byte. most: the largest allowed line, in bytes. stamp: the state of the file when it was opened; reading checks that
    the file did not change.
    """

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
        """(whole lines, offset of the first, 1 if the end of a line that began before `start` was skipped, else 0).

        Of a line longer than `most`, only as much is kept as shows its length; the block where it begins reports it.
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
    """Lines of a JSONL file with their numbers, without blank lines."""

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
    """Rows as Python values; an unreadable row is a UserError instead. numbers: the lines of the rows if by_line, else
    their indices. escaped: as in Row. again: whether a row can be read again by its number."""

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
    """Rows of a pyarrow.Table. first: the index of the block's first row in the whole source. most: the largest allowed
    row, in bytes. again: as in RowBlock."""

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
        if not isinstance(item, dict):  # a table of one row: `_items` slices a large table
            if item.nbytes > self.most:
                raise too_large(name, self.most)
            item = item.to_pylist()[0]
        return Row(number, name, without_nulls(item), position=number if self.again else None)


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class Stamp:
    """Size in bytes and modification time in nanoseconds of a file: a write changes at least one of them."""

    size: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Stamp:
        """The current stamp of a file. Raises UserError for anything but a regular file."""
        with reading(path):
            found = regular_file(Path(path), "a file of data").stat()
            return cls(found.st_size, found.st_mtime_ns)


@contextmanager
def reading(path: str, stamp: Stamp | None = None, key: str = "data.path") -> Iterator[None]:
    """A context in which errors of reading a file become UserErrors. stamp: if given, it must still match at the end.
    key: the config key for messages."""
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
    """Yields (number from 1, line). Raises UserError at the first line longer than `most`, without reading all of it.

    most: bytes for a binary file, characters for a text file.
    """
    number = 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise too_large(where(path, number, by_line=True), most)
        yield number, line


def too_large(name: str, most: int) -> UserError:
    """The error for a row that is larger than data.max_row_bytes."""
    return UserError(
        f"{name}: is larger than data.max_row_bytes = {most:,} bytes. Remove it; or if it is a document, set "
        f"data.max_row_bytes to more."
    )


def _row_of_line(number: int, name: str, line: bytes) -> Row:
    return Row(number, name, json_row(name, line), escaped=b"\\ud" in line or b"\\uD" in line)


def not_blank(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The numbered lines without blank lines and without the byte order mark of line 1."""
    for number, line in lines:
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            yield number, text


def where(origin: str, number: int, by_line: bool) -> str:
    """The name of a row in messages: file:line, or file[row] with rows counted from 0."""
    return f"{origin}:{number}" if by_line else f"{origin}[{number}]"


def without_nulls(value: Any) -> Any:
    """The value without null entries in its objects. In an Arrow table every object has the keys of all objects."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
