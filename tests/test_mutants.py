"""The mutants of `make mutants` still fit the functions that they change; whether they are seen is said there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

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
