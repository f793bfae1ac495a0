"""The mutants of `make mutants` still fit the functions that they change; whether they are seen is said there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutants import run as runner
from tests.mutants.drawn import EQUIVALENT, Drawn
from tests.mutants.mutant import Mutant
from tests.mutants.run import MUTANTS, ROOT


def test_every_mutant_can_be_planted(tmp_path: Path) -> None:
    assert len(MUTANTS) >= 150 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        copy = tmp_path / mutant.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "weft" / mutant.file, copy)
        mutant.plant(tmp_path)
        assert copy.read_text() != (ROOT / "weft" / mutant.file).read_text(), mutant.name
        assert all((ROOT / test.split("::")[0]).exists() for test in mutant.tests.split()), mutant.name


def test_a_mutant_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    return 1 + 1\n")
    for function, before in (("f", "1"), ("f", "2"), ("g", "return")):
        with pytest.raises(ValueError):
            Mutant("a.py", function, before, "3", "").plant(tmp_path)
    Mutant("a.py", "f", "1 + 1", "3", "").plant(tmp_path)
    assert "return 3" in (tmp_path / "a.py").read_text()


def test_a_drawn_site_outlives_edits_elsewhere(tmp_path: Path) -> None:
    function = "def f(a):\n    b = a * 2\n    return [a + 1, b + 3]\n"
    second = Drawn("a.py", "f", "arithmetic", 2)
    for before in ("", "# a comment\nX = 1 + 2\n\n\ndef g(a):\n    return a + a - a\n\n\n"):
        (tmp_path / "a.py").write_text(before + function)
        second.plant(tmp_path)
        assert (tmp_path / "a.py").read_text() == before + function.replace("b + 3", "(b - 3)")
    with pytest.raises(ValueError, match="there are 3 such sites"):
        Drawn("a.py", "f", "constant", 3).plant(tmp_path)


def test_what_is_recorded_as_equivalent_is_still_the_same_change() -> None:
    """An edit of a function may move its sites: the reason is then of another change."""
    for name, entry in json.loads(EQUIVALENT.read_text()).items():
        file, function, site = name.split(":")
        operator, _, ordinal = site.strip().rpartition(" ")
        assert Drawn(file, function, operator, int(ordinal)).shown().partition(": ")[2] == entry["change"], name
        assert entry["why"].endswith(".")


def test_a_file_that_cannot_be_imported_sees_no_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(root: Path, words: list[str], seconds: float) -> tuple[int, str]:
        return (2, "tests/broken.py") if "tests/broken.py" in words else (0, "")

    warm: Any = SimpleQueue()
    warm.put(SimpleNamespace(run=ran))
    monkeypatch.setattr(runner, "copy", lambda root: root)
    assert runner.fail_without({"tests/a.py::b", "tests/broken.py"}, warm) == ["tests/broken.py"]
    assert runner.run(ROOT, ["tests/a.py", "tests/broken.py"], warm) == (2, "tests/broken.py")
    assert runner.run(ROOT, ["tests/a.py", "tests/broken.py"], warm, ["tests/broken.py"]) == (0, "")
    assert runner.run(ROOT, ["tests/broken.py"], warm, ["tests/broken.py"]) == (0, "")
