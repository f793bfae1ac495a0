"""Each mistake a user can make in data, through `weft sft`: where it is, what is wrong, and what to change."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.support.toy_tokenizers import CHATML, byte_tokenizer, chat, lossy_tokenizer, write_jsonl
from weft import cli
from weft.data.encode import load_tokenizer
from weft.data.records import ParseOptions, Record, parse_row
from weft.errors import UserError

GOOD = chat(("user", "a"), ("assistant", "b"))
PAIR = {"prompt": "a", "completion": "b"}
UNENDED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + CHATML
_folder = tempfile.TemporaryDirectory(prefix="weft-bad-data-")


@dataclass(frozen=True)
class Case:
    """A file of these lines, or what `write` makes of its path, must be refused in a message that begins with the
    file's name and `where` and holds each of `says`. keys: of the config."""

    name: str
    data: list[Any] | Callable[[Path], object]
    where: str
    says: list[str]
    keys: list[str] = field(default_factory=list)
    file: str = "d.jsonl"
    tokenizer: Callable[[], PreTrainedTokenizerFast] = byte_tokenizer
    vocabulary: int = 300


def message(**values: Any) -> dict[str, Any]:
    """A chat whose only message has these keys."""
    return {"messages": [values]}


def text(content: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def parquet(*rows: dict[str, Any]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)

    return write


LONG = [{"text": "a" * 9}, {"text": "a" * 30}, {"text": "a" * 20}]
SHORT = ["data.max_length=10"]  # as long as the first with its end

CASES = [
    # files
    Case("bad json", [GOOD, '{"text": "a"'], ":2: ", ["not valid JSON", "column 13", "one JSON object"]),
    Case("a list of documents", ["[", GOOD], ":1: ", ["not valid JSON", "without a list around", "to .json"]),
    Case("a list on one line", [json.dumps([GOOD])], ":1: ", ["holds a list, not an object", "without a list around"]),
    Case("an object over several lines", ["{", '"text": "a"', "}"], ":1: ", ["one complete object per line"]),
    Case("a number", [GOOD, "", "17"], ":3: ", ["holds a number, not an object"]),
    Case("half a surrogate pair", [GOOD, '{"text": "a\\ud83d"}'], ":2: ", ["surrogate", "Remove it"]),
    Case("not utf-8", text(b'{"text": "a"}\n{"text": "caf\xe9"}\n'), ":2: ",
         ["is not UTF-8", "Save the file as UTF-8"]),
    Case("empty file", [], ": ", ["no documents", "data.path"]),
    Case("only blank lines", ["", " "], ": ", ["no documents"]),
    Case("a broken list", text('[{"text": "a"},\n {"text": }]'), ":2: ",
         ["not valid JSON", "column 11"], file="d.json"),
    Case("a list of lists", text('[{"text": "a"}, ["b"]]'), "[1]: ", ["is not an object"], file="d.json"),
    Case("half a gzip file", lambda p: p.write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-9]), ": ",
         ["a truncated or damaged gzip file"], file="d.jsonl.gz"),
    Case("no gzip file", text('{"text": "a"}\n'), ": ", ["a truncated or damaged gzip file"], file="d.jsonl.gz"),
    Case("csv with a comma too many", text('text,id\na,1\n"b\n",2\nc,d,3\n'), ":5: ",
         ["has 3 fields, but the header has 2", "double quotes"], file="d.csv"),
    Case("csv divided by semicolons", text("question;answer\na;b\n"), ":2: ",
         ["has `question;answer`", "separated by `;`. The command python3 -c 'import csv, sys;"], file="d.csv"),
    Case("csv divided by semicolons, in quotes", text('"a";"b"\n"1";"2"\n'), ":1: ",
         ["is not valid CSV", "separated by `;`", "-commas.csv"], file="d.csv"),
    Case("csv divided by semicolons, with a comma", text("a;b\n1,5;2\n"), ":2: ",
         ["has 2 fields, but the header has 1", "separated by `;`"], file="d.csv"),
    Case("csv divided by semicolons, its columns named", text("question;answer\na;b\n"), ":2: ",
         ["there is no `question` among `question;answer`", "separated by `;`"], file="d.csv",
         keys=["data.columns={prompt: question, completion: answer}"]),
    Case("csv divided by tabs", text("question\tanswer\na\tb\n"), ":2: ",
         ["separated by tabs: rename the file to .tsv"], file="d.csv"),
    Case("tsv divided by commas", text("question,answer\na,b\n"), ":2: ",
         ["separated by commas: rename the file to .csv"], file="d.tsv"),
    Case("a spreadsheet", text("PK\3\4\0"), ": ",
         ["weft reads .jsonl, ", "which this file lacks: save the table as .csv"], file="d.xlsx"),
    Case("a text with another ending", text("# Title\n\nA text.\n"), ": ", ["rename it to .txt"], file="d.md"),
    Case("text that is not utf-8", text(b"good\ncaf\xe9\n"), ":2: ", ["is not UTF-8", "as UTF-8"], file="d.txt"),
    Case("text with a NUL", text(b"good\n\na\0b\n"), ":3: ", ["contains a NUL byte"], file="d.txt"),
    Case("text of blank lines", text("\n \n"), ": ", ["no documents"], file="d.txt"),
    Case("csv with one name twice", text("text,text\na,b\n"), ":1: ", ["two columns have the name"], file="d.csv"),
    Case("no parquet file", text("PAR1 and nothing"), ": ", ["is not a readable Parquet file"], file="d.parquet"),
    Case("parquet with another column", parquet({"body": "a"}), "[0]: ", ["has `body`"], file="d.parquet"),
    # formats
    Case("no format", [GOOD, {"id": 1}], ":2: ", ["has `id`", "`messages`", "`prompt` and `completion`", "`text`"]),
    Case("nothing", [{}], ":1: ", ["has no columns"]),
    Case("sharegpt", [{"conversations": []}], ":1: ", ["Set 'data.columns={messages: conversations}'"]),
    Case("question and answer", [{"question": "a", "answer": "b"}], ":1: ",
         ["Set 'data.columns={instruction: question, output: answer}'"]),
    Case("preference pair", [{"chosen": "a", "rejected": "b"}], ":1: ",
         ["on which `weft dpo` trains", "set 'data.columns={text: chosen}'"]),
    Case("two formats", [{"text": "a", **GOOD}], ":1: ",
         ["(`messages` and `text`)", "'data.columns={messages: messages}'"]),
    Case("images", [{**GOOD, "images": ["a.png"]}], ":1: ", ["has images or videos", "a text-only model"]),
    Case("videos", [{**GOOD, "videos": ["a.mp4"]}], ":1: ", ["has images or videos", "a text-only model"]),
    Case("audios", [{**GOOD, "audios": ["a.wav"]}], ":1: ", ["`audios` is not supported in this version"]),
    Case("no completion", [PAIR, {"prompt": "a"}], ":2: ", ["has `prompt` but no `completion`", "Add `completion`"]),
    Case("label for completion", [{"prompt": "a", "label": "b"}], ":1: ",
         ["Set 'data.columns={instruction: prompt, output: label}'"]),
    Case("no prompt", [{"completion": "a"}], ":1: ", ["has `completion` but no `prompt`", "`text`"]),
    Case("prompt text, completion messages", [{"prompt": "a", "completion": GOOD["messages"]}], ":1: ",
         ["both as text, or both as messages"]),
    Case("prompt of a number", [{"prompt": 3, "completion": "a"}], ":1: ", ["`prompt` must be a string, not a number"]),
    Case("text of a number", [{"text": 3}], ":1: ", ["`text` must be a string, not a number"]),
    Case("tools beside text", [{**PAIR, "tools": [{}]}], ":1: ", ["has `tools`", "plain text", "as `messages`"]),
    Case("no output", [{"instruction": "a"}], ":1: ", ["has `instruction` but no `output`"]),
    Case("history of text", [{"instruction": "a", "output": "b", "history": ["c"]}], ":1: ", ["list of pairs"]),
    Case("system without a chat template", [{"instruction": "a", "output": "b", "system": "c"}], ":1: ",
         ["has `system`", "no chat template"], tokenizer=lambda: byte_tokenizer(None)),
    # tokens
    Case("no tokens", [{"input_ids": []}], ":1: ", ["one or more token ids, each 0 or above"]),
    Case("tokens of text", [{"input_ids": "ab"}], ":1: ", ["`input_ids` must be a list of integers, not a string"]),
    Case("tokens with a hole", [{"input_ids": [1, None]}], ":1: ", ["must contain integers, but has None"]),
    Case("negative tokens", [{"input_ids": [1, -100]}], ":1: ", ["one or more token ids, each 0 or above"]),
    Case("labels that are shifted", [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}], ":1: ",
         ["`labels` has 2 at 0, but `input_ids` has 1", "not the next"]),
    Case("labels too few", [{"input_ids": [1, 2, 3], "labels": [1, 2]}], ":1: ", ["has 2 values, but"]),
    Case("labels and a mask", [{"input_ids": [1, 2], "labels": [1, 2], "completion_mask": [0, 1]}], ":1: ",
         ["has `labels` and `completion_mask`", "Keep one"]),
    Case("a mask of weights", [{"input_ids": [1, 2], "loss_mask": [0, 2]}], ":1: ", ["`loss_mask` must be 1 for each"]),
    Case("padding", [{"input_ids": [1, 2], "attention_mask": [1, 0]}], ":1: ", ["remove padding"]),
    Case("packed", [{"input_ids": [1, 2], "position_ids": [0, 0]}], ":1: ", ["write one per row"]),
    Case("labels of nothing", [{"input_ids": [1, 2], "labels": [-100, -100]}], ":1: ", ["a label other than -100"]),
    Case("tokens that answers are looked for in", [{"input_ids": [1, 2]}], ":1: ",
         ["data.train_on=all would have no effect", "Remove data.train_on"], keys=["data.train_on=all"]),
    Case("an id too large", [{"input_ids": [1, 299, 300]}], ":1: ", ["it has id 300", "has 300 (ids 0 to 299)"],
         vocabulary=300),
    # messages
    Case("messages of text", [{"messages": "hi"}], ":1: ", ["must be a list of objects", "not a string"]),
    Case("messages of broken json", [{"messages": "[{"}], ":1: ", ["begins like a JSON list", "json.dumps"]),
    Case("empty messages", [GOOD, {"messages": []}], ":2: ", ["`messages` is empty"]),
    Case("message of text", [{"messages": ["hi"]}], ":1: ", ["message 1 must be an object", "not a string"]),
    Case("no role", [message(content="a")], ":1: ", ["message 1: has `content`, but no `role`", "data.message_keys"]),
    Case("an unknown speaker", [{"messages": [{"from": "bing", "value": "a"}]}], ":1: ",
         ["message 1: the role \"bing\" is unknown to weft", "Set 'data.roles={bing: bing}'", "{bing: assistant}"]),
    Case("roles of one's own", [{"messages": [{"role": "human", "content": "a"}, {"role": "Bot", "content": "b"}]}],
         ":1: ",
         ["message 1: the role \"human\" is unknown to weft", "Set 'data.roles={Bot: assistant, human: user}'."]),
    Case("an image in the content", [message(role="user", content=[{"type": "image", "url": "a"}])], ":1: ",
         ["has images or videos", "a text-only model"]),
    Case("audio in the content", [message(role="user", content=[{"type": "audio", "url": "a"}])], ":1: ",
         ["part 1 of `content` is of type \"audio\"", "reads text, images and videos", "Remove it"]),
    Case("no content", [message(role="user")], ":1: ", ["message 1: `content` must be a string", "null"]),
    Case("a weight of a half", [message(role="assistant", content="a", weight=0.5)], ":1: ",
         ["`weight` is 0.5", "0 (not"]),
    Case("train of text", [message(role="assistant", content="a", train="no")], ":1: ",
         ["`train` must be true or false"]),
    Case("a tool call without a name", [message(role="assistant", tool_calls=[{"function": {}}])], ":1: ",
         ["call 1 of `tool_calls` has no name"]),
    Case("tools of text", [{**GOOD, "tools": "search"}], ":1: ", ["`tools` must be a list of objects, not a string"]),
    Case("two systems", [{"system": "a", **message(role="system", content="b")}], ":1: ", ["`system`", "Keep one"]),
    # columns, splits
    Case("a column that is not there", [{"q": "a", "a": "b"}], ":1: ", ["`question`", "among `q`, `a`"],
         keys=["data.columns={prompt: question, completion: a}"]),
    Case("a path into text", [{"q": "a", "a": "b"}], ":1: ", ["the value above `truth` is a str"],
         keys=["data.columns={prompt: q, completion: a.truth}"]),
    Case("a place beyond the list", [{"turns": ["a"]}], ":1: ", ["`1` is not an index of a list of 1"],
         keys=["data.columns={prompt: turns.0, completion: turns.1}"]),
    # training
    Case("no answer", [GOOD, chat(("user", "a")), GOOD, chat(("user", "b"))], ":2: ",
         ["no token", "1 more", ":4", "message of the assistant"]),
    Case("one token without bos", [{"text": "</s>"}], ":1: ", ["no token of this document is trained"]),
    Case("no chat template", [PAIR, GOOD], ":2: ", ["no chat template"], tokenizer=lambda: byte_tokenizer(None)),
    Case("no end of turn", [GOOD], ":1: ",
         ["no special token ends message 2", "{% generation %}", "data.chat_template"],
         tokenizer=lambda: byte_tokenizer(UNENDED)),
    Case("refused by the template", [GOOD, chat(("assistant", "b")), GOOD], ":2: ",
         ["chat template refused", "begin with the user"], tokenizer=lambda: byte_tokenizer(STRICT)),
    Case("tokenizer that drops spaces", [GOOD], ":1: ", ["drops characters"], tokenizer=lossy_tokenizer),
    Case("no eos", [GOOD, {"text": "a"}], ":2: ", ["eos_token", "tokenizer_config.json"],
         tokenizer=lambda: byte_tokenizer(eos=None)),
    Case("too long", LONG, ":2: ",
         ["2 of 3", "longer than 10", "with 31", "data.max_length", "truncate or drop"], SHORT),
    Case("too long for a row", LONG, ":2: ", ["step.max_tokens_per_device to at least 31", "data.long_documents"],
         ["step.max_tokens_per_device=10"]),
    Case("nothing trained after truncation", [{"text": "a"}, {"prompt": "a" * 10, "completion": "b"}], ":2: ",
         ["no trained token is left", "10 tokens", "data.long_documents: drop"],
         [*SHORT, "data.long_documents=truncate"]),
    Case("all dropped", LONG[1:], ": ", ["leaves no document", "all 2"], [*SHORT, "data.long_documents=drop"]),
    Case("ids beyond the vocabulary", [{"text": "!"}, {"text": "z"}], ":2: ", ["vocabulary has 64", "ids 0 to 63"],
         vocabulary=64),
]  # fmt: skip


@cache
def model(tokenizer: Callable[[], PreTrainedTokenizerFast], vocabulary: int) -> str:
    """A folder with a config and this tokenizer, and no weights."""
    path = tempfile.mkdtemp(dir=_folder.name)
    tokenizer().save_pretrained(path)
    Qwen3Config(vocab_size=vocabulary, hidden_size=32, num_hidden_layers=1).save_pretrained(path)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_bad_data(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if callable(case.data):
        case.data(Path(case.file))
    else:
        write_jsonl(Path(case.file), *case.data)
    words = [f"model.path={model(case.tokenizer, case.vocabulary)}", "model.init=random", f"data.path={case.file}"]
    assert cli.main(["sft", *words, *case.keys, "--device", "cpu"]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith(f"error: {case.file}{case.where}"), message
    for piece in case.says:
        assert piece in message
    assert len(message) < 500 and message.endswith(".") and "Traceback" not in message
    assert not Path("runs").exists()


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS_OF_SOURCES = [
    {"content": "a"},
    {"question": "a", "answer": "b"}, {"question": "a", "response": "b"}, {"query": "a", "response": "b"},
    {"problem": "a", "solution": "b"}, {"input": "a", "output": "b"},
    {"chosen": TURNS, "rejected": TURNS}, {"chosen": "a", "rejected": "b"}, {"prompt": "a", "chosen": TURNS},
    {"prompt": "a", "chosen": "b"}, {"prompt": TURNS[:1], "chosen": TURNS[1:]}, {"question": "a", "chosen": "b"},
    {"prompt": "a", "answer": "b"}, {"prompt": TURNS[:1], "answer": "b"}, {"prompt": "a", "label": "b"},
    {"prompt": TURNS[:1], "reward_model": {"ground_truth": "b"}}, {"query": json.dumps(TURNS[:1]), "response": "b"},
]  # fmt: skip
PAIRS = [
    {"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": TURNS}, {"chosen": TURNS}, {"chosen": json.dumps(TURNS)},
    {"prompt": TURNS[:1], "chosen": TURNS[1:]}, {"prompt": TURNS[:1], "chosen": "b"}, {"question": "a", "chosen": "b"},
    {"instruction": "a", "input": "", "chosen": "b"}, {"conversations": TURNS[:1], "chosen": TURNS[1]},
    {"input": "a", "chosen": "b"},
]  # fmt: skip


def followed(row: dict[str, Any], chat: bool) -> Record:
    """The record of a row that is refused, once what the message says to set is set as a shell passes it on."""
    with pytest.raises(UserError) as caught:
        parse_row("here", row, ParseOptions(chat=chat))
    proposal = re.search(r"[Ss]et ('data\.columns=.*')\.$", str(caught.value))
    assert proposal is not None, caught.value
    ((_, columns),) = (word.split("=", 1) for word in shlex.split(proposal[1]))
    assert ("on which `weft dpo` trains" in str(caught.value)) == ("rejected" in row and "chosen" in row)
    return parse_row("here", row, ParseOptions(columns=yaml.safe_load(columns), chat=chat))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("row", ROWS_OF_SOURCES, ids=lambda row: "-".join(row))
def test_the_columns_that_are_proposed_are_read(row: dict[str, Any], chat: bool) -> None:
    """A question and an answer become a chat wherever there is a chat template."""
    record = followed(row, chat)
    assert "b" in str(record) or row == {"content": "a"} or row == ROWS_OF_SOURCES[7]
    assert "a\\na" not in str(record)
    if chat and len(row) == 2 and row != ROWS_OF_SOURCES[7]:
        assert record.kind in ("messages", "prompt of messages")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda row: "-".join(row))
def test_preference_pairs_are_called_so_and_the_chosen_answers_go_through_the_template(pair: dict[str, Any]) -> None:
    """Following what is said trains the question and the chosen answer, never the rejected one."""
    record = followed({**pair, "rejected": TURNS if isinstance(pair["chosen"], list) else "no"}, chat=True)
    assert record.kind in ("messages", "prompt of messages")
    turns = record.value.get("messages") or [*record.value["prompt"], *record.value["completion"]]
    assert turns == TURNS


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b", "label": False},
        {"messages": TURNS, "kto_tag": False},
        {"prompt": "a", "completion": "b", "label": 1, "kto_tag": False},
    ],
)
def test_answers_that_are_not_wanted_are_not_trained(row: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"is false, so the answer is undesirable.*data\.ignore=\["):
        parse_row("d.jsonl:1", row, ParseOptions())
    converted = {name: value or True for name, value in row.items()}
    assert parse_row("d.jsonl:1", converted, ParseOptions()).format in ("prompt", "messages")


def test_there_are_forty_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Qwen3Config(vocab_size=64, hidden_size=32).save_pretrained(tmp_path / "config_only")
    byte_tokenizer().save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name in ("empty", "config_only", "broken"):
        with pytest.raises(UserError, match=r"model\.path: .*tokenizer\.json"):
            load_tokenizer(str(tmp_path / name))
