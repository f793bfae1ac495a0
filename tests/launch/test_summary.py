"""summary.json."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import weft
from weft.launch.summary import Phases, RunSummary


def test_summary(tmp_path: Path) -> None:
    summary, phases = RunSummary(model="some/model", data="chat.jsonl"), Phases()
    for step in range(1, 13):
        loss = None if step == 2 else 10.0 - step
        summary.add(
            {"loss": loss, "documents": 2, "tokens": 100, "loss_tokens": 50, "memory_gib": float(step % 5)}
            | ({"skipped": True} if step == 2 else {})
        )
    summary.write(tmp_path / "summary.json", phases, tmp_path / "step-12")
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["model"] == "some/model" and content["data"] == "chat.jsonl"
    assert content["saved"] == str(tmp_path / "step-12")
    assert (content["steps"], content["skipped_steps"], content["documents"]) == (12, 1, 24)
    assert (content["tokens"], content["loss_tokens"], content["peak_memory_gib"]) == (1200, 600, 4.0)
    assert content["first_losses"] == [9.0, *(10.0 - step for step in range(3, 12))]
    assert content["last_losses"] == [10.0 - step for step in range(3, 13)]
    assert content["versions"] == {
        "weft": weft.__version__, "torch": version("torch"), "transformers": version("transformers"),
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_phases_add_up(tmp_path: Path) -> None:
    phases = Phases()
    for _ in range(2):
        with phases("train"):
            time.sleep(0.02)
    with pytest.raises(KeyError), phases("save"):
        raise KeyError
    assert 0.04 <= phases.seconds["train"] < 1.0 and "save" in phases.seconds
    RunSummary(model="m").write(tmp_path / "summary.json", phases, None)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["seconds"]["total"] == pytest.approx(sum(phases.seconds.values())) and content["saved"] is None
