"""Blocks: parts of a source. A process reads and tokenises one block at a time; blocks are sent to worker processes.

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
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, AnyStr, Generic, Protocol, TypeVar

from weft.data.labels import parse_labelled
from weft.data.preferences import parse_answers
from weft.data.records import ParseOptions, Record, json_row, parse_row
from weft.data.taught import parse_taught
from weft.errors import UserError, first_line
from weft.files import regular_file
from weft.strict_json import JsonError, check_unicode, parse

# The default of data.max_row_bytes.
MAX_ROW_BYTES = 32 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_Item = TypeVar("_Item")
_Convert = Callable[[Any], Any]
_Line = TypeVar("_Line", str, bytes, covariant=True)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source.

    number: the number of its line (from 1), or its index (from 0). location: its name in messages. values: include the
    data's nulls. escaped: whether the text may contain half of a surrogate pair. position: as in Record. cleaners: as
    in _ColumnConverters.
    """

    number: int
    location: str
    values: Mapping[str, Any]
    escaped: bool = False
    position: int | None = None
    cleaners: Mapping[str, _Convert] = field(default_factory=dict)

    def cleaned(self) -> Mapping[str, Any]:
        """The values for rendering and training: without the null entries in structs of an Arrow table.

        Every struct of a table has the keys of all structs, so a null entry cannot be distinguished from a missing one;
        like TRL, weft removes both. Nulls in columns, lists and Json() values stay.
        """
        if not self.cleaners:
            return self.values
        return {**self.values, **{name: clean(self.values[name]) for name, clean in self.cleaners.items()}}


OnBad = Callable[[int, UserError], None]  # (number of the row, its error)


def raise_bad_row(number: int, error: UserError) -> None:
    """The callback for data.bad_rows=error: raises the error, with the advice of `with_skip_advice`."""
    raise with_skip_advice(error)


def with_skip_advice(error: UserError) -> UserError:
    """Returns the error of a bad row, with advice to set data.bad_rows=drop added."""
    text = str(error)
    return UserError(f"{text}{'' if text.endswith(('.', '?')) else '.'} Or skip such rows with data.bad_rows=drop.")


class Block(Protocol):
    """size: approximate bytes of the block in the source."""

    @property
    def size(self) -> int: ...

    def folder(self) -> str:
        """The folder to which paths in the rows are relative."""

    def rows(self, bad: OnBad = raise_bad_row) -> Iterator[SourceRow]:
        """Yields the readable rows, in order."""

    def records(self, options: ParseOptions, bad: OnBad = raise_bad_row) -> Iterator[tuple[int, Record]]:
        """Yields (line or row number, document) for each valid row; for a preference pair, two documents."""


class _BlockBase(ABC, Generic[_Item]):
    """The base class of all blocks."""

    __slots__ = ()

    @abstractmethod
    def _items(self) -> Iterator[tuple[int, str, _Item]]:
        """Yields (number of the row, its name in messages, the item from which `_row` builds the row)."""

    @abstractmethod
    def _row(self, number: int, name: str, item: _Item) -> SourceRow: ...

    @abstractmethod
    def _origin(self) -> str:
        """The file or table of the rows."""

    def folder(self) -> str:
        """The folder to which paths in the rows are relative."""
        origin = self._origin()
        return origin if os.path.isdir(origin) else os.path.dirname(origin)

    def rows(self, bad: OnBad = raise_bad_row) -> Iterator[SourceRow]:
        for number, name, item in self._items():
            try:
                row = self._row(number, name, item)
            except UserError as error:
                bad(number, error)
            else:
                yield row

    def records(self, options: ParseOptions, bad: OnBad = raise_bad_row) -> Iterator[tuple[int, Record]]:
        folder = self.folder()
        for row in self.rows(bad):
            try:
                if options.preferences:
                    records = parse_answers(row.location, row.cleaned(), options, folder)
                elif options.label:
                    records = [parse_labelled(row.location, row.cleaned(), options, folder)]
                elif options.taught:
                    records = [parse_taught(row.location, row.cleaned(), options, folder)]
                else:
                    records = [parse_row(row.location, row.cleaned(), options, folder)]
                for record in records if row.escaped else ():
                    check_unicode(record.location, record.value)
            except UserError as error:
                bad(row.number, error)
            else:
                for record in records:
                    yield row.number, replace(record, position=row.position) if record.images else record


@dataclass(frozen=True, slots=True)
class FileBlock(_BlockBase[tuple[int, bytes]]):
    """The lines of a JSONL file whose first byte is in start..stop (stop excluded).

    newlines: line ends before byte `start`; None if not counted, and then a line's number is the offset of its first
    byte. max_bytes: the largest allowed line. stamp: the state of the file when it was opened; reading checks that the
    file did not change.
    """

    path: str
    start: int
    stop: int
    newlines: int | None
    max_bytes: int = MAX_ROW_BYTES
    stamp: FileStamp | None = None

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
                yield number, row_name(self.path, number, by_line=True), (places[number], line)
            return
        for start, line in zip(starts, lines, strict=False):
            if line.strip():
                yield start, f"{self.path}, byte {start}", (start, line)

    def _origin(self) -> str:
        return self.path

    def _row(self, number: int, name: str, item: tuple[int, bytes]) -> SourceRow:
        start, line = item
        if len(line) > self.max_bytes:
            raise too_large(name, self.max_bytes)
        return replace(_row_of_line(number, name, line), position=start)

    def _read(self) -> tuple[bytes, int, int]:
        """(complete lines, offset of the first, 1 if the end of a line that began before `start` was skipped, else 0).
        A line longer than `max_bytes` is cut just above this length; the block in which it begins reports it.
        """
        with file_errors(self.path, self.stamp), open(self.path, "rb") as file:
            skipped = 0
            if self.start:
                file.seek(self.start - 1)
                line_end = file.readline(self.max_bytes + 1)
                skipped = int(line_end != b"\n")
                while len(line_end) > self.max_bytes and not line_end.endswith(b"\n") and file.tell() < self.stop:
                    line_end = file.readline(self.max_bytes + 1)
            begin = file.tell()
            data = file.read(max(0, self.stop - begin))
            if data and not data.endswith(b"\n"):
                data += file.readline(self.max_bytes + 1)
        return data, begin, skipped


@dataclass(frozen=True, slots=True)
class LineBlock(_BlockBase[bytes]):
    """Lines of a JSONL file with their numbers, without blank lines."""

    path: str
    lines: Sequence[tuple[int, bytes]]

    @property
    def size(self) -> int:
        return sum(len(line) for _, line in self.lines)

    def _items(self) -> Iterator[tuple[int, str, bytes]]:
        for number, line in self.lines:
            yield number, row_name(self.path, number, by_line=True), line

    def _origin(self) -> str:
        return self.path

    def _row(self, number: int, name: str, item: bytes) -> SourceRow:
        return _row_of_line(number, name, item)


@dataclass(frozen=True, slots=True)
class RowBlock(_BlockBase[Any]):
    """Rows as Python values; an unreadable row is replaced by a UserError. numbers: the lines of the rows if by_line,
    else their indices. escaped: as in SourceRow. again: whether a row can be read again by its number."""

    origin: str
    values: Sequence[Any]
    numbers: Sequence[int]
    by_line: bool
    size: int
    escaped: bool = False
    can_reread: bool = False

    def _origin(self) -> str:
        return self.origin

    def _items(self) -> Iterator[tuple[int, str, Any]]:
        for number, values in zip(self.numbers, self.values, strict=True):
            yield number, row_name(self.origin, number, self.by_line), values

    def _row(self, number: int, name: str, item: Any) -> SourceRow:
        if isinstance(item, UserError):
            raise item
        return SourceRow(number, name, item, self.escaped, number if self.can_reread else None)


@dataclass(frozen=True, slots=True)
class ArrowBlock(_BlockBase[Any]):
    """Rows of a pyarrow.Table. first: index of the block's first row in the source. max_bytes: the largest allowed row.
    again: as in RowBlock."""

    origin: str
    table: Any
    first: int
    size: int
    max_bytes: int = MAX_ROW_BYTES
    can_reread: bool = False

    def _origin(self) -> str:
        return self.origin

    def _items(self) -> Iterator[tuple[int, str, Any]]:
        large, fields = self.table.nbytes > self.max_bytes, _ColumnConverters.from_schema(self.table.schema)
        rows = (self.table.slice(index, 1) for index in range(len(self.table))) if large else self.table.to_pylist()
        for number, values in enumerate(rows, start=self.first):
            yield number, row_name(self.origin, number, by_line=False), (fields, values)

    def _row(self, number: int, name: str, item: Any) -> SourceRow:
        fields, values = item
        if not isinstance(values, dict):  # a table of one row: `_items` slices a large table
            if values.nbytes > self.max_bytes:
                raise too_large(name, self.max_bytes)
            values = values.to_pylist()[0]
        for column, decode in fields.decoders.items():
            try:
                values[column] = decode(values[column])
            except JsonError as error:
                raise UserError(
                    f"{name}: column `{column}` is of type Json(), but its text is not valid JSON: {error}."
                ) from None
        return SourceRow(
            number, name, values, bool(fields.decoders), number if self.can_reread else None, fields.cleaners
        )


@dataclass(frozen=True, slots=True)
class _ColumnConverters:
    """Converters for the columns of an Arrow table, by their types.

    decoders: name of a column with JSON texts (datasets stores its type Json() as text) -> a function that parses these
    texts in a value. Raises JsonError. cleaners: name of a column with structs -> a function that removes null entries
    of structs in a value.
    """

    decoders: Mapping[str, _Convert]
    cleaners: Mapping[str, _Convert]

    @classmethod
    def from_schema(cls, schema: Any) -> _ColumnConverters:
        """schema: a pyarrow.Schema."""
        decoders = {field.name: decode for field in schema if (decode := _decoder(field.type))}
        return cls(decoders, {field.name: clean for field in schema if (clean := _cleaner(field.type))})


def _decoder(kind: Any) -> _Convert | None:
    """A function that parses the JSON texts in a value of an Arrow type; None if the type contains none."""
    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda text: None if text is None else parse(text)
    if inner := _in_list(kind, _decoder):
        return inner
    inside = {} if not _is_struct(kind) else {f.name: decode for f in kind if (decode := _decoder(f.type))}
    if not inside:
        return None

    def struct(value: Any) -> Any:
        return None if value is None else {**value, **{name: decode(value[name]) for name, decode in inside.items()}}

    return struct


def _cleaner(kind: Any) -> _Convert | None:
    """A function that removes null entries from the structs in a value of an Arrow type; None if it has no structs. It
    leaves Json() values unchanged, because their keys are those that were written."""
    if inner := _in_list(kind, _cleaner):
        return inner
    if not _is_struct(kind):
        return None
    inside = {f.name: clean for f in kind if (clean := _cleaner(f.type))}

    def struct(value: Any) -> Any:
        if value is None:
            return None
        result = {name: item for name, item in value.items() if item is not None}
        for name, clean in inside.items():
            if name in result:
                result[name] = clean(result[name])
        return result

    return struct


def _in_list(kind: Any, converter: Callable[[Any], _Convert | None]) -> _Convert | None:
    """The function for lists of an Arrow type, built from the function for their items; None if it is not a list, or
    its items need no function."""
    from pyarrow import types  # an optional package; it is installed if there is a table

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    convert = converter(kind.value_type) if any(is_list(kind) for is_list in lists) else None
    if convert is None:
        return None
    return lambda value: None if value is None else [convert(item) for item in value]


def _is_struct(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_struct(kind))


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size in bytes and modification time in nanoseconds of a file: a write changes at least one of them."""

    size: int
    changed: int

    @classmethod
    def from_path(cls, path: str) -> FileStamp:
        """The current stamp of a file. Raises UserError for anything but a regular file."""
        with file_errors(path):
            status = regular_file(Path(path), "a file of data").stat()
            return cls(status.st_size, status.st_mtime_ns)


@contextmanager
def file_errors(path: str, stamp: FileStamp | None = None, key: str = "data.path") -> Iterator[None]:
    """A context in which errors of reading a file become UserErrors. stamp: if given, it must still match at the end.
    key: the config key for messages."""
    try:
        yield
        if stamp is not None:
            now = os.stat(path)
            if FileStamp(now.st_size, now.st_mtime_ns) != stamp:
                raise UserError(f"{path}: has changed while weft read it. Start again when no program writes to it.")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is a truncated or damaged gzip file: {first_line(error)}. Write it again.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8."
        ) from None
    except OSError as error:
        raise UserError(f"{key}: cannot read {path}: {error.strerror or first_line(error)}.") from None


class _Lines(Protocol[_Line]):
    def readline(self, size: int, /) -> _Line: ...


def lines_of(file: _Lines[AnyStr], path: str, max_size: int) -> Iterator[tuple[int, AnyStr]]:
    """Yields (number from 1, line). Raises UserError at the first line longer than `max_size`, without reading all of
    it.

    max_size: bytes for a binary file, characters for a text file.
    """
    number = 0
    while line := file.readline(max_size + 1):
        number += 1
        if len(line) > max_size:
            raise too_large(row_name(path, number, by_line=True), max_size)
        yield number, line


def too_large(name: str, max_bytes: int) -> UserError:
    """The error for a row that is larger than data.max_row_bytes."""
    return UserError(
        f"{name}: is larger than data.max_row_bytes = {max_bytes:,} bytes. Remove the row. If it is a valid document, "
        "raise data.max_row_bytes."
    )


def _row_of_line(number: int, name: str, line: bytes) -> SourceRow:
    return SourceRow(number, name, json_row(name, line), escaped=b"\\ud" in line or b"\\uD" in line)


def not_blank(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The numbered lines without blank lines and without the byte order mark of line 1."""
    for number, line in lines:
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            yield number, text


def row_name(origin: str, number: int, by_line: bool) -> str:
    """The name of a row in messages: file:line, or file[row] with rows counted from 0."""
    return f"{origin}:{number}" if by_line else f"{origin}[{number}]"
