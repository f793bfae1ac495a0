"""data.bad_rows: rows that cannot be trained on end a run by name, or are left out, counted and written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.test_errors_in_data import model
from tests.support.local_rl import make_task, start
from tests.support.toy_tokenizers import CHATML, byte_tokenizer, chat, write_jsonl
from weft import cli
from weft.data.documents import Documents, load_documents
from weft.data.sources import BLOCK_BYTES
from weft.data.tokenise import TokeniseOptions
from weft.errors import UserError

GOOD = chat(("user", "hi"), ("assistant", "yes"))
BAD: dict[str, Any] = {
    "no JSON": '{"messages": ',
    "no object": "[1, 2]",
    "no UTF-8": b'{"text": "\xff"}',
    "too large": json.dumps({"text": "a" * 3000}),
    "no format": json.dumps({"body": "a"}),
    "half a character": '{"text": "\\ud800"}',
    "a role that is none": json.dumps(chat(("user", "hi"), ("bot", "yes"))),
    "tools that the template does not render": json.dumps({**GOOD, "tools": [{"name": "f"}]}),
    "nothing trained": json.dumps(chat(("user", "hi"))),
}
OPTIONS: dict[str, Any] = {"max_length": 100, "encoding": None}


def write_rows(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return str(path)


def config_of(path: str, **keys: Any) -> Any:
    from weft.config.schema import DataConfig

    return DataConfig(path=path, max_row_bytes=2000, **keys)


def texts(documents: Documents) -> list[str]:
    return [document.source.rpartition(":")[2] for document in documents]


@pytest.mark.covers("data.bad_rows")
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_an_error_that_names_the_key_or_is_left_out(kind: str, tmp_path: Path) -> None:
    good = json.dumps(GOOD)
    path = write_rows(tmp_path / "d.jsonl", good, BAD[kind], good)
    with pytest.raises(UserError, match=r"d\.jsonl:2: ") as caught:
        load_documents(config_of(path), byte_tokenizer(CHATML), **OPTIONS)
    assert str(caught.value).endswith("Or skip such rows with data.bad_rows=drop.")
    documents, report = load_documents(config_of(path), byte_tokenizer(CHATML), bad_rows="drop", **OPTIONS)
    assert texts(documents) == ["1", "3"] and report.documents == 2 and report.dropped == 0
    ((source, error),) = report.bad
    assert source == path and error.startswith(f"{path}:2: ") and "\n" not in error
    assert str(report).endswith("; 1 bad rows omitted")
    clean = write_rows(tmp_path / "clean.jsonl", good, good)
    assert report.digest == load_documents(clean, byte_tokenizer(CHATML), **OPTIONS)[1].digest


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_rows_of_other_files(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"d.{ending}"
    if ending == "csv":
        path.write_text("prompt,completion\na,b\na,b,c\na,b\n")
    elif ending == "json":
        path.write_text('[{"text": "aa"}, 3, {"text": "aa"}]')
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["aa", "a" * 3000, *["aa"] * 9]}), path)
    config = config_of(str(path))
    with pytest.raises(UserError, match=r"data.bad_rows=drop"):
        load_documents(config, byte_tokenizer(), **OPTIONS)
    documents, report = load_documents(config, byte_tokenizer(), bad_rows="drop", **OPTIONS)
    assert len(documents) == (10 if ending == "parquet" else 2) and len(report.bad) == 1


def test_a_line_over_several_blocks_is_one_bad_row(tmp_path: Path) -> None:
    good = json.dumps({"text": "aa"})
    long = json.dumps({"text": "b" * (3 * BLOCK_BYTES)})
    path = write_rows(tmp_path / "d.jsonl", good, long, good)
    documents, report = load_documents(config_of(path), byte_tokenizer(), bad_rows="drop", **OPTIONS)
    assert texts(documents) == ["1", "3"] and len(report.bad) == 1 and f"{path}:2: is larger than" in report.bad[0][1]


def test_processes_and_a_cache_change_nothing(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{i:0300}"}) if i % 100 else "{" for i in range(5000)]
    path, folder = write_rows(tmp_path / "d.jsonl", *lines), str(tmp_path / "cache")
    options: dict[str, Any] = {"max_length": 400, "bad_rows": "drop"}
    plain = load_documents(path, byte_tokenizer(), **options)[1]
    assert len(plain.bad) == 50 and plain.documents == 4950
    for _ in range(2):  # made, and read again
        assert load_documents(path, byte_tokenizer(), how=TokeniseOptions(cache=folder), **options)[1] == plain
    with pytest.raises(UserError, match=r"d\.jsonl:1: is not valid JSON.*Or skip such rows with data\.bad_rows=drop"):
        load_documents(path, byte_tokenizer(), max_length=400, how=TokeniseOptions(cache=folder))


def test_too_long_documents_are_counted_apart(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", *(json.dumps({"text": "a" * n}) for n in (0, 5, 50)))
    _, report = load_documents(path, byte_tokenizer(), max_length=9, long_documents="drop", bad_rows="drop")
    assert (report.documents, report.dropped, len(report.bad)) == (1, 1, 1)


def test_a_source_without_a_good_row_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", "{", "{")
    with pytest.raises(
        UserError, match=r"drop leaves no document of .*all 2 rows are bad. The first: .*d.jsonl:1: is no"
    ):
        load_documents(path, byte_tokenizer(), max_length=9, bad_rows="drop")


@pytest.mark.slow
def test_a_run_writes_them_down_and_one_with_other_rows_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": "a" * n}) for n in (3, 4, 5)]
    write_rows(Path("d.jsonl"), *rows, "{")
    write_rows(Path("e.jsonl"), rows[0], "[]")
    words = [f"model.path={model(byte_tokenizer, 300)}", "model.init=random", "data.path=d.jsonl", "run.dir=run"]
    words += ["step.documents=1", "train.steps=2", "schedule.name=constant", "eval.path=e.jsonl"]
    assert cli.main(["sft", *words]) == 2
    assert "d.jsonl:4: is not valid JSON" in capsys.readouterr().err
    assert cli.main(["sft", *words, "data.bad_rows=drop"]) == 0
    assert "; 1 bad rows omitted" in capsys.readouterr().out
    written = [json.loads(line) for line in Path("run/bad_rows.jsonl").read_text().splitlines()]
    assert [row["source"] for row in written] == ["d.jsonl", "e.jsonl"] and "d.jsonl:4: is not" in written[0]["error"]
    write_rows(Path("d.jsonl"), *rows, rows[0])  # mended: the order of the data would be another
    assert cli.main(["sft", "--resume", "run", "train.steps=3"]) == 2
    assert "the data (d.jsonl) has other documents than before (4 now, 3 before)" in capsys.readouterr().err
    write_rows(Path("d.jsonl"), *rows)
    write_rows(Path("e.jsonl"), rows[0])
    assert cli.main(["sft", "--resume", "run", "train.steps=3"]) == 0
    assert not Path("run/bad_rows.jsonl").exists()


@pytest.mark.slow
def test_prompts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = make_task(tmp_path)
    lines = (task / "additions.jsonl").read_text().splitlines()
    write_jsonl(
        task / "additions.jsonl",
        *map(json.loads, lines[:4]),
        {"body": "b", "completion": "1"},
        {"prompt": "", "completion": "1"},
    )
    with pytest.raises(UserError, match=r"additions\.jsonl:5: has `body`.*Or skip such rows with data\.bad_rows=drop"):
        start(task, tmp_path / "run", "train.steps=1")
    start(task, tmp_path / "other", "train.steps=1", "data.bad_rows=drop")
    assert "4 prompts of 6 tokens; 2 bad rows omitted" in capsys.readouterr().out
    written = [json.loads(line)["error"] for line in (tmp_path / "other/bad_rows.jsonl").read_text().splitlines()]
    assert "additions.jsonl:5: has `body`" in written[0] and "additions.jsonl:6: `prompt` is empty" in written[1]
