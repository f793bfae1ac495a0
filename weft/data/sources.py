"""Sources of documents: files, patterns of files, saved datasets, the hub, tables and lists in memory. Imports neither
torch nor transformers."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from threading import Lock
from typing import IO, Any, Literal, TypeVar

from weft.config.paths import data_problem, is_saved_dataset
from weft.config.schema import DataConfig, SourceConfig
from weft.config.sources import (
    DATA_SUFFIXES,
    Split,
    is_pattern,
    looks_like_hub_dataset,
    matching_files,
    parse_split,
    source_name,
)
from weft.data.blocks import (
    BYTE_ORDER_MARK,
    MAX_ROW_BYTES,
    ArrowBlock,
    Block,
    FileBlock,
    FileStamp,
    LineBlock,
    RowBlock,
    file_errors,
    lines_of,
    not_blank,
    row_name,
    too_large,
)
from weft.data.columns import divided_otherwise
from weft.data.messages import AS_THEY_STAND, MessageRules
from weft.data.records import ParseOptions
from weft.errors import UserError, first_line
from weft.importing import import_extra
from weft.launch import flight
from weft.strict_json import JsonError, item, named

_T = TypeVar("_T")
TextUnit = Literal["line", "paragraph", "document"]

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1000
_HELD_BYTES = 8 << 20  # most bytes of a block of rows that are read sequentially
_UNPACKED_BYTES = 1 << 30  # largest JSON list in a .gz file, which is read into memory
_COUNTED = 256  # blocks whose lines are counted at a time
_SAMPLED = 16  # positions in a large file from which a sample is read
_FIRST_BYTES = 1 << 20  # bytes of the first line that are read to detect the format
_GROUP_BYTES = 32 << 20  # largest Parquet row group that is read for a single row


@dataclass(frozen=True)
class SourcePart:
    """A file or table of a source.

    origin: its name in messages. size: approximate bytes. by_line: whether rows are numbered by line, else by index
    from 0. blocks: yields its blocks in order. digest: of the content; None if it has none (data in memory, a split of
    a file). sample: yields blocks spread over the part; None if it can only be read in order. row: returns a block with
    the row at a position (see Record); None if rows cannot be read again.
    """

    origin: str
    size: int
    by_line: bool
    blocks: Callable[[], Iterator[Block]]
    digest: Callable[[], str] | None = None
    sample: Callable[[], Iterator[Block]] | None = None
    row: Callable[[int], Block] | None = None


@dataclass(frozen=True)
class _File:
    """most: the largest allowed row, in bytes. stamp: the state of the file when it was opened."""

    path: str
    max_bytes: int
    stamp: FileStamp

    @property
    def size(self) -> int:
        return self.stamp.size

    def digest(self) -> str:
        return file_digest(self.path, self.stamp)


def open_source(
    source: SourceConfig, key: str = "data.path", max_bytes: int = MAX_ROW_BYTES, unit: TextUnit | None = None
) -> list[SourcePart]:
    """The files or tables of a source. key: the config key, for messages. most: the largest allowed row, in bytes.
    unit: as data.text_unit. Raises UserError if there are none, or if `split` or `subset` do not apply."""
    path, split = str(Path(source.path).expanduser()), parse_split(source.split)
    if problem := data_problem(key, path):
        raise UserError(problem)
    if is_saved_dataset(Path(path)) and not Path(path).is_file():
        _refuse_subset(source)
        return [_saved_dataset(path, split, max_bytes)]
    files = matching_files(path) if is_pattern(path) else [path]
    if not Path(files[0]).is_file() and looks_like_hub_dataset(path):
        return [_hub_dataset(path, source.subset, split, max_bytes)]
    _refuse_subset(source)
    if split.name:
        raise UserError(
            f"data.split: {source.path} is a file, which has no split {split.name}. Remove data.split, or write a part "
            "such as [:1000]."
        )
    if len(files) > 1 and not split.is_whole:
        raise UserError(
            f"data.split: {source.path} names {len(files)} files, but a part such as {source.split} needs a single "
            "file."
        )
    return [open_file(file, split, max_bytes, unit) for file in files]


def _refuse_subset(source: SourceConfig) -> None:
    if source.subset is not None:
        raise UserError(
            f"data.subset: {source.path} is not a dataset on the hub, and only these have subsets. Remove data.subset."
        )


def open_file(
    path: str, split: Split | None = None, max_bytes: int = MAX_ROW_BYTES, unit: TextUnit | None = None
) -> SourcePart:
    """Opens a file by its extension. With an unknown extension, it must be JSONL. most: the largest allowed row, in
    bytes. unit: as data.text_unit."""
    chosen, file = split or Split(), _File(path, max_bytes, FileStamp.from_path(path))
    name = path.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _parquet(file, chosen)
    if name.endswith((".csv", ".tsv")):
        return _rows(file, chosen, partial(_csv_rows, file, "\t" if name.endswith(".tsv") else ","), by_line=True)
    if name.endswith(".json") and _begins_with_list(path):
        return _rows(file, chosen, partial(_json_rows, file), by_line=False)
    if name.endswith(".txt") and (unit is not None or not _begins_with_object(path)):
        unit = unit or "line"
        part = _rows(file, chosen, partial(_text_rows, file, unit), by_line=True)
        digest = part.digest
        return part if digest is None else replace(part, digest=lambda: f"{unit} {digest()}")
    if not name.endswith(DATA_SUFFIXES):
        _refuse_other(path)
    return _streamed_lines(file, chosen) if path.endswith(".gz") or not chosen.is_whole else _lines(file)


def in_memory(rows: Any, name: str = "data") -> SourcePart:
    """The part of a list of rows, or of a datasets.Dataset. Raises UserError if a row is not a mapping."""
    if not isinstance(rows, Sequence) and hasattr(rows, "with_format"):
        return _dataset(name, rows, Split())
    listed = list(rows)
    if wrong := [row for row in listed if not isinstance(row, Mapping)]:
        raise UserError(f"{name}: each document must be a dict of columns, but one is a {type(wrong[0]).__name__}.")

    def row(position: int) -> Block:
        return RowBlock(name, [listed[position]], [position], False, 0)

    def blocks() -> Iterator[Block]:
        return _row_blocks(name, ((number, row, 0) for number, row in enumerate(listed)), False, can_reread=True)

    return SourcePart(name, 0, False, blocks, row=row)


# ---------------------------------------------------------------- JSONL


def _lines(file: _File) -> SourcePart:
    path, size = file.path, file.size

    def blocks() -> Iterator[Block]:
        newlines = 0
        with file_errors(path):
            for start, count in _newlines(path, range(0, size, BLOCK_BYTES)):
                yield FileBlock(path, start, min(start + BLOCK_BYTES, size), newlines, file.max_bytes, file.stamp)
                newlines += count

    def sample() -> Iterator[Block]:
        """The first lines, and lines at even distances through the file."""
        piece = BLOCK_BYTES // 8
        yield FileBlock(path, 0, min(piece, size), 0, file.max_bytes, file.stamp)
        for number in range(1, _SAMPLED):
            start = number * size // _SAMPLED
            if start >= number * piece:
                yield FileBlock(path, start, min(start + piece, size), None, file.max_bytes, file.stamp)

    def row(position: int) -> Block:
        return FileBlock(path, position, position + 1, None, file.max_bytes, file.stamp)

    return SourcePart(path, size, True, blocks, file.digest, sample, row)


def _newlines(path: str, starts: range) -> Iterator[tuple[int, int]]:
    """Yields (start, number of line ends) of each block. No pool is alive at a yield, because any thread may collect an
    abandoned generator, even a starting thread with the lock that joining the pool's threads needs."""

    def count(start: int) -> int:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(BLOCK_BYTES).count(b"\n")

    for first in range(0, len(starts), _COUNTED):
        batch = starts[first : first + _COUNTED]
        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(count, batch))
        yield from zip(batch, counts, strict=True)


def _streamed_lines(file: _File, split: Split) -> SourcePart:
    """A .gz file, or a split of a JSONL file: lines are read sequentially."""

    def lines() -> Iterator[tuple[int, bytes]]:
        with file_errors(file.path, file.stamp), _opened(file.path) as stream:
            yield from not_blank(lines_of(stream, file.path, file.max_bytes))

    def blocks() -> Iterator[Block]:
        for chosen in _group_rows(_chosen(lines, split), lambda line: len(line[1])):
            yield LineBlock(file.path, chosen)

    return SourcePart(file.path, file.size, True, blocks, file.digest if split.is_whole else None)


# ---------------------------------------------------------------- JSON lists and CSV


# (number of a row, the row or a UserError, its approximate size in bytes)
_Row = tuple[int, Any, int]


def _rows(file: _File, split: Split, read: Callable[[], Iterator[_Row]], by_line: bool) -> SourcePart:
    digest = file.digest if split.is_whole else None
    return SourcePart(
        file.path, file.size, by_line, lambda: _row_blocks(file.path, _chosen(read, split), by_line), digest
    )


def _row_blocks(origin: str, rows: Iterable[_Row], by_line: bool, can_reread: bool = False) -> Iterator[Block]:
    for chosen in _group_rows(rows, lambda row: row[2]):
        numbers, values, sizes = zip(*chosen, strict=True)
        yield RowBlock(origin, values, numbers, by_line, sum(sizes), escaped=True, can_reread=can_reread)


def _group_rows(rows: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Groups rows into lists for blocks: up to BLOCK_ROWS rows, or until they reach _HELD_BYTES."""
    group: list[_T] = []
    num_bytes = 0
    for row in rows:
        group.append(row)
        num_bytes += size(row)
        if len(group) == BLOCK_ROWS or num_bytes >= _HELD_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _begins_with_object(path: str) -> bool:
    """Whether the first non-blank line of a file is a JSON object."""
    with file_errors(path), _opened(path) as file:
        line = next((line for _, line in not_blank(enumerate(iter(partial(file.readline, _FIRST_BYTES), b""), 1))), b"")
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return len(line) == _FIRST_BYTES  # the beginning of a longer line


_SAVED_AS = {
    (".xlsx", ".xls", ".ods", ".numbers"): "save the table as .csv, separated by commas",
    (".md", ".text", ".rst", ".log"): "rename it to .txt to train on its text (data.text_unit)",
    (".pdf", ".docx", ".doc", ".odt", ".rtf", ".html", ".htm", ".epub", ".xml"): "write its text to a .txt file",
    (".zip", ".tar", ".tgz", ".7z", ".bz2", ".xz", ".zst", ".lz4"): "unpack it, or pack it as .gz",
    (".arrow", ".feather", ".orc", ".avro", ".pkl", ".pickle", ".npy", ".npz", ".pt", ".db", ".sqlite", ".h5"): (
        "write its rows as .parquet or .jsonl"
    ),
}


def _refuse_other(path: str) -> None:
    """Raises UserError for a file with an unknown extension, unless its first line is JSON."""
    with file_errors(path), _opened(path) as file:
        lines = [line.strip() for line in file.read(1 << 16).removeprefix(BYTE_ORDER_MARK).splitlines()]
    if not any(lines) or any(line.startswith(b"{") for line in lines):
        return
    ending = Path(path).suffix.lower()
    advice = next((advice for endings, advice in _SAVED_AS.items() if ending in endings), "write it as .jsonl")
    raise UserError(
        f"{path}: weft reads {', '.join(DATA_SUFFIXES)} (all except .parquet also as .gz), and other files with a JSON "
        f"object per line, which this file lacks: {advice}."
    )


def _begins_with_list(path: str) -> bool:
    with file_errors(path), _opened(path) as file:
        return file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _json_rows(file: _File) -> Iterator[_Row]:
    path = file.path
    with file_errors(path, file.stamp), _opened(path) as stream:
        content = stream.read(_UNPACKED_BYTES + 1 if path.endswith(".gz") else -1)
        if path.endswith(".gz") and len(content) > _UNPACKED_BYTES:
            raise UserError(
                f"{path}: contains a list of more than {_UNPACKED_BYTES >> 30} GiB. Write one object per line instead, "
                "as .jsonl.gz, which is read a line at a time."
            )
        text = content.decode("utf-8-sig")
    try:
        for number, (begin, end, value) in enumerate(_items(text)):
            name = row_name(path, number, by_line=False)
            if not isinstance(value, dict):
                value = UserError(
                    f"{name}: is not an object. The file must be a list of objects, one for each document."
                )
            elif end - begin > file.max_bytes:
                value = too_large(name, file.max_bytes)
            yield number, value, end - begin
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: is not valid JSON: {named(error)} at column {error.colno}. The file must be one "
            "list of objects, or have one object per line."
        ) from None
    except JsonError as error:
        raise UserError(f"{path}: is not valid JSON: {error}.") from None


def _items(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yields (begin, end, value) of each item of the JSON list in a text. Raises json.JSONDecodeError or JsonError."""
    blank = re.compile(r"[ \t\n\r]*")

    def skip(position: int) -> int:
        match = blank.match(text, position)
        assert match is not None
        return match.end()

    offset = skip(skip(0) + 1)
    while not text.startswith("]", offset):
        value, end = item(text, offset)
        yield offset, end, value
        offset = skip(end)
        if text.startswith(",", offset):
            offset = skip(offset + 1)
        elif not text.startswith("]", offset):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, offset)
    if skip(offset + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, offset + 1)


def _text_rows(file: _File, unit: TextUnit) -> Iterator[_Row]:
    """Yields the non-blank texts of a file, numbered by the line on which each begins. Line ends become \\n;
    line ends after a line or a paragraph are removed."""

    def row(number: int, text: bytes) -> _Row:
        name = row_name(file.path, number, by_line=True)
        if len(text) > file.max_bytes:
            return number, too_large(name, file.max_bytes), len(text)
        try:
            decoded = text.replace(b"\r\n", b"\n").decode("utf-8")
        except UnicodeDecodeError as error:
            return number, UserError(f"{name}: is not UTF-8 ({error.reason}). Save the file as UTF-8."), len(text)
        if "\0" in decoded:
            return number, UserError(f"{name}: contains a NUL byte. Write the file again, as UTF-8."), len(text)
        return number, {"text": decoded}, len(text)

    with file_errors(file.path, file.stamp), _opened(file.path) as stream:
        if unit == "document":
            text = stream.read(file.max_bytes + 1).removeprefix(BYTE_ORDER_MARK)
            if text.strip():
                yield row(1, text)
            return
        first, lines, size = 1, list[bytes](), 0
        for number, line in lines_of(stream, file.path, file.max_bytes):
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if unit == "line":
                if line.strip():
                    yield row(number, line.rstrip(b"\r\n"))
            elif line.strip():
                first, size = (first, size + len(line)) if lines else (number, len(line))
                lines.append(line)
                if size > file.max_bytes:  # checked at each line, because a file may have no blank line
                    raise too_large(row_name(file.path, first, by_line=True), file.max_bytes)
            elif lines:
                yield row(first, b"".join(lines).rstrip(b"\r\n"))
                lines = []
        if lines:
            yield row(first, b"".join(lines).rstrip(b"\r\n"))


def _csv_rows(file: _File, separator: str) -> Iterator[_Row]:
    """Yields the rows, numbered by the line on which each begins. An empty field is an absent value."""
    path = file.path
    csv.field_size_limit(min(sys.maxsize, file.max_bytes))
    with file_errors(path, file.stamp), _opened(path) as stream:
        texts = _without_nul(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), file)
        first = next(texts, "")
        reader = csv.reader(chain([first], texts), delimiter=separator, strict=True)
        begin, divided = 1, "" if separator in first else divided_otherwise(path, first)
        try:
            header = next(reader, [])
            if repeated := [name for name in header if header.count(name) > 1]:
                raise UserError(f"{path}:1: two columns have the name `{repeated[0]}`. Rename one.")
            begin = reader.line_num + 1
            for row in reader:
                if row:
                    values = {name: value for name, value in zip(header, row, strict=False) if value}
                    yield begin, _unequal(path, begin, row, header, divided) or values, sum(map(len, row)) + len(row)
                begin = reader.line_num + 1
        except csv.Error as error:
            if "field limit" in str(error):
                raise too_large(row_name(path, begin, by_line=True), file.max_bytes) from None
            advice = divided or " Write it with a CSV library."
            raise UserError(f"{path}:{begin}: is not valid CSV: {error}.{advice}") from None


def _unequal(path: str, line: int, row: Sequence[str], header: Sequence[str], divided: str = "") -> UserError | None:
    """The error for a row whose number of fields differs from the header's; None if it is equal. divided: advice for a
    file with another separator."""
    if len(row) == len(header):
        return None
    quotes = ' Put fields with separators or line breaks in double quotes, and write " as "" in them.'
    return UserError(f"{path}:{line}: has {len(row)} fields, but the header has {len(header)}.{divided or quotes}")


def _without_nul(texts: IO[str], file: _File) -> Iterator[str]:
    for number, line in lines_of(texts, file.path, file.max_bytes):
        if "\0" in line:
            raise UserError(f"{file.path}:{number}: contains a NUL byte. Write the file again, as UTF-8.")
        yield line


# ---------------------------------------------------------------- tables


def _parquet(file: _File, split: Split) -> SourcePart:
    path, need = file.path, f"data.path: the Parquet file {file.path}"
    pyarrow, parquet = import_extra("pyarrow", "data", need), import_extra("pyarrow.parquet", "data", need)

    @contextmanager
    def parquet_errors() -> Iterator[None]:
        with file_errors(path, file.stamp):
            try:
                yield
            except (pyarrow.ArrowException, MemoryError) as error:
                raise UserError(f"{path}: is not a readable Parquet file: {first_line(error)}.") from None

    with parquet_errors():
        opened = parquet.ParquetFile(path)
        count, at_once = opened.metadata.num_rows, _rows_at_once(opened.metadata, file)
    groups = _Groups(opened)

    def blocks() -> Iterator[Block]:
        begin, picked = 0, split.rows(count)
        with parquet_errors():
            for batch in opened.iter_batches(at_once):
                first, last = max(begin, picked.start), min(begin + len(batch), picked.stop)
                if first < last:
                    part = batch.slice(first - begin, last - first)
                    size = file.size * (last - first) // max(1, count)
                    yield ArrowBlock(path, part, first, size, file.max_bytes, groups.small)
                begin += len(batch)

    def row(position: int) -> Block:
        with parquet_errors():
            return ArrowBlock(path, groups.row(position), position, 0, file.max_bytes)

    digest = file.digest if split.is_whole else None
    return SourcePart(path, file.size, False, blocks, digest, row=row if groups.small else None)


class _Groups:
    """Reads single rows of a Parquet file by reading their row group; caches the last group.

    small: whether every group is small enough to read it for a single row; else images in rows are copied.
    """

    def __init__(self, opened: Any) -> None:
        metadata = opened.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._opened, self._lock = opened, Lock()
        self._ends = list(accumulate(group.num_rows for group in groups))
        self.small = all(group.total_byte_size <= _GROUP_BYTES for group in groups)
        self._last_group: tuple[int, Any] = (-1, None)

    def row(self, position: int) -> Any:
        """A table with the row at this position."""
        number = bisect_right(self._ends, position)
        with self._lock:  # a ParquetFile is not thread-safe
            if self._last_group[0] != number:
                self._last_group = number, self._opened.read_row_group(number)
            table = self._last_group[1]
        return table.slice(position - (self._ends[number] - len(table)), 1)


def _rows_at_once(metadata: Any, file: _File) -> int:
    """Number of rows to read at a time, so that unpacked rows stay small. Raises UserError if the average row of a
    group is larger than the limit."""
    largest, first = 1, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        row_bytes = group.total_byte_size // max(1, group.num_rows)
        if row_bytes > file.max_bytes:
            raise too_large(row_name(file.path, first, by_line=False), file.max_bytes)
        largest, first = max(largest, row_bytes), first + group.num_rows
    return max(1, min(BLOCK_ROWS, 4 * _HELD_BYTES // largest))


def _saved_dataset(path: str, split: Split, max_bytes: int) -> SourcePart:
    datasets = _datasets(path)
    try:
        with file_errors(path):
            loaded = datasets.load_from_disk(path)
    except UserError:
        raise
    except Exception as error:  # of any type: the JSON and Arrow files in the folder may be anything
        raise UserError(f"{path}: is not a readable dataset: {first_line(error)}. Write it again.") from error
    return _dataset(path, loaded, split, max_bytes)


def _hub_dataset(path: str, subset: str | None, split: Split, max_bytes: int) -> SourcePart:
    """A dataset on the hub, downloaded by the datasets library into its cache."""
    datasets = _datasets(path)
    try:
        loaded = datasets.load_dataset(path, subset, split=split.name or None)
    except Exception as error:  # of any type: from the library, the network or the hub
        raise UserError(
            f"data.path: {path} is not a local file, and datasets could not load it from the hub: {first_line(error)}."
        ) from error
    return _dataset(path, loaded, split, max_bytes)


def _dataset(name: str, loaded: Any, split: Split, max_bytes: int = MAX_ROW_BYTES) -> SourcePart:
    if isinstance(loaded, Mapping):
        chosen = split.name or ("train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded)))
        if chosen not in loaded:
            raise UserError(f"data.split: {name} has no split {chosen}. Set data.split to {' or '.join(loaded)}.")
        name, table = f"{name}:{chosen}", loaded[chosen]
    elif split.name and split.name != str(loaded.split or ""):
        raise UserError(f"data.split: {name} is a dataset without splits. Remove {split.name} from data.split.")
    else:
        table = loaded
    table, picked = table.with_format("arrow"), split.rows(len(loaded if table is loaded else table))
    size = int(table.data.nbytes) if len(table) else 0

    def blocks() -> Iterator[Block]:
        for first in range(picked.start, picked.stop, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, picked.stop)
            yield ArrowBlock(
                name, table[first:last], first, size * (last - first) // max(1, len(table)), max_bytes, True
            )

    def digest() -> str:
        hashed = hashlib.blake2b(str(table.features).encode(), digest_size=16)
        for block in blocks():
            assert isinstance(block, ArrowBlock)
            for batch in block.table.to_batches():
                hashed.update(batch.serialize())
        return hashed.hexdigest()

    def row(position: int) -> Block:
        return ArrowBlock(name, table[position : position + 1], position, 0, max_bytes)

    return SourcePart(name, size, False, blocks, digest, row=row)


def _datasets(path: str) -> Any:
    datasets = import_extra("datasets", "data", f"data.path: {path} is not a JSONL file, and")
    datasets.disable_progress_bars()
    return datasets


# ---------------------------------------------------------------- files


def file_digest(path: str, stamp: FileStamp | None = None) -> str:
    """Hexadecimal digest of a file: a digest of the digests of its blocks, which threads compute in parallel. stamp: if
    given, the file must still match it at the end; else UserError."""
    with file_errors(path, stamp), ThreadPoolExecutor(4) as pool:
        total, size = hashlib.blake2b(digest_size=16), Path(path).stat().st_size
        for digest in pool.map(partial(_block_digest, path), range(0, size, 16 * BLOCK_BYTES)):
            flight.beat()
            total.update(digest)
        return total.hexdigest()


def _block_digest(path: str, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(16 * BLOCK_BYTES), digest_size=16).digest()


def _chosen(read: Callable[[], Iterator[_T]], split: Split) -> Iterator[_T]:
    """The rows of a split. For a part, first reads all rows once to count them."""
    if split.is_whole:
        return read()
    rows = split.rows(sum(1 for _ in read()))
    return islice(read(), rows.start, rows.stop)


def _opened(path: str) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


# ---------------------------------------------------------------- the data section of a config

# A path, the data section of a config, its sources, or rows: a list of dicts, a datasets.Dataset.
Data = str | DataConfig | Sequence[SourceConfig] | Sequence[Mapping[str, Any]] | Any


@dataclass(frozen=True)
class DataSource:
    """A source with its files. label: its name in reports. name: as in data.sources; "" without data.sources. rules:
    how its messages are read."""

    label: str
    parts: list[SourcePart]
    columns: Mapping[str, str]
    name: str = ""
    weight: float = 1.0
    rules: MessageRules = AS_THEY_STAND

    def parse_options(self, chat: bool, rows: ParseOptions | None = None) -> ParseOptions:
        """How the rows of the source are parsed. chat: whether there is a chat template. rows: whose fields about
        preferences and labels are taken."""
        options = replace(rows or ParseOptions(), columns=self.columns, rules=self.rules, chat=chat)
        if options.listed == "all" or options.teachers:
            return options
        return replace(options, listed="all" if self.name in options.listed else ())


def message_rules(data: DataConfig) -> MessageRules:
    """Options for reading messages, from a data section."""
    return MessageRules(data.roles, data.message_keys, data.ignore, data.system)


def open_data(data: Data) -> list[DataSource]:
    """Locates and opens the files of a data section. Raises UserError if one is missing or cannot be read."""
    if isinstance(data, DataConfig):
        rules = message_rules(data)
        if data.sources is not None:
            return [_open(source, rules, True, data.max_row_bytes, data.text_unit) for source in data.sources]
        assert data.path is not None
        only_source = SourceConfig(path=data.path, split=data.split, subset=data.subset, columns=data.columns)
        return [_open(only_source, rules, False, data.max_row_bytes, data.text_unit)]
    if isinstance(data, str):
        return [_open(SourceConfig(path=data), AS_THEY_STAND)]
    if isinstance(data, Sequence) and data and isinstance(data[0], SourceConfig):
        configs: Sequence[Any] = data
        return [_open(source, AS_THEY_STAND, named=True) for source in configs]
    return [DataSource("data", [in_memory(data)], {})]


def _open(
    config: SourceConfig,
    rules: MessageRules,
    named: bool = False,
    max_bytes: int = MAX_ROW_BYTES,
    unit: TextUnit | None = None,
) -> DataSource:
    name = source_name(config) if named else ""
    label = f"{name} ({config.path})" if named else config.path
    key = "data.sources" if named else "data.path"
    return DataSource(label, open_source(config, key, max_bytes, unit), config.columns, name, config.weight, rules)
