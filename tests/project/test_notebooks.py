"""The notebooks of examples/ run from their first cell to their last, with fewer steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells), "clear the outputs before a commit"
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(n, id=n.stem, marks=pytest.mark.table if "distillation" in n.stem else ()) for n in NOTEBOOKS],
)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "examples").mkdir()
    for script in (ROOT / "examples").glob("make_*_demo.py"):
        shutil.copy(script, tmp_path / "examples")
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(code_of(notebook)):
        shorter = code.replace("STEPS = 400", "STEPS = 8").replace("STEPS = 100", "STEPS = 8")
        exec(compile(shorter, f"{notebook.name}, cell {number}", "exec"), space)
    run = space["run"]
    assert [line["step"] for line in run.metrics] == list(range(1, 9))
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]


def test_there_are_four() -> None:
    assert len(NOTEBOOKS) == 4
