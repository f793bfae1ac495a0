"""Bad input through the real command: exit status 2 within 20 seconds, no traceback, a message that says what to set.

Cases of the config need no model. Cases of the data add `files` and `words` in the same way.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

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
    Case("wrong choice", ["sft", "c.yaml", "optimizer.name=adam"], ["optimizer.name", "one of adamw, sgd", "adam"]),
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_text("")
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)
    began = time.monotonic()
    command = [sys.executable, "-m", "weft", *case.arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - began < 20
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for piece in case.expected:
        assert piece in done.stderr
