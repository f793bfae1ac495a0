"""Where documents come from: files, patterns of files, saved datasets, the hub, tables and lists in memory."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from weft.config.paths import data_problem, is_saved_dataset
from weft.config.schema import SourceConfig
from weft.config.sources import Split, is_pattern, looks_like_hub_dataset, matching_files, parse_split
from weft.data.blocks import BYTE_ORDER_MARK, ArrowBlock, Block, FileBlock, LineBlock, RowBlock, not_blank
from weft.errors import UserError, first_line
from weft.importing import import_extra
from weft.observe import flight

_T = TypeVar("_T")

BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 1000
_SAMPLED = 16  # places of a large file that a sample is read from


@dataclass(frozen=True)
class Part:
    """One file or table of a source.

    origin: its name in messages. size: in bytes, about. by_line: documents are numbered by lines, else by rows from 0.
    blocks: reads it, in order. digest: of its content; None for what is in memory. sample: blocks from all over it.
    """

    origin: str
    size: int
    by_line: bool
    blocks: Callable[[], Iterator[Block]]
    digest: Callable[[], str] | None = None
    sample: Callable[[], Iterator[Block]] | None = None


def open_source(source: SourceConfig, key: str = "data.path") -> list[Part]:
    """The files or tables of a source. key: of the config, for messages. Raises UserError where there is nothing."""
    path, split = str(Path(source.path).expanduser()), parse_split(source.split)
    if problem := data_problem(key, path):
        raise UserError(problem)
    if is_saved_dataset(Path(path)) and not Path(path).is_file():
        _refuse_subset(source)
        return [_saved_dataset(path, split)]
    files = matching_files(path) if is_pattern(path) else [path]
    if not Path(files[0]).is_file() and looks_like_hub_dataset(path):
        return [_hub_dataset(path, source.subset, split)]
    _refuse_subset(source)
    if split.name:
        raise UserError(
            f"data.split: {source.path} is a file, which has no split called {split.name}: leave it out, or write a "
            "part such as [:1000]."
        )
    if len(files) > 1 and not split.is_whole:
        raise UserError(
            f"data.split: {source.path} names {len(files)} files: a part such as {source.split} is of one file."
        )
    return [open_file(file, split) for file in files]


def _refuse_subset(source: SourceConfig) -> None:
    if source.subset is not None:
        raise UserError(
            f"data.subset: {source.path} is not a dataset on the hub, and nothing else has subsets: leave it out."
        )


def open_file(path: str, split: Split | None = None) -> Part:
    """A file, by the ending of its name; whatever is none of the others is JSONL."""
    chosen = split or Split()
    name = path.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _parquet(path, chosen)
    if name.endswith((".csv", ".tsv")):
        return _rows(path, chosen, partial(_csv_rows, path, "\t" if name.endswith(".tsv") else ","), by_line=True)
    if name.endswith(".json") and _begins_with_list(path):
        return _rows(path, chosen, partial(_json_rows, path), by_line=False)
    return _streamed_lines(path, chosen) if path.endswith(".gz") or not chosen.is_whole else _lines(path)


def in_memory(rows: Any, name: str = "data") -> Part:
    """A list of rows, or a datasets.Dataset."""
    if not isinstance(rows, Sequence) and hasattr(rows, "with_format"):
        return _dataset(name, rows, Split())
    listed = list(rows)
    if wrong := [row for row in listed if not isinstance(row, Mapping)]:
        raise UserError(f"{name}: each document must be a dict of columns, and one is a {type(wrong[0]).__name__}.")
    return Part(
        name, 0, False, lambda: _row_blocks(name, ((number, row, 0) for number, row in enumerate(listed)), False)
    )


# ---------------------------------------------------------------- JSONL


def _lines(path: str) -> Part:
    size = _size(path)

    def blocks() -> Iterator[Block]:
        newlines = 0
        with _reading(path), ThreadPoolExecutor(4) as pool:
            starts = range(0, size, BLOCK_BYTES)
            for start, count in zip(starts, pool.map(partial(_newlines, path), starts), strict=True):
                yield FileBlock(path, start, min(start + BLOCK_BYTES, size), newlines)
                newlines += count

    def sample() -> Iterator[Block]:
        """The first lines, and some from all over the file."""
        piece = BLOCK_BYTES // 8
        yield FileBlock(path, 0, min(piece, size), 0)
        for number in range(1, _SAMPLED):
            start = number * size // _SAMPLED
            if start >= number * piece:
                yield FileBlock(path, start, min(start + piece, size), None)

    return Part(path, size, True, blocks, partial(file_digest, path), sample)


def _newlines(path: str, start: int) -> int:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(BLOCK_BYTES).count(b"\n")


def _streamed_lines(path: str, split: Split) -> Part:
    """A zipped file, or a part of one: lines are read one after another."""

    def lines() -> Iterator[tuple[int, bytes]]:
        with _reading(path), _opened(path) as file:
            yield from not_blank(enumerate(file, start=1))

    def blocks() -> Iterator[Block]:
        rest = _chosen(lines, split)
        while chosen := list(islice(rest, BLOCK_ROWS)):
            yield LineBlock(path, chosen)

    return Part(path, _size(path), True, blocks, partial(file_digest, path) if split.is_whole else None)


# ---------------------------------------------------------------- JSON lists and CSV


# A row's number, the row, and how many bytes of the file it is, about.
_Row = tuple[int, Any, int]


def _rows(path: str, split: Split, read: Callable[[], Iterator[_Row]], by_line: bool) -> Part:
    digest = partial(file_digest, path) if split.is_whole else None
    return Part(path, _size(path), by_line, lambda: _row_blocks(path, _chosen(read, split), by_line), digest)


def _row_blocks(origin: str, rows: Iterable[_Row], by_line: bool) -> Iterator[Block]:
    rest = iter(rows)
    while chosen := list(islice(rest, BLOCK_ROWS)):
        numbers, values, sizes = zip(*chosen, strict=True)
        yield RowBlock(origin, values, numbers, by_line, sum(sizes), escaped=True)


def _begins_with_list(path: str) -> bool:
    with _reading(path), _opened(path) as file:
        return file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _json_rows(path: str) -> Iterator[_Row]:
    with _reading(path), _opened(path) as file:
        text = file.read().decode("utf-8-sig")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: is not valid JSON: {error.msg} at column {error.colno}. The file must be one list "
            "of objects, or have one object per line."
        ) from None
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise UserError(
                f"{path}[{number}]: is no object. The file must be a list of objects, one for each document."
            )
        yield number, value, len(text) // len(values)


def _csv_rows(path: str, separator: str) -> Iterator[_Row]:
    """Numbered by the line that each begins on; an empty field counts as absent."""
    csv.field_size_limit(sys.maxsize)
    with _reading(path), _opened(path) as file:
        reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=separator, strict=True)
        header = next(reader, [])
        if twice := [name for name in header if header.count(name) > 1]:
            raise UserError(f"{path}:1: two columns are called `{twice[0]}`. Rename one.")
        begin = reader.line_num + 1
        try:
            for row in reader:
                if row and len(row) != len(header):
                    raise UserError(
                        f"{path}:{begin}: has {len(row)} fields, and the header has {len(header)}. Put fields that "
                        'hold separators or line breaks in double quotes, and write " as "" in them.'
                    )
                if row:
                    values = {name: value for name, value in zip(header, row, strict=True) if value}
                    yield begin, values, sum(len(value) + 1 for value in row)
                begin = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}:{begin}: is not valid CSV: {error}. Write it with a CSV library.") from None


# ---------------------------------------------------------------- tables


def _parquet(path: str, split: Split) -> Part:
    need = f"data.path: the Parquet file {path}"
    pyarrow, parquet = import_extra("pyarrow", "data", need), import_extra("pyarrow.parquet", "data", need)
    with _reading(path):
        try:
            file = parquet.ParquetFile(path)
        except pyarrow.ArrowException as error:
            raise UserError(f"{path}: is not a Parquet file that can be read: {first_line(error)}.") from None
    count, size = file.metadata.num_rows, _size(path)

    def blocks() -> Iterator[Block]:
        begin, picked = 0, split.rows(count)
        for batch in file.iter_batches(BLOCK_ROWS):
            first, last = max(begin, picked.start), min(begin + len(batch), picked.stop)
            if first < last:
                part = batch.slice(first - begin, last - first)
                yield ArrowBlock(path, part, first, size * (last - first) // max(1, count))
            begin += len(batch)

    return Part(path, size, False, blocks, partial(file_digest, path) if split.is_whole else None)


def _saved_dataset(path: str, split: Split) -> Part:
    datasets = _datasets(path)
    with _reading(path):
        loaded = datasets.load_from_disk(path)
    return _dataset(path, loaded, split)


def _hub_dataset(path: str, subset: str | None, split: Split) -> Part:
    """Downloaded by datasets, which keeps it in its own cache."""
    datasets = _datasets(path)
    try:
        loaded = datasets.load_dataset(path, subset, split=split.name or None)
    except Exception as error:  # a library's, a network's, the hub's: of any type
        raise UserError(
            f"data.path: {path} is no local file, and datasets could not load it from the hub: {first_line(error)}."
        ) from error
    return _dataset(path, loaded, split)


def _dataset(name: str, loaded: Any, split: Split) -> Part:
    if isinstance(loaded, Mapping):
        chosen = split.name or ("train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded)))
        if chosen not in loaded:
            raise UserError(f"data.split: {name} has no split {chosen}; set data.split to {' or '.join(loaded)}.")
        name, table = f"{name}:{chosen}", loaded[chosen]
    elif split.name and split.name != str(loaded.split or ""):
        raise UserError(f"data.split: {name} is one dataset without splits: leave {split.name} out.")
    else:
        table = loaded
    table, picked = table.with_format("arrow"), split.rows(len(loaded if table is loaded else table))
    size = int(table.data.nbytes) if len(table) else 0

    def blocks() -> Iterator[Block]:
        for first in range(picked.start, picked.stop, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, picked.stop)
            yield ArrowBlock(name, table[first:last], first, size * (last - first) // max(1, len(table)))

    def digest() -> str:
        hashed = hashlib.blake2b(str(table.features).encode(), digest_size=16)
        for block in blocks():
            assert isinstance(block, ArrowBlock)
            for batch in block.table.to_batches():
                hashed.update(batch.serialize())
        return hashed.hexdigest()

    return Part(name, size, False, blocks, digest)


def _datasets(path: str) -> Any:
    datasets = import_extra("datasets", "data", f"data.path: {path} is no JSONL file and")
    datasets.disable_progress_bars()
    return datasets


# ---------------------------------------------------------------- files


def file_digest(path: str) -> str:
    """Hexadecimal, of a file's bytes: the digest of its blocks' digests, which threads take side by side."""
    with _reading(path), ThreadPoolExecutor(4) as pool:
        whole = hashlib.blake2b(digest_size=16)
        for digest in pool.map(partial(_block_digest, path), range(0, _size(path), 16 * BLOCK_BYTES)):
            flight.beat()
            whole.update(digest)
        return whole.hexdigest()


def _block_digest(path: str, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(16 * BLOCK_BYTES), digest_size=16).digest()


def _chosen(read: Callable[[], Iterator[_T]], split: Split) -> Iterator[_T]:
    """The rows that a split names; they are counted first."""
    if split.is_whole:
        return read()
    rows = split.rows(sum(1 for _ in read()))
    return islice(read(), rows.start, rows.stop)


def _opened(path: str) -> IO[bytes]:
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _size(path: str) -> int:
    return Path(path).stat().st_size


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """What can go wrong with a file, in words."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is not a whole gzip file: {first_line(error)}. Write it again.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8."
        ) from None
    except OSError as error:
        raise UserError(f"data.path: cannot read {path}: {error.strerror or first_line(error)}.") from None
