"""Lists of a teacher's likeliest tokens in rows, and rows that name their teacher: what is read, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.toy_tokenizers import byte_tokenizer, write_jsonl
from weft.config.schema import DataConfig
from weft.data.documents import load_documents
from weft.data.records import ParseOptions
from weft.errors import UserError

IDS, LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
ROW = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
LISTS = {IDS: [[7, 1], [8]], LOGPROBS: [[-0.5, -1.5], [-0.25]]}


def load(path: Any, *rows: dict[str, Any], columns: dict[str, str] | None = None, **options: Any) -> Any:
    """Documents of these rows, cut to 3 tokens if columns have other names."""
    write_jsonl(path / "rows.jsonl", *rows)
    parsing = ParseOptions(**({"listed": "all"} | options))
    data = DataConfig(path=str(path / "rows.jsonl"), columns=columns or {})
    long: Any = "truncate" if columns else "error"
    length = 3 if columns else 8
    documents, _ = load_documents(
        data, byte_tokenizer(), max_length=length, long_documents=long, vocab_size=264, rows=parsing
    )
    return documents


def test_entries_of_trained_tokens_and_of_all_tokens_are_the_same(tmp_path: Any) -> None:
    of_all = {IDS: [[], None, *LISTS[IDS]], LOGPROBS: [None, [], *LISTS[LOGPROBS]]}
    documents = load(tmp_path, ROW | LISTS, ROW | of_all)
    for document in documents:
        assert document.arrays[IDS].tolist() == [[-1, -1], [-1, -1], [7, 1], [8, -1]]
        assert document.arrays[LOGPROBS][2:].tolist() == [[-0.5, -1.5], [-0.25, -np.inf]]


def test_lists_follow_truncation_columns_and_the_digest(tmp_path: Any) -> None:
    named = {"ids": LISTS[IDS], "values": LISTS[LOGPROBS]}
    documents = load(tmp_path, ROW | named, columns={IDS: "ids", LOGPROBS: "values"})
    assert documents[0].arrays[IDS].tolist() == [[-1, -1], [-1, -1], [7, 1]]
    renamed = named | {"values": [[-0.5, -1.25], [-0.25]]}
    digests = {
        load(tmp_path, ROW | x, columns={IDS: "ids", LOGPROBS: "values"}).loaded[0].report().digest
        for x in (named, renamed)
    }
    assert len(digests) == 2


def test_a_column_names_the_teacher(tmp_path: Any) -> None:
    rows = [ROW | {"subject": "code"}, ROW | LISTS | {"subject": "math"}]
    documents = load(tmp_path, *rows, teachers=("math", "code"), teacher_column="subject", listed=("math",))
    assert documents.teachers.tolist() == [1, 0]
    assert [IDS in document.arrays for document in documents] == [False, True]
    for value, message in (("art", "`subject` is 'art', which is not a name in distill.teachers. Names: math, code"),
                           (None, "has no `subject`")):  # fmt: skip
        with pytest.raises(UserError, match=f"rows.jsonl:1: {message}"):
            load(tmp_path, ROW | {"subject": value}, teachers=("math", "code"), teacher_column="subject")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({IDS: None}, "has no `teacher_top_ids`, but its teacher is `data`"),
        ({IDS: "7 8"}, "must be a list of lists"),
        ({IDS: [[7, 1]], LOGPROBS: [[-1.0, -1.0]]}, "has 1 entries, but the document has 4 tokens, of which 2 are"),
        ({IDS: [[7], [8]]}, "entry 0 has 1 ids and 2 log-probabilities"),
        ({IDS: [[7, 1], [8], [9]]}, "`teacher_top_ids` has 3 entries, but `teacher_top_logprobs` has 2"),
        ({IDS: [[7, 7], [8]]}, "entry 0 .* has an id twice"),
        ({IDS: [[7, -1], [8]]}, "entry 0 .* has an id that is not a token"),
        ({IDS: [[7, 1.5], [8]]}, "must hold lists of integers"),
        ({IDS: [[7, 1], [264]]}, "`teacher_top_ids` has id 264, but the model's vocabulary has 264"),
        ({LOGPROBS: [[-0.5, 0.5], [-0.25]]}, "entry 0 .* log-probability that is not a finite number up to 0"),
        ({LOGPROBS: [[-0.5, -0.6], [-0.25]]}, "entry 0 .* sum above 1. Write log-probabilities, not logits"),
        ({IDS: [[7, 1], []], LOGPROBS: [[-0.5, -1.5], []]}, "token 3 is trained, but its entry .* is empty"),
    ],
)
def test_rows_that_are_refused(tmp_path: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"rows.jsonl:1: .*{message}"):
        load(tmp_path, ROW | LISTS | change)
