"""Data that attack who reads them: each is refused in a sentence with file and line, before it takes memory or time."""

from __future__ import annotations

import gzip
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hostile.test_configs import SPECIAL
from weft.config.schema import DataConfig, SourceConfig
from weft.data.records import ParseOptions
from weft.data.sources import BLOCK_BYTES, open_data, open_file
from weft.errors import UserError

GOOD = b'{"text": "a"}\n'
Write = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(path: str, max_bytes: int = 1 << 20) -> list[Any]:
    sources = open_data(DataConfig(path=path, max_row_bytes=max_bytes))
    blocks = (block for part in sources[0].parts for block in part.blocks())
    return [record.value for block in blocks for _, record in block.records(ParseOptions())]


def put(content: bytes) -> Write:
    return lambda path: path.write_bytes(content)


def table(**columns: list[Any]) -> Write:
    return lambda path: pq.write_table(pa.table(columns), path)


CASES: dict[str, tuple[str, Write, str]] = {
    "brackets": ("d.jsonl", put(GOOD + b"[" * 100_000), "d.jsonl:2: .*nested more than 100 deep"),
    "braces in a row": ("d.jsonl", put(GOOD + b'{"a":' * 100_000), "d.jsonl:2: .*nested more than 100 deep"),
    "nested less than Python goes": (
        "d.jsonl", put(b'{"text": "a", "b": ' + b"[" * 150 + b"]" * 150 + b"}"), "d.jsonl:1: .*nested more than 100"),
    "text that is nested": (
        "d.jsonl", put(json.dumps({"messages": "[" * 100_000}).encode()), "d.jsonl:1: `messages`.*nested"),
    "a list of brackets": ("d.json", put(b"[" * 100_000), r"d.json: .*nested"),
    "digits": ("d.jsonl", put(GOOD + b'{"text": "a", "n": ' + b"1" * 10_000 + b"}"), "d.jsonl:2: .*10,000 digits"),
    "digits in a list": ("d.json", put(b'[{"n": ' + b"1" * 10_000 + b"}]"), "d.json: .*10,000 digits"),
    "NUL": ("d.jsonl", put(GOOD + b'{"text": "a\0b"}'), "d.jsonl:2: .*NUL byte"),
    "NUL alone": ("d.jsonl", put(GOOD + b"\0" * 100), "d.jsonl:2: .*NUL byte"),
    "NUL in CSV": ("d.csv", put(b"text\na\nb\0c\n"), "d.csv:3: .*NUL byte"),
    "a key twice": ("d.jsonl", put(GOOD + b'{"text": "a", "text": "b"}'), "d.jsonl:2: .*`text` twice"),
    "a key twice, inside": (
        "d.jsonl", put(b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}'), ":1: .*`role` twice"),
    "a key twice in a list": ("d.json", put(b'[{"text": "a", "text": "b"}]'), "d.json: .*`text` twice"),
    "a large line": ("d.jsonl", put(GOOD + b'{"text": "' + b"x" * (3 << 20) + b'"}\n'), "d.jsonl:2: is larger"),
    "a large line without an end": ("d.jsonl", put(GOOD + b"x" * (3 << 20)), "d.jsonl:2: is larger"),
    "a large row of a list": ("d.json", put(b'[{"text": "' + b"x" * (2 << 20) + b'"}]'), r"d.json\[0\]: is"),
    "a large line of CSV": ("d.csv", put(b"text\na\n" + b"x" * (2 << 20)), "d.csv:3: is larger"),
    "a quote that stays open": ("d.csv", put(b'text\na\n"' + b"x\n" * (1 << 20)), "d.csv:3: is larger"),
    "a large zipped line": (
        "d.jsonl.gz", put(gzip.compress(GOOD + b"x" * (300 << 20), 1)), "d.jsonl.gz:2: is larger"),
    "a large row of Parquet": ("d.parquet", table(text=["a", "x" * (2 << 20)]), r"d.parquet\[[01]\]: is larger"),
    "a large row among small ones": (
        "d.parquet", table(text=["a"] * 50 + ["x" * (2 << 20)]), r"d.parquet\[50\]: is larger"),
    "no Parquet": ("d.parquet", put(b"PAR1" + b"\xff" * 100 + b"PAR1"), "d.parquet: is not a readable Parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file(name: str) -> None:
    file, write, message = CASES[name]
    write(Path(file))
    began = time.process_time()
    with pytest.raises(UserError, match=f"(?s)^(data.path: )?.*{message}") as caught:
        read(file)
    assert time.process_time() - began < 5.0
    assert len(str(caught.value)) < 500


@pytest.mark.covers("data.max_row_bytes")
def test_max_row_bytes_is_the_limit() -> None:
    """A row of just so many bytes is read; and a line that goes over many blocks, too."""
    text = b'{"text": "' + b"x" * (3 * BLOCK_BYTES) + b'"}'
    Path("d.jsonl").write_bytes(GOOD + text + b"\n" + GOOD)
    assert [len(value["text"]) for value in read("d.jsonl", len(text) + 1)] == [1, 3 * BLOCK_BYTES, 1]
    with pytest.raises(UserError, match="d.jsonl:2: .*data.max_row_bytes"):
        read("d.jsonl", len(text) - 2)


def test_a_line_of_200_mb_takes_no_memory() -> None:
    with open("d.jsonl", "wb") as file:
        file.write(GOOD)
        for _ in range(200):
            file.write(b"x" * 10**6)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="d.jsonl:2: is larger"):
        read("d.jsonl")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_rows_that_unpack_are_read_few_at_a_time() -> None:
    """1,000 rows of 300 kB are 300 MB, in a file of some kB."""
    pq.write_table(pa.table({"text": ["x" * 300_000] * 1000}), "d.parquet", use_dictionary=False, compression="zstd")
    sizes = [block.table.nbytes for part in open_data(DataConfig(path="d.parquet"))[0].parts for block in part.blocks()]  # type: ignore[attr-defined]
    assert sum(sizes) > 3 * 10**8 and max(sizes) < 64 << 20


@pytest.mark.parametrize("file", ["d.jsonl", "d.jsonl.gz", "d.json", "d.csv", "d.parquet"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file(kind: str, file: str) -> None:
    make, message = SPECIAL[kind]
    special = Path("a.yaml")  # the name that `make` of a socket is at ease with
    make(special)
    special.rename(file)
    if kind == "loop":
        Path(file).unlink()
        Path(file).symlink_to(file)
    with pytest.raises(UserError, match=f"{file}: is .*{message}"):
        read(file)


def contents(kind: str) -> bytes:
    rows = [{"text": "x" * 1000}] * 5000
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), "made.parquet", row_group_size=500)
        return Path("made.parquet").read_bytes()
    if kind == "csv":
        return b"text\n" + b"".join(row["text"].encode() + b"\n" for row in rows)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(GOOD)


@pytest.mark.parametrize("change", [Path.unlink, cut, grow], ids=["vanishes", "is cut", "grows"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])  # a list is read before its first row is
def test_a_file_that_changes_while_it_is_read(kind: str, change: Callable[[Path], None]) -> None:
    path = Path(f"d.{kind}")
    path.write_bytes(contents(kind))

    def rows() -> Iterator[Any]:
        for number, block in enumerate(open_file(str(path)).blocks()):
            if number == 0:
                change(path)
            yield from block.records(ParseOptions())

    with pytest.raises(UserError, match=f"d.{kind}"):
        list(rows())


def test_a_file_that_changes_between_digest_and_reading() -> None:
    """Else the tokens of the new content would be kept under the digest of the old."""
    path = Path("d.jsonl")
    path.write_bytes(GOOD)
    part = open_file(str(path))
    path.write_bytes(GOOD * 2)
    assert part.digest is not None
    with pytest.raises(UserError, match="has changed while weft read it"):
        part.digest()


def test_sources_that_are_given_in_python_are_opened_by_name() -> None:
    Path("a.jsonl").write_text('{"text": "a"}\n')
    sources = open_data([SourceConfig(path="a.jsonl", name="first", weight=2.0), SourceConfig(path="a.jsonl")])
    assert [(source.label, source.name, source.weight) for source in sources] == [
        ("first (a.jsonl)", "first", 2.0),
        ("a (a.jsonl)", "a", 1.0),
    ]
