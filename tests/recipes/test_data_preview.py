"""`weft data preview`: what it says is what training does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.test_errors_in_data import model
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft import cli
from weft.data import sources
from weft.observe.preview import histogram, render
from weft.recipes import preview

LENGTHS = [3, 5, 9, 3, 19, 6]  # letters; a document has one token more


def shown(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    options = [f"model.path={model(byte_tokenizer, 300)}", "model.init=random"]
    assert cli.main(["data", "preview", *options, *words]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("d.jsonl"), *({"text": "a" * n} for n in LENGTHS))
    chats = [chat(("user", "hi"), ("assistant", "yes [bold]")), chat(("user", "a"), ("assistant", "b"))]
    write_jsonl(Path("c.jsonl"), *chats)


def test_numbers_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["data.path=d.jsonl", "step.documents=4", "step.max_tokens_per_device=20", "data.shuffle=false"]
    out = shown(capsys, *keys)
    assert "data     d.jsonl, 123 B: 6 documents (text)" in out
    assert "template NOT used: `text` is trained as plain text" in out
    assert "tokens   51, of which 45 trained (88%)" in out  # all but the first of each
    assert "long     no document is longer than 20 tokens (step.max_tokens_per_device)" in out
    # Without the last of each document, 3 + 5 + 9 + 3 = 20 tokens of the first step take a row of 20, 19 + 6 of the
    # second two.
    assert "steps    2 in an epoch, with 4 documents each; the first has 24 tokens, of which 20 are trained" in out
    assert "rows     of 20 tokens on 1 rank: 1 to 2 micro-batches in a step, fill 81%" in out  # 20 / 20 and 25 / 40
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["all"])
    assert row[1:] == ["4", "4", "7", "20", "20", "20", "8"]
    two = shown(capsys, *keys, "--nproc", "2")
    assert "rows     of 20 tokens on 2 ranks: 1 micro-batch in a step" in two


@pytest.mark.parametrize(
    ("policy", "consequence"),
    [
        ("error", "training would refuse them: raise the limit, or set data.long_documents to truncate or drop"),
        ("truncate", "their ends are removed, 14 tokens (data.long_documents)"),
        ("drop", "they are omitted (data.long_documents)"),
    ],
)
def test_long_documents(policy: str, consequence: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "data.path=d.jsonl", "data.max_length=8", f"data.long_documents={policy}", "step.documents=2")
    assert f"long     2 documents are longer than 8 tokens (data.max_length); {consequence}" in out
    assert f"steps    {3 if policy == 'truncate' else 2} in an epoch" in out


def test_what_is_trained_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "data.path=c.jsonl", "--samples", "1")
    assert "c.jsonl:1  33 tokens, 11 trained" in out and "c.jsonl:2" not in out
    assert "<|start|>user\nhi<|end|>\n<|start|>assistant\n\u00bbyes [bold]<|end|>\u00ab\n" in out


def test_colours() -> None:
    tokenizer = byte_tokenizer()
    text = render(tokenizer, np.array(tokenizer("abc")["input_ids"]), np.array([0, 1, 1]), coloured=True)
    assert text.plain == "abc"
    assert [(span.start, span.end, span.style) for span in text.spans] == [(0, 1, "dim"), (1, 3, "bold green")]


def test_sources_have_their_names_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    keys = "data.sources=[{path: d.jsonl, weight: 0.5}, {path: c.jsonl}]"
    out = shown(capsys, keys, "step.documents=2", "--samples", "2")
    assert "data     d (d.jsonl)" in out and "data     c (c.jsonl)" in out
    assert "d.jsonl:1" in out and "c.jsonl:1" in out  # a sample of each
    assert "weight   0.5 of d: an epoch takes 3 documents" in out
    assert "steps    3 in an epoch" in out  # 3 + 2 documents
    out = shown(capsys, keys.replace("0.5", "0.75"), "step.documents=2")
    assert "weight   0.75 of d: an epoch takes 5 documents" in out  # 4.5, rounded as the run rounds


def test_a_large_file_is_sampled(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(Path("large.jsonl"), *({"text": f"{i:050}"} for i in range(5000)))
    monkeypatch.setattr(preview, "SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 8 * 600)
    out = shown(capsys, "data.path=large.jsonl", "step.documents=10", "--sample")
    line = next(line for line in out.splitlines() if line.startswith("data"))
    about, sample = (int(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit())
    assert abs(about - 5000) < 500 and sample < 300
    assert f"steps    about {-(-about // 10)}" in out.replace(",", "") or "steps    about " in out
    out = shown(capsys, "data.path=large.jsonl", "step.documents=10")
    assert "5,000 documents (text)" in out and "steps    500 in an epoch" in out


def test_every_row_is_read_and_bad_ones_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of which no sample has one; those that cannot be parsed, and those that cannot be rendered or trained."""
    monkeypatch.setattr(preview, "SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 8 * 600)
    rows: list[object] = [{"text": f"{i:050}"} for i in range(3000)]
    for i in range(1000, 1025):
        rows[i] = {"body": "b"}
    write_jsonl(Path("bad.jsonl"), *rows)
    shown(capsys, "data.path=bad.jsonl", "--sample")
    err = shown(capsys, "data.path=bad.jsonl", status=2)
    assert "25 of 3,000 rows cannot be trained on:\n  25 rows, bad.jsonl:1001 to bad.jsonl:1025: has `body`, but" in err
    assert err.count("has `body`") == 1
    assert err.strip().endswith("Fix them, or skip them with data.bad_rows=drop.")
    out = shown(capsys, "data.path=bad.jsonl", "data.bad_rows=drop")
    assert "bad      25 rows are omitted (data.bad_rows=drop):" in out and "to bad.jsonl:1025: has" in out
    assert "2,975 documents (text)" in out
    assert "steps    47 in an epoch" in out  # 2,975 documents, 64 in a step
    unclear = {"messages": chat(("user", "hi"))["messages"]}
    tools = {**chat(("user", "hi"), ("assistant", "yes")), "tools": [{"name": "f"}]}
    write_jsonl(Path("late.jsonl"), chat(("user", "hi"), ("assistant", "yes")), unclear, tools)
    err = shown(capsys, "data.path=late.jsonl", status=2)
    assert "2 of 3 rows cannot be trained on:\n  late.jsonl:2: no token of this document is trained" in err
    assert "late.jsonl:3: has `tools`" in err


def test_rows_that_are_bad_in_any_way_are_counted_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that cannot be read, and those of which nothing is trained: the numbers are those of the run."""
    good, untrained = chat(("user", "hi"), ("assistant", "yes")), {"messages": chat(("user", "hi"))["messages"]}
    write_jsonl(Path("mixed.jsonl"), good, {"body": "b"}, good, untrained, {"messages": []}, good)
    err = shown(capsys, "data.path=mixed.jsonl", status=2)
    assert "3 of 6 rows cannot be trained on:\n  mixed.jsonl:2: has `body`" in err
    assert "  mixed.jsonl:4: no token of this document" in err and "  mixed.jsonl:5: `messages` is empty" in err
    out = shown(capsys, "data.path=mixed.jsonl", "data.bad_rows=drop", "step.documents=1")
    assert "3 documents (messages)" in out and "bad      3 rows are omitted" in out and "steps    3 in an epoch" in out
    tokens = next(line for line in out.splitlines() if line.startswith("tokens"))
    write_jsonl(Path("good.jsonl"), good, good, good)
    assert tokens in shown(capsys, "data.path=good.jsonl")


@pytest.mark.parametrize("drop", [False, True])
def test_a_mistake_in_every_row_is_said_once_and_leaving_out_all_rows_is_not_proposed(
    drop: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["data.bad_rows=drop"] if drop else []
    Path("all.csv").write_text("question,answer\n" + "a,b\n" * 40, encoding="utf-8")
    err = shown(capsys, "data.path=all.csv", *keys, status=2)
    assert "none of the 40 rows can be trained on:\n  40 rows, all.csv:2 to all.csv:41: has `question`, `answer`" in err
    assert err.count("but needs") == 1 and "or set data.bad_rows" not in err
    assert "Set 'data.columns={instruction: question, output: answer}'" in err
    write_jsonl(Path("asked.jsonl"), *[{"messages": chat(("user", "hi"))["messages"]}] * 3)
    err = shown(capsys, "data.path=asked.jsonl", *keys, status=2)
    assert "none of the 3 rows can be trained on:" in err and "or set data.bad_rows" not in err


def test_what_is_trained_is_always_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Behind a beginning of a thousand tokens, as tools are; and of a long answer both ends."""
    turns = [
        ("user", "begin" + "a" * 1000 + "asked"),
        ("assistant", "one"),
        ("user", "more"),
        ("assistant", "f" + "b" * 500 + "l"),
    ]
    write_jsonl(Path("long.jsonl"), chat(*turns))
    out = shown(capsys, "data.path=long.jsonl")
    assert "begin" in out and "asked<|end|>\n<|start|>assistant\n\u00bbone<|end|>\u00ab" in out
    assert "\u00bbf" in out and "l<|end|>\u00ab" in out and "a" * 100 not in out and "b" * 200 not in out
    hidden = [int(line.split()[1].replace(",", "")) for line in out.splitlines() if line.startswith("[... ")]
    assert len(hidden) == 2 and "trained tokens: --full shows them" in out
    full = shown(capsys, "data.path=long.jsonl", "--full")
    assert "a" * 1000 in full and "b" * 500 in full and "[..." not in full
    texts = [" ".join(line for line in text.splitlines() if not line.startswith("[...")) for text in (full, out)]
    letters = [sum(text.count(letter) for letter in "ab") for text in texts]
    assert letters[0] - letters[1] == sum(hidden)  # one token is a letter


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(Path("bad.jsonl"), {"text": "a"}, {"body": "b"})
    assert "bad.jsonl:2: has `body`" in shown(capsys, "data.path=bad.jsonl", status=2)
    assert cli.main(["data", "show"]) == 2
    assert "weft data preview" in capsys.readouterr().err


def test_histogram_by_hand() -> None:
    lines = histogram(np.array([1, 2, 3, 25, 118]))
    assert [line.split()[:4] for line in lines[:2]] == [["0", "to", "9", "3"], ["10", "to", "19", "0"]]
    assert lines[0].endswith("\u2588" * 40) and len(lines) == 12 and lines[-1].split()[:4] == ["110", "to", "119", "1"]
    assert histogram(np.array([25, 118]))[0].split()[:4] == ["20", "to", "29", "1"]  # no empty ranges before the first


def test_steps_of_an_epoch_are_scaled_up_from_what_was_read() -> None:
    def steps(share: float, **step: int | None) -> int:
        config: Any = SimpleNamespace(step=SimpleNamespace(**{"documents": None, "tokens": None, **step}))
        read: Any = [SimpleNamespace(share=share, source=SimpleNamespace(weight=1.0))]
        piece = SimpleNamespace(example_ends=[1, 2, 3], lengths=np.array([5, 6]))
        return preview._steps_in_epoch(config, read, [piece], 7)

    assert steps(1.0, documents=2) == 7
    assert steps(0.25, documents=4) == 3 and steps(0.25, documents=5) == 3
    assert steps(0.25, tokens=44) == 1 and steps(0.25, tokens=43) == 2


def test_advice_fits_a_model_with_and_without_a_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of rows that are read before the tokenizer is imported."""
    write_jsonl(Path("qa.jsonl"), {"question": "a", "answer": "b"})
    with_template, without = byte_tokenizer(), byte_tokenizer()
    without.chat_template = None
    for name, tokenizer, advice in (
        ("with", with_template, "{instruction: question, output: answer}"),
        ("without", without, "{completion: answer, prompt: question}"),
    ):
        tokenizer.save_pretrained(tmp_path / name)
        tiny_config("llama", vocab_size=264).save_pretrained(tmp_path / name)
        words = [f"model.path={tmp_path / name}", "model.init=random", "data.path=qa.jsonl"]
        assert cli.main(["data", "preview", *words]) == 2
        assert advice in capsys.readouterr().err
    own_template = [*words, "data.chat_template=own.jinja"]
    Path("own.jinja").write_text(with_template.chat_template)
    assert cli.main(["data", "preview", *own_template]) == 2
    assert "{instruction: question, output: answer}" in capsys.readouterr().err
