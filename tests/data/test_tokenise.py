"""Tokenising in processes, and tokens that are kept: nothing but the time differs."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from tests.data.test_sources import flat
from tests.support.pool import run
from tests.support.toy_tokenizers import CHATML, byte_tokenizer, chat, write_jsonl
from weft.data import sources, tokenise, workers
from weft.data.blocks import FileBlock
from weft.data.documents import load_documents
from weft.data.encode import Encoder
from weft.data.tokenise import TokeniseOptions
from weft.data.workers import WorkerPool
from weft.errors import StorageError, UserError


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    _large(monkeypatch)


def _large(patch: pytest.MonkeyPatch) -> None:
    """Small data is treated as data of many gigabytes."""
    patch.setattr(tokenise, "KEPT_BYTES", 0)
    patch.setattr(tokenise, "CREW_BYTES", 0)
    patch.setattr(sources, "BLOCK_BYTES", 300)


def write(path: Path, count: int = 40) -> str:
    rows = [chat(("user", f"{i}?"), ("assistant", "ab" * (i % 7 + 1))) for i in range(count)]
    return write_jsonl(path / "d.jsonl", *rows)


def load(path: str, *, template: str = CHATML, **how: Any) -> Any:
    return load_documents(path, byte_tokenizer(template), max_length=100, how=TokeniseOptions(**how))


@pytest.mark.covers("data.workers")
def test_processes_give_what_one_process_gives(tmp_path: Path) -> None:
    path, shown = write(tmp_path), []
    expected, report = load(path)
    documents, other_report = load(path, workers=2, show=lambda done, total: shown.append((done, total)))
    assert flat(documents) == flat(expected) and report == other_report
    assert [document.source for document in documents] == [document.source for document in expected]
    size = Path(path).stat().st_size
    assert shown[-1] == (size, size) and len(shown) > 5 and shown == sorted(shown)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_line_is_named_whoever_finds_one(workers: int, tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    lines = path.read_text().splitlines()
    lines[12], lines[30] = '{"text": 12}', "{"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"d\.jsonl:13: `text` must be a string"):
        load(str(path), workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("cached", [False, True])
def test_what_is_given_up_leaves_no_thread_and_no_process(
    workers: int, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they are ended by whatever thread collects garbage, also by one that holds the lock which their end needs:
    it then waits for itself, for ever."""
    path, threads, pools = write(tmp_path), set(threading.enumerate()), list[WorkerPool]()
    entered = WorkerPool.__enter__
    monkeypatch.setattr(WorkerPool, "__enter__", lambda pool: (pools.append(pool), entered(pool))[1])

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:  # with the frames of what was given up
        load(path, workers=workers, show=fail, **({"cache": str(tmp_path / "cache")} if cached else {}))
    assert error.traceback and set(threading.enumerate()) <= threads
    assert [process.returncode is None for pool in pools for process in pool._processes] == [False] * 2 * (workers - 1)
    blocks = sources.open_file(path).blocks()
    assert next(blocks).size and set(threading.enumerate()) <= threads


def test_a_worker_brings_no_torch(tmp_path: Path) -> None:
    (tmp_path / "work").write_bytes(pickle.dumps(tokenise.TokeniseTask(byte_tokenizer(CHATML))))
    (tmp_path / "block").write_bytes(pickle.dumps(FileBlock(write(tmp_path, 3), 0, 10**6, 0)))
    code = (
        "import pickle, sys\nfrom pathlib import Path\nimport weft.data.workers\n"
        "work, block = (pickle.loads(Path(name).read_bytes()) for name in ('work', 'block'))\n"
        "print(len(work.encode(work.make_encoder(), block).lengths), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=with_weft(), capture_output=True, text=True)
    program = "import sys\nfrom transformers import PreTrainedTokenizerFast\nprint('torch' in sys.modules)"
    brings = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert done.stdout == f"3 {brings}", done.stderr  # the oldest transformers reads tokenizers with torch


def with_weft() -> dict[str, str]:
    """An environment in which a program finds this weft."""
    return {**os.environ, "PYTHONPATH": str(Path(tokenise.__file__).parents[2])}


def test_a_process_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.data.workers.sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"a process that tokenises has died.*data\.workers"):
        load(write(tmp_path), workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_that_the_tokenizer_does_not_end_with_is_named(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers wait for ever, too: what stands for them is a program that reads and never answers."""
    encode, never = Encoder._encode, threading.Event()

    def slow(encoder: Encoder, records: Any) -> Any:
        if any("abababababab" in str(record.value) for record in records):
            never.wait()
        return encode(encoder, records)

    monkeypatch.setattr(Encoder, "_encode", slow)
    monkeypatch.setattr(tokenise, "_PATIENCE", 0.3)
    monkeypatch.setattr(tokenise, "_SLOWEST", 1e9)
    if workers > 1:
        stands_in = tmp_path / "waits"
        stands_in.write_text("#!/bin/sh\nexec sleep 60\n")
        stands_in.chmod(0o755)
        monkeypatch.setattr("weft.data.workers.sys.executable", str(stands_in))
        monkeypatch.setattr(sources, "BLOCK_BYTES", 10_000)
    with pytest.raises(UserError, match=r"d\.jsonl:6: the tokenizer has not finished this text within"):
        load(write(tmp_path), workers=workers)
    never.set()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_for_which_the_tokenizers_library_panics_is_a_bad_row(workers: int, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(None)
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # gives up after too many tries, by a panic
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False)])
    path = write_jsonl(tmp_path / "d.jsonl", {"text": "b"}, {"text": "a" * 50 + "c"}, {"text": "c"})
    with pytest.raises(UserError, match=r"d\.jsonl:2: the tokenizer fails for this text: .*retry-limit"):
        load_documents(path, tokenizer, max_length=100, how=TokeniseOptions(workers=workers))
    how = TokeniseOptions(workers=workers)
    documents, _ = load_documents(path, tokenizer, max_length=100, bad_rows="drop", how=how)
    assert [document.source for document in documents] == [f"{path}:1", f"{path}:3"]


class Limited:
    """Work whose every block goes deeper than Python does."""

    def make_encoder(self) -> None: ...

    def encode(self, encoder: None, block: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")


def test_what_is_too_deep_for_a_process_that_tokenises_is_no_crash() -> None:
    parent_end, child_end = Pipe()
    thread = Thread(target=workers.serve, args=(child_end,))
    thread.start()
    for message in (Limited(), "a block"):
        parent_end.send_bytes(pickle.dumps(message))
    answer = pickle.loads(parent_end.recv_bytes())
    parent_end.close()
    thread.join()
    with pytest.raises(RecursionError):
        workers._result(answer)


@pytest.mark.covers("data.cache")
def test_what_is_kept_is_not_tokenised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache_folder = write(tmp_path), str(tmp_path / "kept")
    first, report = load(path, cache=cache_folder)
    calls: list[int] = []
    original = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, records: calls.append(len(records)) or original(self, records))
    reread, other_report = load(path, cache=cache_folder)
    assert not calls and flat(reread) == flat(first) and report == other_report
    moved = Path(path).rename(tmp_path / "moved.jsonl")
    assert load(str(moved), cache=cache_folder)[0][3].source == f"{moved}:4" and not calls
    load(str(moved), cache=cache_folder, template=CHATML + " ")  # another template is another text
    assert sum(calls) == 40
    moved.write_text(moved.read_text().replace("7?", "8?"))
    load(str(moved), cache=cache_folder)
    load(str(moved))
    assert sum(calls) == 120
    assert len(list((tmp_path / "kept" / "tokens").glob("*/table.json"))) == 3
    assert not list((tmp_path / "kept" / "tokens").glob("*.partial"))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *itertools.product(["ids", "lengths", "losses", "table.json"], ["cut", "emptied", "gone"]),
        *itertools.product(["ids", "trained", "lengths"], ["changed"]),
    ],
)
def test_what_is_kept_and_damaged_is_made_anew(name: str, harm: str, tmp_path: Path) -> None:
    path, cache_folder = write(tmp_path, 5), str(tmp_path / "kept")
    first, report = load(path, cache=cache_folder)
    expected = flat(first)
    [file] = (tmp_path / "kept" / "tokens").glob(f"*/{name}")
    (tmp_path / "kept" / "tokens" / f"{file.parent.name}.1.partial").mkdir()  # of one that was killed
    intact = file.read_bytes()
    file.unlink()  # `first` maps it
    if harm != "gone":
        cut = {"cut": intact[: len(intact) // 2], "emptied": b"", "changed": bytes([intact[0] ^ 1]) + intact[1:]}
        file.write_bytes(cut[harm])
    for _ in range(2):
        reread, other_report = load(path, cache=cache_folder)
        assert flat(reread) == expected and report == other_report
        assert file.read_bytes() == intact
    assert not list((tmp_path / "kept" / "tokens").glob("*.partial"))


def test_what_failed_is_not_kept(tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    content = path.read_text()
    path.write_text(content + "{\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"d\.jsonl:41: is not valid JSON"):
            load(str(path), cache=str(tmp_path / "kept"))
    assert not [entry for entry in (tmp_path / "kept" / "tokens").iterdir() if entry.is_dir()]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"data\.cache: .*file/tokens cannot be used: .*or to null"):
        load(write(tmp_path), cache=str(tmp_path / "file"))


def _rank_loads(path: str, cache_folder: str, log: str) -> tuple[Any, str]:
    """On a rank: what it loaded. It leaves a line in the log when it tokenises."""
    original = Encoder.encode

    def encode(self: Encoder, records: Any) -> Any:
        with open(log, "a") as file:
            file.write(f"{os.environ.get('RANK', '')} {len(records)}\n")
        time.sleep(0.02)
        return original(self, records)

    with pytest.MonkeyPatch.context() as patch:
        _large(patch)
        patch.setattr(Encoder, "encode", encode)
        documents, report = load(path, cache=cache_folder)
        return flat(documents), report.digest


def test_one_rank_tokenises_and_the_others_wait(tmp_path: Path) -> None:
    path, log = write(tmp_path), tmp_path / "log"
    results = run(4, _rank_loads, path, str(tmp_path / "kept"), str(log))
    assert all(result == results[0] for result in results)
    assert sum(int(line.split()[-1]) for line in log.read_text().splitlines()) == 40
    assert results[0][0] == flat(load(path)[0])


def test_json_of_a_table_is_small(tmp_path: Path) -> None:
    """What is beside the arrays is what `read` needs."""
    load(write(tmp_path), cache=str(tmp_path / "kept"))
    [meta] = (tmp_path / "kept" / "tokens").glob("*/table.json")
    assert set(json.loads(meta.read_text())) == {"documents", "digest", "largest", "bad", "places"}
