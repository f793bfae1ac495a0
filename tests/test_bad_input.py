"""Bad input through the real command: exit status 2 within 20 seconds, no traceback, a message that says what to set.

Cases of the config need no model; cases of the data bring one. All that a data file can get wrong: test_bad_data.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import Qwen3Config

from tests import forked
from tests.machine import business
from tests.toy_tokenizers import byte_tokenizer

GOOD = "model: {path: m}\ndata: {path: d.jsonl}\n"


@dataclass(frozen=True)
class Case:
    """arguments: of `weft`. expected: pieces of the message. files: name -> text, besides a model and data."""

    name: str
    arguments: list[str]
    expected: list[str]
    files: dict[str, str] = field(default_factory=dict)


CASES = [
    Case(
        "unknown key",
        ["sft", "c.yaml", "optimizer.learning_rat=1"],
        ["optimizer.learning_rat", "did you mean optimizer.lr?"],
    ),
    Case(
        "a name of another trainer",
        ["sft", "c.yaml", "train.gradient_accumulation_steps=4"],
        ["train.gradient_accumulation_steps", "`step.documents` = per-device batch x accumulation x data ranks"],
    ),
    Case("not yet", ["sft", "c.yaml", "mesh.tp=2"], ["mesh.tp is not in this version yet", "leave it out"]),
    Case("wrong type", ["sft", "c.yaml", "step.documents=1e3"], ["step.documents", "not 1000.0", "write 1000"]),
    Case(
        "wrong choice",
        ["sft", "c.yaml", "optimizer.name=adam"],
        ["optimizer.name is adam: write adamw", "torch.optim.Adam."],
    ),
    Case(
        "both partners",
        ["sft", "b.yaml", "step.tokens=4096"],
        ["step.documents (b.yaml:4)", "step.tokens (command line)", "set the other to null"],
        {"b.yaml": GOOD + "step:\n  documents: 8\n"},
    ),
    Case(
        "out of range",
        ["sft", "b.yaml"],
        ["b.yaml:3: optimizer.lr is -0.001; it must be above 0"],
        {"b.yaml": GOOD + "optimizer: {lr: -1e-3}\n"},
    ),
    Case(
        "no effect",
        ["sft", "c.yaml", "optimizer.name=sgd", "optimizer.betas=[0.9, 0.99]"],
        ["optimizer.betas would have no effect", "Leave it out"],
    ),
    Case(
        "mesh and ranks",
        ["sft", "c.yaml", "mesh.dp_replicate=2", "mesh.dp_shard=2", "--nproc", "3"],
        ["mesh.dp_replicate x mesh.dp_shard = 2 x 2 = 4", "3 ranks", "--nproc 4"],
    ),
    Case("documents longer than a row", ["sft", "c.yaml", "data.max_length=9000"], ["step.max_tokens_per_device=9000"]),
    Case("no model", ["sft", "data.path=d.jsonl"], ["model.path is required", "set model.path=..."]),
    Case(
        "model not there", ["sft", "c.yaml", "model.path=./mm"], ["model.path ./mm does not exist", "Did you mean m?"]
    ),
    Case("data not there", ["sft", "c.yaml", "data.path=dd.jsonl"], ["data.path dd.jsonl", "Did you mean d.jsonl?"]),
    Case("config not there", ["sft", "cc.yaml"], ["cc.yaml: no such config file", "Did you mean c.yaml?"]),
    Case(
        "YAML syntax",
        ["sft", "b.yaml"],
        ["b.yaml:3: not valid YAML", "Indent with spaces"],
        {"b.yaml": "model:\n  path: m\n\tinit: random\n"},
    ),
    Case("not an override", ["sft", "c.yaml", "--step.documents=3"], ["without dashes: step.documents=3"]),
    Case("verify", ["verify", "c.yaml", "step.documents=0"], ["step.documents is 0; it must be 1 or more"]),
]


def _tiny_model() -> dict[str, str]:
    """The files of a model folder `tiny` of one layer: config, tokenizer and chat template, but no weights."""
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"], vocab_size=300, hidden_size=32, num_hidden_layers=1
        ).save_pretrained(folder)
        return {f"tiny/{file.name}": file.read_text() for file in Path(folder).iterdir()}


TINY = _tiny_model()
TRAIN = ["sft", "c.yaml", "model.path=tiny", "model.init=random", "data.path=bad.jsonl"]
PAIR = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'

CASES += [
    Case("not JSON", TRAIN, ["bad.jsonl:2: is not valid JSON"], {**TINY, "bad.jsonl": PAIR + '{"text": "a"\n'}),
    Case(
        "a foreign format",
        [*TRAIN, "--nproc", "2"],
        ["bad.jsonl:1: has `question`, `answer`", "Set data.columns={prompt: question, completion: answer}"],
        {**TINY, "bad.jsonl": '{"question": "a", "answer": "b"}\n'},
    ),
    Case(
        "nothing to train",
        TRAIN,
        ["bad.jsonl:3: no token of this document is trained", "message of the assistant"],
        {**TINY, "bad.jsonl": PAIR + '\n{"messages": [{"role": "user", "content": "a"}]}\n'},
    ),
    Case("no documents", TRAIN, ["bad.jsonl: holds no documents", "data.path"], {**TINY, "bad.jsonl": "\n"}),
    Case(
        "a template that leaves the answer out",
        TRAIN,
        ["bad.jsonl:1", "cannot tell which tokens are the assistant's", "data.chat_template"],
        {**TINY, "bad.jsonl": PAIR, "tiny/chat_template.jinja": "{{ messages[0]['content'] }}"},
    ),
    Case(
        "a long document",
        [*TRAIN, "data.max_length=8"],
        ["bad.jsonl:2: 1 of 2 documents are longer than 8 tokens (data.max_length)", "data.long_documents"],
        {**TINY, "bad.jsonl": '{"text": "a"}\n{"text": "a longer text"}\n'},
    ),
    Case(
        "a tokenizer of another model",
        TRAIN,
        ["bad.jsonl:1: the tokenizer gives id", "vocabulary has 16", "model.path"],
        {**TINY, "bad.jsonl": PAIR, "tiny/config.json": TINY["tiny/config.json"].replace(": 300", ": 16")},
    ),
    Case(
        "no tokenizer",
        TRAIN,
        ["model.path: tiny holds no tokenizer", "tokenizer.json"],
        {"tiny/config.json": TINY["tiny/config.json"], "bad.jsonl": PAIR},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_text("")
    for name, text in case.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    began = time.monotonic()
    if case.arguments[: len(TRAIN)] == TRAIN:  # these come as far as torch
        done = forked.run(case.arguments, tmp_path)
    else:
        command = [sys.executable, "-m", "weft", *case.arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - began < 20 * business()
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for piece in case.expected:
        assert piece in done.stderr
