"""Each mistake a user can make in a data file, and what the message must say: where, what is wrong, what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.toy_tokenizers import CHATML, byte_tokenizer, chat, lossy_tokenizer, write_jsonl
from weft.data.documents import load_documents
from weft.data.tokenizer import load_tokenizer
from weft.errors import UserError

GOOD = chat(("user", "a"), ("assistant", "b"))
PAIR = {"prompt": "a", "completion": "b"}
UNENDED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + CHATML


@dataclass(frozen=True)
class Case:
    """These lines must be refused at `line` (0: the whole file) in a message that holds each of `says`."""

    name: str
    lines: list[Any]
    line: int
    says: list[str]
    tokenizer: Callable[[], PreTrainedTokenizerFast] = byte_tokenizer
    options: dict[str, Any] = field(default_factory=dict)
    short: bool = False  # documents may have 10 tokens, else 1000


LONG = [{"text": "a" * 5}, {"text": "a" * 30}, {"text": "a" * 20}]

CASES = [
    Case("bad json", [GOOD, '{"text": "a"'], 2, ["not valid JSON", "column 13", "one JSON object"]),
    Case("a list of documents", ["[", GOOD], 1, ["not valid JSON", "no list around"]),
    Case("a list on one line", [json.dumps([GOOD])], 1, ["holds a list, not an object", "no list around"]),
    Case("an object over several lines", ["{", '"text": "a"', "}"], 1, ["one whole object per line"]),
    Case("a number", [GOOD, "", "17"], 3, ["holds a number, not an object"]),
    Case("half a surrogate pair", [GOOD, '{"text": "a\\ud83d"}'], 2, ["surrogate", "Remove it"]),
    Case("empty file", [], 0, ["no documents", "data.path"]),
    Case("only blank lines", ["", " "], 0, ["no documents"]),
    Case("no format", [GOOD, {"id": 1}], 2, ["has `id`", "`messages`", "`prompt` and `completion`", "`text`"]),
    Case("nothing", [{}], 1, ["has no keys"]),
    Case("sharegpt", [{"conversations": []}], 1, ["`conversations`", "`role` and `content`"]),
    Case("alpaca", [{"instruction": "a", "output": "b"}], 1, ["write `prompt`"]),
    Case("preference pair", [{"chosen": "a", "rejected": "b"}], 1, ["chosen answer as `completion`"]),
    Case("two formats", [{"text": "a", **GOOD}], 1, ["more than one format (`messages` and `text`)", "Keep one"]),
    Case("tools", [{**GOOD, "tools": [{}]}], 1, ["`tools` is not yet"]),
    Case("no completion", [PAIR, {"prompt": "a"}], 2, ["has `prompt` but no `completion`"]),
    Case("no prompt", [{"completion": "a"}], 1, ["has `completion` but no `prompt`", "`text`"]),
    Case("prompt of messages", [{"prompt": [], "completion": "a"}], 1, ["`prompt` must be a string, not a list"]),
    Case("text of a number", [{"text": 3}], 1, ["`text` must be a string, not a number"]),
    Case("messages of text", [{"messages": "hi"}], 1, ["must be a list of objects", "not a string"]),
    Case("empty messages", [GOOD, {"messages": []}], 2, ["`messages` is empty"]),
    Case("message of text", [{"messages": ["hi"]}], 1, ["message 1 must be an object", "not a string"]),
    Case("no role", [{"messages": [{"content": "a"}]}], 1, ["message 1: `role` must be a string", "null"]),
    Case("from and value", [{"messages": [{"from": "human", "value": "a"}]}], 1, ["`from` and `value` are called"]),
    Case(
        "content of parts",
        [{"messages": [GOOD["messages"][0], {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}],
        1,
        ["message 2: `content` must be a string, not a list", "Join"],
    ),
    Case("no content", [{"messages": [{"role": "user"}]}], 1, ["message 1: `content` must be a string, not null"]),
    Case(
        "weight of a message",
        [{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}],
        1,
        ["message 1: `weight` is not yet"],
    ),
    Case(
        "no answer",
        [GOOD, chat(("user", "a")), GOOD, chat(("user", "b"))],
        2,
        ["no token", "1 more", ":4", "message of the assistant"],
    ),
    Case("one token without bos", [{"text": "</s>"}], 1, ["no token of this document is trained"]),
    Case(
        "no chat template", [PAIR, GOOD], 2, ["no chat template", "chat_template.jinja"], lambda: byte_tokenizer(None)
    ),
    Case(
        "no end of turn",
        [GOOD],
        1,
        ["no special token ends message 2", "{% generation %}", "{% endgeneration %}", "data.chat_template", "[2:"],
        lambda: byte_tokenizer(UNENDED),
    ),
    Case(
        "refused by the template",
        [GOOD, chat(("assistant", "b")), GOOD],
        2,
        ["chat template refused", "begin with the user"],
        lambda: byte_tokenizer(STRICT),
    ),
    Case("tokenizer that drops spaces", [GOOD], 1, ["drops characters"], lossy_tokenizer),
    Case("no eos", [GOOD, {"text": "a"}], 2, ["eos_token", "tokenizer_config.json"], lambda: byte_tokenizer(eos=None)),
    Case(
        "too long", LONG, 2, ["2 of 3", "longer than 10", "with 31", "data.max_length", "truncate or drop"], short=True
    ),
    Case(
        "too long for a row",
        LONG,
        2,
        ["step.max_tokens_per_device to at least 31", "data.long_documents"],
        options={"max_length_key": "step.max_tokens_per_device"},
        short=True,
    ),
    Case(
        "nothing trained after truncation",
        [{"text": "a"}, {"prompt": "a" * 10, "completion": "b"}],
        2,
        ["no trained token is left", "10 tokens", "data.long_documents: drop"],
        options={"long_documents": "truncate"},
        short=True,
    ),
    Case("all dropped", LONG[1:], 0, ["leaves no document", "all 2"], options={"long_documents": "drop"}, short=True),
    Case(
        "ids beyond the vocabulary",
        [{"text": "!"}, {"text": "z"}],
        2,
        ["vocabulary has 64", "ids 0 to 63", "model.path"],
        options={"vocab_size": 64},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_bad_data(case: Case, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", *case.lines)
    with pytest.raises(UserError) as caught:
        load_documents(path, case.tokenizer(), **{"max_length": 10 if case.short else 1000, **case.options})
    message = str(caught.value)
    assert message.startswith(f"{path}:{case.line}: " if case.line else f"{path}: "), message
    for text in case.says:
        assert text in message
    assert len(message.replace(path, "")) < 400
    assert message.endswith(".")


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"data.jsonl:2: is not UTF-8 .* Save the file as UTF-8"):
        load_documents(str(path), byte_tokenizer(), max_length=10)


@pytest.mark.parametrize(("name", "says"), [("missing.jsonl", "there is no file"), (".", "is a folder")])
def test_no_file(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"data\.path: .*{says}"):
        load_documents(str(tmp_path / name), byte_tokenizer(), max_length=10)


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Qwen3Config(vocab_size=64, hidden_size=32).save_pretrained(tmp_path / "config_only")
    byte_tokenizer().save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name in ("empty", "config_only", "broken"):
        with pytest.raises(UserError, match=r"model\.path: .*tokenizer\.json"):
            load_tokenizer(str(tmp_path / name))
