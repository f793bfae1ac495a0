"""Every form that data comes in gives the same documents; files prepared for other trainers are read by a mapping."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from tests.data.test_errors_in_data import model
from tests.support.toy_tokenizers import CHATML, byte_tokenizer, chat, write_jsonl
from weft import cli
from weft.config import SftConfig, load_config
from weft.config.schema import DataConfig, SourceConfig
from weft.config.sources import DATA_SUFFIXES
from weft.data import sources as sources_module
from weft.data.documents import Documents, lengths_of, load_documents, shares_of
from weft.data.messages import MessageRules, read_messages
from weft.data.records import ParseOptions, Record
from weft.data.sources import in_memory, open_data, open_file, open_source
from weft.errors import UserError
from weft.recipes.run_data import dated, read_run_data

ROWS = [{"prompt": f'{i}+{i}, or\n"twice" {i}=', "completion": f"{2 * i} \u00e9"} for i in range(7)]


def flat(documents: Documents) -> list[tuple[list[int], list[float]]]:
    return [(document.tokens.tolist(), document.weights.tolist()) for document in documents]


def records(path: str, chat: bool = True, **source: Any) -> list[Record]:
    """The checked rows of a source."""
    config = SourceConfig(path=path, **source)
    reading = ParseOptions(config.columns, chat=chat)
    return [record for part in open_source(config) for block in part.blocks() for _, record in block.records(reading)]


def values(path: str, **source: Any) -> list[dict[str, Any]]:
    return [record.value for record in records(path, **source)]


@pytest.mark.parametrize("mask", ["labels", "loss_mask", "completion_mask", "assistant_masks", "train_mask"])
def test_rows_of_tokens_are_the_documents_they_were_made_of(mask: str, tmp_path: Path) -> None:
    expected, _ = load_documents(ROWS, byte_tokenizer(), max_length=100)
    rows = []
    for document in expected:
        ids, trained = document.tokens.tolist(), document.weights.int().tolist()
        values = [i if t else -100 for i, t in zip(ids, trained, strict=True)] if mask == "labels" else trained
        rows.append({"input_ids": ids, mask: values, "attention_mask": [1] * len(ids)})
    write_jsonl(tmp_path / "tokens.jsonl", *rows)
    source = SourceConfig(path=str(tmp_path / "tokens.jsonl"))
    if mask == "train_mask":
        source = dataclasses.replace(source, columns={"input_ids": "input_ids", "loss_mask": mask})
    documents, report = load_documents(DataConfig(path=None, sources=(source,)), byte_tokenizer(), max_length=100)
    assert flat(documents) == flat(expected) and report.formats == (("input_ids", len(ROWS)),)
    (untruncated,), _ = load_documents([{"input_ids": [3, 4]}], byte_tokenizer(), max_length=100)
    assert untruncated.weights.tolist() == [1.0, 1.0]


@pytest.mark.covers("eval.share")
@pytest.mark.parametrize(("share", "seed"), [(0.3, 0), (0.3, 1), (0.01, 0)])
def test_a_share_of_the_training_data_is_held_out(share: float, seed: int, tmp_path: Path) -> None:
    """Of each source: every document is trained on or held out, by the seed alone, and digests are of what is there."""
    for name, rows in (("a", ROWS), ("b", ROWS[:4])):
        write_jsonl(tmp_path / f"{name}.jsonl", *rows)
    sources = f"[{{path: {tmp_path}/a.jsonl}}, {{path: {tmp_path}/b.jsonl}}]"
    tokenizer = model(byte_tokenizer, 300)
    words = [f"model.path={tokenizer}", "model.init=random", f"data.sources={sources}", f"train.seed={seed}"]
    unsplit = read_run_data(load_config([], words, SftConfig))
    split = read_run_data(load_config([], [*words, f"eval.share={share}"], SftConfig))
    assert split.held_out.reports[""].documents == {0.3: 2 + 1, 0.01: 1 + 1}[share]
    held_out, remaining = list(split.held_out.documents[""]), list(split.documents)
    assert sorted(d.source for d in [*held_out, *remaining]) == sorted(d.source for d in unsplit.documents)
    assert [d.dataset for d in held_out].count("b") == 1
    assert [entry.documents for entry in shares_of(split.documents)] == [
        7 - len(held_out) + 1, 3,
    ]  # fmt: skip
    repeated = read_run_data(load_config([], [*words, f"eval.share={share}"], SftConfig))
    assert (split.report, split.held_out.digest) == (repeated.report, repeated.held_out.digest)
    assert split.report.digest != unsplit.report.digest
    other_seed = read_run_data(load_config([], [*words, f"eval.share={share}", "train.seed=7"], SftConfig))
    assert {d.source for d in other_seed.held_out.documents[""]} != {d.source for d in held_out}
    with pytest.raises(UserError, match="eval.share: 0.9 of b .*b.jsonl.*, which has 4 documents, leaves none"):
        read_run_data(load_config([], [*words, "eval.share=0.9"], SftConfig))
    with pytest.raises(UserError, match="eval.share and eval.path are both set"):
        load_config([], [*words, "eval.share=0.5", f"eval.path={tmp_path}/a.jsonl"], SftConfig)


@pytest.mark.parametrize("long", ["drop", "truncate"])
def test_held_out_documents_that_are_trained_on_are_counted(long: str, tmp_path: Path) -> None:
    """Equal tokens are found wherever they are; documents of one length that differ in a token are not equal."""
    texts = [f"{number:03} {'word ' * 9}" for number in range(40)]
    write_jsonl(tmp_path / "train.jsonl", *({"text": text} for text in texts))
    held_out = [texts[7], texts[7].replace("w", "W", 1), "new", texts[30], texts[7] + " and more"]
    write_jsonl(tmp_path / "held.jsonl", *({"text": text} for text in held_out))
    words = [
        f"model.path={model(byte_tokenizer, 300)}", "model.init=random", f"data.path={tmp_path}/train.jsonl",
        "data.max_length=60", f"data.long_documents={long}",
    ]  # fmt: skip
    lines = read_run_data(load_config([], [*words, f"eval.path={tmp_path}/held.jsonl"], SftConfig)).held_out.lines()
    (hint,) = [line for line in lines if line.startswith("hint")]
    assert "2 of the 5 held-out documents are also in the training data" in hint
    assert f"{tmp_path}/held.jsonl:1 equals {tmp_path}/train.jsonl:8." in hint
    named = read_run_data(load_config([], [*words, f"eval.sources=[{{name: new, path: {tmp_path}/held.jsonl}}]"]))
    assert any(line.startswith("hint     new: 2 of the 5") for line in named.held_out.lines())
    assert not any(
        "hint" in line for line in read_run_data(load_config([], [*words, "eval.share=0.2"])).held_out.lines()
    )
    write_jsonl(tmp_path / "train.jsonl", *({"text": texts[0]} for _ in range(10)))
    lines = read_run_data(load_config([], [*words, "eval.share=0.2"])).held_out.lines()
    assert any("hint     2 of the 2 held-out documents" in line for line in lines)


# ---------------------------------------------------------------- forms


def write_jsonl_file(path: Path) -> str:
    return write_jsonl(path / "d.jsonl", *ROWS)


def write_zipped(path: Path) -> str:
    (path / "d.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return str(path / "d.jsonl.gz")


def write_list(path: Path) -> str:
    (path / "d.json").write_text(json.dumps(ROWS, indent=1))
    return str(path / "d.json")


def write_lines_called_json(path: Path) -> str:
    return write_jsonl(path / "d.json", *ROWS)


def write_csv(path: Path) -> str:
    with (path / "d.csv").open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, ["id", "prompt", "completion"])
        table.writeheader()
        table.writerows({"id": i, **row} for i, row in enumerate(ROWS))
    return str(path / "d.csv")


def write_tsv(path: Path) -> str:
    with (path / "d.tsv").open("w", newline="") as file:
        csv.writer(file, "excel-tab").writerows([("prompt", "completion"), *(tuple(row.values()) for row in ROWS)])
    return str(path / "d.tsv")


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS, group: int = 3) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path / "d.parquet", row_group_size=group)
    return str(path / "d.parquet")


def write_saved(path: Path) -> str:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(path / "saved")
    return str(path / "saved")


def write_several(path: Path) -> str:
    write_jsonl(path / "part-0.jsonl", *ROWS[:4])
    write_jsonl(path / "part-1.jsonl", *ROWS[4:])
    return str(path / "part-*.jsonl")


FORMS = {
    write_jsonl_file: (".jsonl:2", ".jsonl:7"),
    write_zipped: (".jsonl.gz:2", ".jsonl.gz:7"),
    write_list: (".json[1]", ".json[6]"),
    write_lines_called_json: (".json:2", ".json:7"),
    write_csv: (".csv:4", ".csv:14"),  # a row of two lines each, behind the header
    write_tsv: (".tsv:4", ".tsv:14"),
    write_parquet: (".parquet[1]", ".parquet[6]"),
    write_saved: ("saved[1]", "saved[6]"),
    write_several: ("part-0.jsonl:2", "part-1.jsonl:3"),
}


@pytest.mark.parametrize("write", FORMS, ids=lambda write: write.__name__.removeprefix("write_"))
def test_every_form_gives_the_same_documents(
    write: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "BLOCK_ROWS", 2)
    tokenizer = byte_tokenizer()
    expected, _ = load_documents(ROWS, tokenizer, max_length=100)
    documents, report = load_documents(write(tmp_path), tokenizer, max_length=100)
    assert flat(documents) == flat(expected)
    assert report.documents == 7 and report.formats == (("prompt", 7),)
    second, last = FORMS[write]
    assert documents[1].source.endswith(second) and documents[6].source.endswith(last)


NOTES = "\ufeffOne.\r\n\r\n Two\u2028and\nthree \n \t\nFour"


@pytest.mark.covers("data.text_unit")
@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("line", {1: "One.", 3: " Two\u2028and", 4: "three ", 6: "Four"}),
        (None, {1: "One.", 3: " Two\u2028and", 4: "three ", 6: "Four"}),
        ("paragraph", {1: "One.", 3: " Two\u2028and\nthree ", 6: "Four"}),
        ("document", {1: "One.\n\n Two\u2028and\nthree \n \t\nFour"}),
    ],
)
@pytest.mark.parametrize("file", ["notes.txt", "notes.txt.gz"])
def test_documents_of_plain_text(unit: Any, expected: dict[int, str], file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_bytes(gzip.compress(NOTES.encode()) if file.endswith(".gz") else NOTES.encode())
    data = DataConfig(path=str(tmp_path / "*.txt*"), text_unit=unit)
    reading = ParseOptions({})
    (source,) = open_data(data)
    parsed = [record for block in source.parts[0].blocks() for _, record in block.records(reading)]
    assert {record.location: record.value["text"] for record in parsed} == {
        f"{path}:{n}": t for n, t in expected.items()
    }
    _, report = load_documents(data, byte_tokenizer(), max_length=100)
    assert report.formats == (("text", len(expected)),)
    assert report.template_use(data, False).endswith(f"; each {unit or 'line'} of a .txt file is a document")
    assert ".txt" not in report.template_use(dataclasses.replace(data, path="a.jsonl"), False)


def test_units_of_a_text_are_told_apart_by_its_digest(tmp_path: Path) -> None:
    """Which keys the kept tokens."""
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    parts = [open_file(f"{tmp_path}/a.txt", unit=unit) for unit in ("line", "paragraph", "document")]
    assert len({part.digest() for part in parts if part.digest is not None}) == 3


def test_lines_of_json_that_are_called_txt(tmp_path: Path) -> None:
    """As before there was plain text; a unit that is set says that it is text."""
    path = tmp_path / "d.txt"
    path.write_text('\n{"text": "a"}\n{"text": "b"}\n')
    assert values(str(path)) == [{"text": "a"}, {"text": "b"}]
    path.write_text("{a brace}\n")
    assert values(str(path)) == [{"text": "{a brace}"}]
    path.write_text('{"text": "a"}\n')
    (source,) = open_data(DataConfig(path=str(path), text_unit="line"))
    ((_, record),) = next(iter(source.parts[0].blocks())).records(ParseOptions({}))
    assert record.value == {"text": '{"text": "a"}'}


@pytest.mark.parametrize("unit", ["line", "paragraph", "document"])
def test_a_large_text_is_refused_before_it_is_read_whole(unit: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("short\n\n" + ("x" * 9 + "\n") * 10 if unit != "line" else "short\n\n" + "x" * 90)
    (part,) = open_source(SourceConfig(path=str(path)), max_bytes=50, unit=unit)
    line = 1 if unit == "document" else 3
    with pytest.raises(UserError, match=rf"d.txt:{line}: is larger than data.max_row_bytes = 50"):
        [record for block in part.blocks() for record in block.records(ParseOptions({}))]


@pytest.mark.parametrize("ending", DATA_SUFFIXES)
def test_every_ending_is_explained(ending: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "data.md"
    assert f"`{ending}`" in page.read_text(encoding="utf-8").partition("## Sources")[2].partition("## ")[0]


@pytest.mark.parametrize("ending", ["", ".jsonlines", ".bak", ".log"])
def test_lines_of_json_with_another_ending(ending: str, tmp_path: Path) -> None:
    """Also where the first lines are bad rows, which may be left out."""
    path = tmp_path / f"d{ending}"
    path.write_text('# a comment\n{"text": "a"}\n')
    _, report = load_documents(DataConfig(path=str(path)), byte_tokenizer(), max_length=100, bad_rows="drop")
    assert report.documents == 1


def test_the_proposal_for_a_file_divided_by_semicolons_works(tmp_path: Path) -> None:
    path = tmp_path / "my data;1.csv"
    path.write_text('question;answer\n"1;\n2";"a ""b"", c"\n')
    with pytest.raises(UserError) as caught:
        records(str(path))
    run(["sh", "-c", str(caught.value).partition("The command ")[2].partition(" separates them")[0]], check=True)
    copied = str(path).replace(".csv", "-commas.csv")
    assert values(copied, columns={"prompt": "question", "completion": "answer"}) == [
        {"prompt": "1;\n2", "completion": 'a "b", c'}
    ]


def test_data_in_memory(tmp_path: Path) -> None:
    import datasets

    tokenizer = byte_tokenizer()
    listed, _ = load_documents(ROWS, tokenizer, max_length=100)
    dataset, _ = load_documents(datasets.Dataset.from_list(ROWS), tokenizer, max_length=100)
    assert flat(listed) == flat(dataset)
    assert listed[2].source == dataset[2].source == "data[2]"
    with pytest.raises(UserError, match=r"data: each document must be a dict of columns, but one is a str"):
        load_documents(["text"], tokenizer, max_length=100)
    with pytest.raises(UserError, match=r"data\[1\]: has `body`"):
        load_documents([*ROWS[:1], {"body": "a"}], tokenizer, max_length=100)


@pytest.mark.parametrize("size", [1, 2, 7, 30, 64, 1000])
def test_a_file_cut_into_blocks_anywhere(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank lines, a byte order mark, a last line without an end: numbers and documents stay the same."""
    lines = [
        "\ufeff" + json.dumps({"text": "a"}),
        "",
        json.dumps({"text": "b\u2028\u00e9"}, ensure_ascii=False),
        "  \r",
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([*lines, json.dumps({"text": "cc" * 20})]), encoding="utf-8")
    monkeypatch.setattr(sources_module, "BLOCK_BYTES", size)
    parsed = records(str(path))
    assert [record.location.rpartition(":")[2] for record in parsed] == ["1", "3", "5"]
    assert [record.value["text"] for record in parsed] == ["a", "b\u2028\u00e9", "cc" * 20]


# ---------------------------------------------------------------- splits


@pytest.mark.covers("data.split")
@pytest.mark.parametrize(
    ("split", "expected"),
    [("[:2]", [0, 1]), ("[5:]", [5, 6]), ("[-1:]", [6]), ("[:50%]", [0, 1, 2, 3]), ("[2:4]", [2, 3]), ("[5:3]", [])],
)
@pytest.mark.parametrize("write", [write_jsonl_file, write_zipped, write_csv, write_list, write_parquet, write_saved])
def test_a_part_of_a_source(write: Callable[[Path], str], split: str, expected: list[int], tmp_path: Path) -> None:
    assert values(write(tmp_path), split=split) == [ROWS[i] for i in expected]


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    import datasets

    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS[:5]), test=datasets.Dataset.from_list(ROWS[5:]))
    splits.save_to_disk(tmp_path / "both")
    path = str(tmp_path / "both")
    assert values(path) == ROWS[:5]
    assert values(path, split="test[1:]") == ROWS[6:]
    assert records(path, split="test")[1].location == f"{path}:test[1]"
    with pytest.raises(UserError, match=r"has no split valid. Set data\.split to train or test"):
        records(path, split="valid")
    with pytest.raises(UserError, match=r"is a file, which has no split train"):
        records(write_jsonl_file(tmp_path), split="train")
    with pytest.raises(UserError, match=r"data\.subset: .* is not a dataset on the hub"):
        records(path, subset="main")


@pytest.mark.covers("data.subset")
def test_a_dataset_on_the_hub_is_asked_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    requests = []

    def load_dataset(path: str, subset: str | None, split: str | None) -> Any:
        requests.append((path, subset, split))
        if path == "no/where":
            raise ConnectionError("cannot reach the hub\nat all")
        return datasets.Dataset.from_list(ROWS, split=split)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values("openai/gsm8k", subset="main", split="train[:3]") == ROWS[:3]
    assert requests == [("openai/gsm8k", "main", "train")]
    with pytest.raises(UserError, match=r"no/where .* could not load it from the hub: cannot reach the hub\."):
        records("no/where")


# ---------------------------------------------------------------- files of other trainers

QUESTION = [{"role": "user", "content": "1+1?"}]
ANSWER = {"role": "assistant", "content": "2"}
CHAT = [*QUESTION, ANSWER]
VERL = {
    "data_source": "openai/gsm8k", "prompt": QUESTION, "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "question": "1+1?", "answer": "2", "turns": CHAT},
}  # fmt: skip
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.covers("data.columns")
@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        pytest.param(VERL, {"completion": "reward_model.ground_truth"},
                     {"prompt": QUESTION, "completion": [ANSWER]}, id="verl"),
        pytest.param(
            VERL, {"instruction": "extra_info.question", "output": "extra_info.answer"},
            {"messages": CHAT}, id="verl, prompt_dict_keys",
        ),
        pytest.param(VERL, {"messages": "extra_info.turns"}, {"messages": CHAT}, id="verl, turns"),
        pytest.param(
            VERL, {"prompt": "prompt.0.content", "completion": "extra_info.turns.-1.content"},
            {"prompt": "1+1?", "completion": "2"}, id="places in lists",
        ),
        pytest.param({"prompt": QUESTION, "label": "2"}, {"completion": "label"},
                     {"prompt": QUESTION, "completion": [ANSWER]}, id="Miles"),
        pytest.param({"messages": CHAT, "metadata": {}}, {}, {"messages": CHAT}, id="Miles, SFT"),
        pytest.param({"instruction": "1+1?", "input": "", "output": "2"}, {}, {"messages": CHAT}, id="ROLL"),
        pytest.param({"prompt": QUESTION, "completion": [ANSWER]}, {},
                     {"prompt": QUESTION, "completion": [ANSWER]}, id="TRL"),
        pytest.param({"question": "1+1?", "answer": "2", "text": "x"}, {"prompt": "question", "completion": "answer"},
                     {"prompt": "1+1?", "completion": "2"}, id="a mapped format leaves others out"),
        pytest.param(
            {"instruction": "Add.", "input": "1+1?", "output": "2", "system": "Be brief.", "history": [["a", "b"]]}, {},
            {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
                          {"role": "assistant", "content": "b"}, {"role": "user", "content": "Add.\n1+1?"}, ANSWER]},
            id="LLaMA-Factory, alpaca",
        ),
        pytest.param(
            {"conversations": [{"from": "human", "value": "1+1?"},
                               {"from": "function_call", "value": json.dumps(CALL["function"])},
                               {"from": "observation", "value": "2"}, {"from": "gpt", "value": "2"}],
             "tools": json.dumps([TOOL])},
            {"messages": "conversations"},
            {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [CALL]},
                          {"role": "tool", "content": "2"}, ANSWER],
             "tools": [TOOL]},
            id="LLaMA-Factory, sharegpt",
        ),
        pytest.param({"messages": [*QUESTION, {**ANSWER, "weight": 0}]}, {},
                     {"messages": [*QUESTION, {**ANSWER, "train": False}]}, id="OpenAI"),
        pytest.param({"messages": json.dumps(CHAT)}, {}, {"messages": CHAT}, id="JSON in text"),
        pytest.param({"prompt": "[{ is text", "completion": "x"}, {}, {"prompt": "[{ is text", "completion": "x"},
                     id="no JSON"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("write", ["jsonl", "parquet"])
def test_rows_of_other_trainers(
    row: dict[str, Any], columns: dict[str, str], expected: dict[str, Any], write: str, tmp_path: Path
) -> None:
    if write == "parquet" and row.get("metadata") == {}:
        row = {"messages": row["messages"]}  # Parquet has no empty objects
    path = write_jsonl(tmp_path / "d.jsonl", row) if write == "jsonl" else write_parquet(tmp_path, [row])
    assert values(path, columns=columns) == [expected]


SPOKEN = {"messages": [{"role": "human", "content": "1+1?"}, {"role": "Bot", "content": "2"}]}
SHARED = {"messages": [{"from": "prompter", "value": "1+1?"}, {"from": "model", "value": "2"}]}


def flat_of_roles(path: Path, *overrides: str) -> tuple[Any, str]:
    """What the documents hold, or the key and value that an error proposes to set."""
    config = load_config([], ["model.path=org/model", f"data.path={path}", *overrides])
    try:
        return flat(load_documents(config.data, byte_tokenizer(), max_length=100)[0]), ""
    except UserError as error:
        return None, re.findall(r"is unknown to weft.* Set '(data\.roles=\{.*?\})'", str(error))[0]


@pytest.mark.covers("data.roles")
@pytest.mark.parametrize(
    "rows", [[SPOKEN], [SHARED], [SPOKEN, SHARED], [{"prompt": SPOKEN["messages"][:1], "completion": "2"}]]
)
def test_the_mapping_of_roles_that_an_error_proposes_mends_it(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Followed as often as one is proposed; then the answers are trained as of any other conversation."""
    path = tmp_path / "d.jsonl"
    write_jsonl(path, *rows)
    documents, proposed = flat_of_roles(path)
    assert proposed
    for _ in rows:
        documents, proposed = flat_of_roles(path, proposed) if proposed else (documents, proposed)
    expected, _ = load_documents(
        [chat(("user", "1+1?"), ("assistant", "2"))] * len(rows), byte_tokenizer(), max_length=100
    )
    assert documents == flat(expected)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ("{bot: robot}", "bot: robot is not one of system, developer"),
        ("{user: human}", "Write the data's role first: {human: user}"),
    ],
)
def test_roles_that_are_none(roles: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config([], ["model.path=org/model", f"data.path={__file__}", f"data.roles={roles}"])
    assert words in str(caught.value)


def test_a_role_of_the_templates_own_is_mapped_to_itself() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "document", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    assert read_messages("d:1", "messages", messages, MessageRules({"document": "document"})) == messages


TEXT = {"prompt": "a", "completion": "b"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_nulls_of_a_table_are_not_there(tmp_path: Path) -> None:
    """In Parquet every message has the keys of all."""
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    second_call = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "no", "arguments": {"b": 2}}}],
        "content": "",
    }
    messages = [*QUESTION, called, {"role": "tool", "content": "2", "tool_call_id": "x"}, second_call]
    assert values(write_parquet(tmp_path, [{"messages": messages, "tools": None}])) == [{"messages": messages}]


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "unit": None, "of": [{"b": None}]}}}]
CALLED = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]


def json_features(column: str) -> Any:
    """Features with datasets' type Json() for whole messages, for each call, or for the arguments of calls."""
    import datasets

    text, json_type, listed = datasets.Value("string"), datasets.Json(), datasets.List
    function = {"type": text, "function": {"name": text, "arguments": json_type}}
    message = {
        "messages": json_type,
        "message": json_type,
        "calls": {"role": text, "content": text, "tool_calls": json_type},
        "call": {"role": text, "content": text, "tool_calls": listed(json_type)},
        "arguments": {"role": text, "content": text, "tool_calls": listed(function)},
    }[column]
    return datasets.Features(
        {"messages": json_type if column == "messages" else listed(message), "n": datasets.Value("int64")}
    )


@pytest.mark.parametrize("column", ["messages", "message", "calls", "call", "arguments"])
@pytest.mark.parametrize("form", ["memory", "saved", "parquet"])
def test_json_columns_of_datasets_are_the_values_that_were_written(column: str, form: str, tmp_path: Path) -> None:
    """datasets stores Json() as text. Its nulls were written, so they stay; a struct's may be Arrow's."""
    import datasets

    dataset = datasets.Dataset.from_list([{"messages": CALLED, "n": 1}], features=json_features(column))
    assert dataset[0]["messages"][1]["tool_calls"] == CALLS
    if form == "saved":
        dataset.save_to_disk(tmp_path / "saved")
    if form == "parquet":
        dataset.to_parquet(tmp_path / "d.parquet")
    path = f"{tmp_path}/{'saved' if form == 'saved' else 'd.parquet'}"
    (part,) = [in_memory(dataset)] if form == "memory" else open_source(SourceConfig(path=path))
    ((_, record),) = [row for block in part.blocks() for row in block.records(ParseOptions())]
    assert record.value == {"messages": CALLED}


def test_a_json_column_that_holds_no_json_is_named(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.array(["{}", '{"a": 1, "a": 2}', "{'a'", '"\\ud800"', None], pyarrow.json_())
    parquet.write_table(pyarrow.table({"x": texts, "text": ["a"] * 5}), tmp_path / "d.parquet")
    wrong: list[str] = []
    (part,) = open_source(SourceConfig(path=f"{tmp_path}/d.parquet"))
    parsed = [row.values for block in part.blocks() for row in block.rows(lambda _, error: wrong.append(str(error)))]
    assert [row["x"] for row in parsed] == [{}, "\ud800", None]
    assert [text.partition(": it")[0].partition(".parquet")[2].partition("valid JSON: ")[::2] for text in wrong] == [
        ("[1]: column `x` is of type Json(), but its text is not ", "an object has the key `a` twice; keep one."),
        ("[2]: column `x` is of type Json(), but its text is not ", wrong[1].partition("valid JSON: ")[2]),
    ]
    with pytest.raises(UserError, match=r"d.parquet\[1\]: column `x` is of type Json\(\), but its text"):
        load_documents(f"{tmp_path}/d.parquet", byte_tokenizer(), max_length=100)


@pytest.mark.parametrize("form", ["parquet", "saved", "memory"])
def test_tables_and_jsonl_of_the_same_rows_train_the_same_texts(form: str, tmp_path: Path) -> None:
    """Objects of a table have the keys of all; a call, a message and a schema have their own only."""
    import datasets

    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    second_call = {"function": {"name": "list", "arguments": {"where": {"b": "x"}, "tags": [None, "t"]}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "int"}}}}}]
    answers: list[dict[str, Any]] = [
        {"content": "", "tool_calls": [call, second_call]}, {"content": "hi", "tool_calls": None}, {"content": "ho"},
    ]  # fmt: skip
    further_columns = [
        {"tools": tools, "chat_template_kwargs": None},
        {"tools": None},
        {"chat_template_kwargs": {"think": False}},
    ]
    rows = [
        {"messages": [*QUESTION, {"role": "assistant", **answer}], **columns}
        for answer, columns in zip(answers, further_columns, strict=True)
    ]
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ think }}{% for m in messages %}<|start|>{{ m.role }}"
        "{% generation %}{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
        "<|end|>{% endgeneration %}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template)
    expected, _ = load_documents(write_jsonl(tmp_path / "d.jsonl", *rows), tokenizer, max_length=9999)
    source: Any = datasets.Dataset.from_list(rows)
    if form == "parquet":
        source = write_parquet(tmp_path, rows)
    if form == "saved":
        source.save_to_disk(tmp_path / "saved")
        source = str(tmp_path / "saved")
    documents, _ = load_documents(source, tokenizer, max_length=9999)
    assert flat(documents) == flat(expected)


def test_instructions_are_chats_where_there_is_a_template_and_text_elsewhere(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"instruction": "Add.", "input": "1+1", "output": "2"})
    assert values(path, chat=False) == [{"prompt": "Add.\n1+1\n\n", "completion": "2"}]
    tokenizer = byte_tokenizer()
    documents, report = load_documents(path, tokenizer, max_length=100)
    expected, _ = load_documents([chat(("user", "Add.\n1+1"), ("assistant", "2"))], tokenizer, max_length=100)
    assert flat(documents) == flat(expected) and report.formats == (("messages", 1),)
    documents, report = load_documents(path, byte_tokenizer(None), max_length=100)
    assert report.formats == (("prompt", 1),)


# ---------------------------------------------------------------- several sources


def config_of(*overrides: str) -> SftConfig:
    return load_config([], ["model.path=org/model", *overrides])


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([TEXT, TEXT], True, "NOT used: `prompt` and `completion` are trained as plain text. To use it, set "
         "'data.columns={instruction: prompt, output: completion}'"),
        ([TEXT], False, "there is no chat template: `prompt` and `completion` are trained as plain text"),
        ([{"text": "a"}, TEXT, CHAT], True,
         "the chat template renders 1 documents, and 2 not: `prompt` and `completion` and `text` are trained as plain "
         "text. To use it, set 'data.columns={instruction: prompt, output: completion}'"),
        ([{"text": "a"}], True, "NOT used: `text` is trained as plain text"),
        ([CHAT, {"prompt": CHAT["messages"][:1], "completion": "b"}], True, "the chat template renders all documents"),
        ([{"instruction": "a", "output": "b"}], True, "the chat template renders all documents"),
        ([{"instruction": "a", "output": "b"}], False,
         "there is no chat template: `prompt` and `completion` are trained as plain text"),
        ([{"input_ids": [9, 8]}], True, "not used: rows are tokens"),
    ],
)  # fmt: skip
def test_whether_the_chat_template_is_used_is_said(rows: list[dict[str, Any]], template: bool, message: str) -> None:
    _, report = load_documents(rows, byte_tokenizer(CHATML if template else None), max_length=100)
    assert report.template_use(DataConfig(path="d"), template) == message


def test_the_remedy_for_texts_puts_the_users_columns_into_the_template() -> None:
    _, report = load_documents([TEXT], byte_tokenizer(), max_length=100)
    columns = {"prompt": "question", "completion": "x.answer"}
    assert report.template_use(DataConfig(path="d", columns=columns), True).endswith(
        "set 'data.columns={instruction: question, output: x.answer}'"
    )
    sources = (SourceConfig(path="d"),)
    assert "in the columns of the source" in report.template_use(DataConfig(path=None, sources=sources), True)


@pytest.mark.covers("data.sources")
def test_several_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), *ROWS)
    write_jsonl(Path("b.jsonl"), *({"body": str(i)} for i in range(4)))
    config = config_of("data.sources=[{path: a.jsonl, weight: 0.5}, {name: B, path: b.jsonl, columns: {text: body}}]")
    documents, report = load_documents(config.data, byte_tokenizer(), max_length=100)
    assert [document.dataset for document in documents] == ["a"] * 7 + ["B"] * 4
    assert [(share.documents, share.weight, share.in_epoch) for share in documents.shares] == [(7, 0.5, 4), (4, 1.0, 4)]
    assert (report.documents, report.in_epoch, [source.documents for source in report.sources]) == (11, 8, [7, 4])
    assert report.tokens == sum(source.tokens for source in report.sources) == sum(lengths_of(documents))
    assert "a (a.jsonl): 7 documents" in str(report) and "an epoch takes 4 documents" in str(report)
    single, _ = load_documents("a.jsonl", byte_tokenizer(), max_length=100)
    assert flat(documents)[:7] == flat(single) and single[0].dataset == ""


def test_the_digest_is_of_documents_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), *ROWS)
    write_zipped(tmp_path)
    write_jsonl(Path("c.jsonl"), *ROWS[::-1])

    def digest(data: Any, **options: Any) -> str:
        return load_documents(data, byte_tokenizer(), **{"max_length": 100, **options})[1].digest

    assert digest("a.jsonl") == digest("d.jsonl.gz") == digest(ROWS) == digest("a.jsonl", max_length=50)
    two_sources = [SourceConfig(path="a.jsonl"), SourceConfig(path="c.jsonl")]
    digests = [
        digest("c.jsonl"), digest(ROWS[:6]), digest("a.jsonl", max_length=20, long_documents="truncate"),
        digest(two_sources), digest([SourceConfig(path="a.jsonl", weight=2), two_sources[1]]),
    ]  # fmt: skip
    assert len({digest("a.jsonl"), *digests}) == len(digests) + 1
    longest = max(len(document) for document in load_documents(ROWS, byte_tokenizer(), max_length=100)[0])
    short_rows = [row for row in ROWS if len(row["prompt"]) < 20]
    assert longest < 50 and digest(ROWS, max_length=longest, long_documents="drop") == digest(short_rows)


REFUSED = {
    "data.sources=[{pth: a.jsonl}]": "`pth` is not one of path, name",
    "data.sources=[{name: a}]": "`path` is missing",
    "data.sources=[{path: a.jsonl, weight: 0}]": "weight is 0.0; it must be above 0",
    "data.sources=[{path: a.jsonl, weight: x}]": "`weight` must be a number, not x",
    "data.sources=[{path: a.jsonl}, {path: b/a.jsonl}]": "two sources have the name a",
    "data.sources=[]": "is empty",
    "data.sources=[{path: a.jsonl, columns: {label: x}}]": "weft has no column label",
    "data.sources=[{path: none.jsonl}]": "data.sources none.jsonl does not exist",
    "data.columns={completion: prompt, text: body}": "has columns of several formats (prompt and text)",
    "data.columns={question: prompt}": "Write weft's name first: {prompt: question}",
    "data.columns={text: a..b}": "is not the name of a column",
    "data.split=train[1]": "is not a split",
    "data.workers=0": "data.workers is 0; it must be 1 to 4,096",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_the_config_refuses(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), *ROWS)
    overrides = [override] if "sources" in override else ["data.path=a.jsonl", override]
    with pytest.raises(UserError) as caught:
        config_of(*overrides)
    assert REFUSED[override] in str(caught.value)


def test_sources_replace_the_path_and_come_back_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.config import to_yaml

    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), *ROWS)
    config = config_of("data.sources=[{path: a.jsonl, columns: {text: body}, weight: 2}]")
    assert config.data.path is None
    Path("c.yaml").write_text(to_yaml(config))
    assert load_config(["c.yaml"], []) == config
    with pytest.raises(UserError, match=r"data\.path .* and data\.sources .* are both set"):
        config_of("data.path=a.jsonl", "data.sources=[{path: a.jsonl}]")
    for inert in ("data.columns={text: b}", "data.split='[:1]'", "data.subset=main"):
        with pytest.raises(UserError, match=r"would have no effect: data\.sources is set"):
            config_of(inert, "data.sources=[{path: a.jsonl}]")


def test_a_run_on_several_sources_and_what_its_resume_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), *ROWS)
    write_jsonl(Path("b.jsonl"), *({"body": f"{i} is a number"} for i in range(4)))
    two_sources = "data.sources=[{path: a.jsonl, weight: %s}, {name: B, path: %s, columns: {text: body}}]"
    words = ["sft", f"model.path={model(byte_tokenizer, 300)}", "model.init=random", "step.documents=4", "run.dir=run"]
    assert cli.main([*words, two_sources % (0.5, "b.jsonl"), "train.epochs=2", "schedule.name=constant"]) == 0
    out = capsys.readouterr().out
    assert "data     2 sources: 11 documents (7 prompt, 4 text)" in out and "an epoch takes 8 documents" in out
    assert "         a (a.jsonl): 7 documents (prompt)" in out
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["documents"] for line in lines] == [4, 4, 4, 4]
    assert cli.main(["sft", "--resume", "run", two_sources % (0.7, "b.jsonl"), "train.epochs=3"]) == 2
    assert "has other documents than before" in capsys.readouterr().err
    Path("moved.jsonl").write_bytes(Path("b.jsonl").read_bytes())
    assert cli.main(["sft", "--resume", "run", two_sources % (0.5, "moved.jsonl"), "train.epochs=3"]) == 0
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 6


def test_a_run_has_the_date_of_its_config_or_of_today() -> None:
    config = config_of("data.path=org/rows")
    today = {datetime.date.today().isoformat()}
    data = dated(config).data
    assert data.template_date in today | {datetime.date.today().isoformat()}
    assert dataclasses.replace(data, template_date=None) == config.data
    with_date = dataclasses.replace(config, data=dataclasses.replace(config.data, template_date="2025-03-04"))
    assert dated(with_date) == with_date
