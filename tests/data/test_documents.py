"""Which tokens a document has and which of them are trained, against examples written by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.toy_tokenizers import (
    CHATML,
    CHATML_WITH_BREAK,
    byte_tokenizer,
    chat,
    metaspace_tokenizer,
    write_jsonl,
)
from weft.data import sources as sources_module
from weft.data.documents import DataReport, load_documents
from weft.data.encode import load_tokenizer
from weft.engine.batch.document import Document

Runs = list[tuple[int, str]]


def load(
    path: Path, tokenizer: PreTrainedTokenizerFast, *values: Any, **options: Any
) -> tuple[list[Document], DataReport]:
    options = {"max_length": 1000, **options}
    return load_documents(write_jsonl(path / "data.jsonl", *values), tokenizer, **options)


def runs(tokenizer: PreTrainedTokenizerFast, document: Document) -> Runs:
    """The document's text, cut where the weight changes: [(weight, text), ...]."""
    pairs = zip(document.weights.tolist(), document.tokens.tolist(), strict=True)
    groups = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [(int(weight), tokenizer.decode([token for _, token in group])) for weight, group in groups]


def test_chat_trains_the_answer_and_its_end_of_turn(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    [document], _ = load(tmp_path, tokenizer, chat(("user", "hi?"), ("assistant", "yes")))
    assert runs(tokenizer, document) == [
        (0, "<|start|>user\nhi?<|end|>\n<|start|>assistant\n"),
        (1, "yes<|end|>"),
        (0, "\n"),
    ]
    # By position: 1 + 5 + 3 + 1 + 1 tokens of the question, 1 + 10 of the header, then y, e, s, <|end|>, line break.
    first = 11 + 11
    assert document.tokens[first] == tokenizer.convert_tokens_to_ids("y")
    assert document.weights.tolist() == [0.0] * first + [1.0] * 4 + [0.0]
    assert document.tokens[first + 3] == tokenizer.convert_tokens_to_ids("<|end|>")
    assert (document.tokens.dtype, document.weights.dtype) == (torch.int64, torch.float32)


def test_every_assistant_turn_is_trained_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    turns = [("system", "be"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d e")]
    [document], report = load(tmp_path, tokenizer, chat(*turns))
    assert runs(tokenizer, document) == [
        (0, "<|start|>system\nbe<|end|>\n<|start|>user\na<|end|>\n<|start|>assistant\n"),
        (1, "b<|end|>"),
        (0, "\n<|start|>user\nc<|end|>\n<|start|>assistant\n"),
        (1, "d e<|end|>"),
        (0, "\n"),
    ]
    assert report.loss_tokens == document.meta().loss_tokens == 2 + 4


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_answers_that_begin_and_end_with_space_or_many_bytes(tmp_path: Path, trim_offsets: bool) -> None:
    tokenizer = byte_tokenizer(CHATML_WITH_BREAK, trim_offsets=trim_offsets)
    turns = [("user", "a"), ("assistant", " b \u00e9"), ("user", "c"), ("assistant", "\n\U0001f642")]
    [document], _ = load(tmp_path, tokenizer, chat(*turns))
    assert runs(tokenizer, document) == [
        (0, "<|start|>user\na<|end|>\n<|start|>assistant\n"),
        (1, " b \u00e9<|end|>\n"),
        (0, "<|start|>user\nc<|end|>\n<|start|>assistant\n"),
        (1, "\n\U0001f642<|end|>\n"),
    ]


def test_markers_that_end_within_a_character_of_many_tokens(tmp_path: Path) -> None:
    """With the end of turn outside the markers, all four bytes of a last emoji are trained."""
    template = CHATML.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    tokenizer = byte_tokenizer(template)
    [document], _ = load(tmp_path, tokenizer, chat(("user", "a"), ("assistant", "b\U0001f642")))
    assert runs(tokenizer, document)[1:] == [(1, "b\U0001f642"), (0, "<|end|>\n")]
    assert document.weights.sum() == 5


def test_chat_tokens_are_those_of_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(bos=True, merges=[("a", "b")])
    value = chat(("user", "ab cab"), ("assistant", "ab"))
    [document], _ = load(tmp_path, tokenizer, value)
    assert document.tokens.tolist() == tokenizer.apply_chat_template(value["messages"])["input_ids"]


def test_loading_leaves_the_tokenizer_as_it_was(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(bos=True, trim_offsets=True)
    before = tokenizer.backend_tokenizer.to_str()
    load(tmp_path, tokenizer, chat(("user", "a"), ("assistant", "b")))
    assert tokenizer.backend_tokenizer.to_str() == before


@pytest.mark.parametrize(("bos", "front"), [(False, ""), (True, "<s>")])
def test_prompt_and_completion(tmp_path: Path, bos: bool, front: str) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    values = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "", "completion": "yes"}]
    documents, report = load(tmp_path, tokenizer, *values)
    assert runs(tokenizer, documents[0]) == [(0, front + "1+1="), (1, "2</s>")]
    assert documents[0].weights.tolist() == [0.0] * (4 + bos) + [1.0, 1.0]
    assert runs(tokenizer, documents[1])[-1] == (1, "yes</s>")
    # Without bos the "y" of the second document is its first token, which nothing predicts.
    assert report.loss_tokens == 2 + 3 + bos


def test_prompt_is_tokenised_as_generation_will_see_it(tmp_path: Path) -> None:
    """A merge across the boundary would hide the first answer token in the prompt."""
    tokenizer = byte_tokenizer(merges=[("a", "b")])
    [document], _ = load(tmp_path, tokenizer, {"prompt": "xa", "completion": "bab"})
    pieces = tokenizer.convert_ids_to_tokens(document.tokens.tolist())
    assert pieces == ["x", "a", "b", "ab", "</s>"]
    assert document.weights.tolist() == [0, 0, 1, 1, 1]


def test_completions_get_no_space_that_the_user_did_not_write(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer()
    documents, _ = load(
        tmp_path, tokenizer, {"prompt": "a:", "completion": "42"}, {"prompt": "a:", "completion": " 42"}
    )
    pieces = [tokenizer.convert_ids_to_tokens(document.tokens.tolist()) for document in documents]
    assert pieces == [["\u2581", "a", ":", "4", "2", "</s>"], ["\u2581", "a", ":", "\u2581", "4", "2", "</s>"]]
    assert documents[1].weights.tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"text": "ab"}, [(1, "<s>ab</s>")]),
        ({"text": "<s>ab</s>"}, [(1, "<s>ab</s>")]),
        ({"prompt": "<s>a", "completion": "b</s>"}, [(0, "<s>a"), (1, "b</s>")]),
        ({"prompt": "a", "completion": "b</s>c"}, [(0, "<s>a"), (1, "b</s>c</s>")]),  # the end is where it ends
    ],
)
def test_bos_and_eos_are_there_once(tmp_path: Path, value: Any, expected: Runs) -> None:
    tokenizer = byte_tokenizer(bos=True)
    [document], _ = load(tmp_path, tokenizer, value)
    assert runs(tokenizer, document) == expected


def test_text_trains_all_but_the_first_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    [document], report = load(tmp_path, tokenizer, {"text": "abc"})
    assert runs(tokenizer, document) == [(1, "abc</s>")]
    assert report.loss_tokens == document.meta().loss_tokens == 3


@pytest.mark.covers("data.path")
def test_formats_mix_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "BLOCK_BYTES", 100)
    tokenizer = byte_tokenizer()
    values = [
        {"text": "one"},
        chat(("user", "a"), ("assistant", "two")),
        {"prompt": "a", "completion": "three", "text": None, "messages": None, "id": 7},
        {"text": "four\u2028\u00e9", "prompt": None},
        {"text": "five"},
    ]
    documents, report = load(tmp_path, tokenizer, *values)
    trained = [next(text for weight, text in runs(tokenizer, document) if weight) for document in documents]
    assert trained == ["one</s>", "two<|end|>", "three</s>", "four\u2028\u00e9</s>", "five</s>"]
    assert [document.source.rpartition(":")[2] for document in documents] == list("12345")
    assert report.documents == 5
    assert report.tokens == sum(len(document) for document in documents)
    assert report.loss_tokens == sum(document.meta().loss_tokens for document in documents)


def test_blank_lines_and_a_byte_order_mark_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = ["\ufeff" + json.dumps({"text": "a b"}), "", "  \r", json.dumps({"text": "c\u2028d"}, ensure_ascii=False)]
    path.write_text("\n".join(lines), encoding="utf-8")
    documents, _ = load_documents(str(path), byte_tokenizer(), max_length=9)
    assert [document.source for document in documents] == [f"{path}:1", f"{path}:4"]


@pytest.mark.covers("data.max_length")
def test_long_documents_truncated(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    values = [{"text": "abc"}, {"prompt": "ab", "completion": "cdefg"}]
    documents, report = load(tmp_path, tokenizer, *values, max_length=4, long_documents="truncate")
    assert [runs(tokenizer, document) for document in documents] == [[(1, "abc</s>")], [(0, "ab"), (1, "cd")]]
    assert (report.documents, report.truncated, report.dropped, report.longest) == (2, 1, 0, 4)
    assert (report.tokens, report.loss_tokens) == (8, 5)
    assert "1 longer documents truncated" in str(report)


@pytest.mark.covers("data.long_documents")
def test_long_documents_dropped(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    values = [{"text": "abcdefg"}, {"text": "abc"}, {"text": "abcd"}]
    documents, report = load(tmp_path, tokenizer, *values, max_length=4, long_documents="drop")
    assert [runs(tokenizer, document) for document in documents] == [[(1, "abc</s>")]]
    assert (report.documents, report.truncated, report.dropped, report.longest) == (1, 0, 2, 4)
    assert "2 longer documents dropped" in str(report)


def test_a_saved_tokenizer_loads_with_its_template(tmp_path: Path) -> None:
    byte_tokenizer(bos=True).save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    [document], _ = load(tmp_path, tokenizer, chat(("user", "a"), ("assistant", "b")))
    assert runs(tokenizer, document)[1] == (1, "b<|end|>")
