"""The mutants of `make mutants` still fit the functions that they change; whether they are seen is said there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutants import pattern
from tests.mutants import run as runner
from tests.mutants.drawn import Drawn, equivalents, files_of, is_recorded, sites_of
from tests.mutants.mutant import Mutant
from tests.mutants.run import MUTANTS, ROOT


@cache
def dumped(path: Path) -> str:
    return ast.dump(ast.parse(path.read_text()))


def test_every_mutant_can_be_planted() -> None:
    assert len(MUTANTS) >= 150 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        path, text = mutant.planted(ROOT / "weft")
        assert ast.dump(ast.parse(text)) != dumped(path), mutant.name
        assert all((ROOT / test.split("::")[0]).exists() for test in mutant.tests.split()), mutant.name


def test_a_mutant_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    return 1 + 1\n")
    for function, before in (("f", "1"), ("f", "2"), ("g", "return")):
        with pytest.raises(ValueError):
            Mutant("a.py", function, before, "3", "").plant(tmp_path)
    with pytest.raises(ValueError, match="no such names there: other"):
        Mutant("a.py", "f", "1 + 1", "other", "").plant(tmp_path)


PATTERNS = [  # (pattern, replacement, the function, what it becomes; None: no match, or more than one)
    ("lr * step", "lr", "def f(lr, step): return lr * step", "def f(lr, step): return lr"),
    ("lr * step", "lr", "def f(rate, number): return rate * number", "def f(rate, number): return rate"),
    ("lr * lr", "lr", "def f(rate, number): return rate * number", None),
    ("a + b", "a - b", "def f(x, y): return (x + y, y + x)", None),
    ("x + y", "x - y", "def f(x, y): return (x + y, y + x)", "def f(x, y): return (x - y, y + x)"),
    ("a.lr * b", "a.lr", "def f(x, y): return x.rate * y", "def f(x, y): return x.rate"),
    ("a.lr * b", "a.lr", "def f(x, y): return x.rate * y + x.lr", None),
    ("min(a, 1)", "a", "def f(config): return min(config.lr, 1)", "def f(config): return config.lr"),
    ("min(a, 1)", "a", "def f(config): return max(config.lr, 1)", None),
    ("(..., a.x, ...)", "(..., ...)", "def f(a): return (1, a.x, 2)", "def f(a): return (1, 2)"),
    ("dict(..., b=c)", "dict(...)", "def f(c): return dict(a=1, b=c, d=2)", "def f(c): return dict(a=1, d=2)"),
    ("if a:\n    ...", "if False:\n    ...", "def f(b):\n    if b:\n        f(1)\n        f(2)",
     "def f(b):\n    if False:\n        f(1)\n        f(2)"),
    ("f'{a}:{b}'", "f'{a}'", "def f(x, y): return f'{x}:{y}'", "def f(x, y): return f'{x}'"),
    ("a - 1", "a", "def f(x): return f'{x - 1} left'", "def f(x): return f'{x} left'"),
    ("g(a)", "pass", "def f(x):\n    g(x)\n    return x", "def f(x):\n    pass\n    return x"),
    ("a = 0\n...\nreturn a", "a = 1\n...\nreturn a", "def f(x):\n    y = 0\n    y += x\n    return y",
     "def f(x):\n    y = 1\n    y += x\n    return y"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "source", "expected"), PATTERNS)
def test_a_pattern_matches_whatever_variables_are_called(
    before: str, after: str, source: str, expected: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.py"
    path.write_text("# first\n" + source + "\n")
    mutant = Mutant("a.py", "f", before, after, "")
    if expected is None:
        with pytest.raises(ValueError, match="occurs [02] times"):
            mutant.plant(tmp_path)
    else:
        mutant.plant(tmp_path)
        assert path.read_text().startswith("# first\n")
        assert ast.unparse(ast.parse(path.read_text())) == ast.unparse(ast.parse(expected))


def test_a_mutant_follows_a_function_that_is_renamed_or_inlined(tmp_path: Path) -> None:
    mutant, path = Mutant("a.py", "A._share", "total / ranks", "total", ""), tmp_path / "a.py"
    for source in (
        "class B:\n    def _share(self, total, ranks): return total / ranks",
        "def share(count, world): return count / world",
        "def step(self, mesh): return (mesh.size, sum(self.values) / mesh.ranks)[1]",
    ):
        path.write_text(source)
        if "mesh" in source:  # in no function of its name: only names may have changed
            with pytest.raises(ValueError, match="occurs 0 times"):
                mutant.plant(tmp_path)
        else:
            mutant.plant(tmp_path)
            assert "/" not in path.read_text()


def test_a_mutant_follows_a_function_to_another_file(tmp_path: Path) -> None:
    source = "class A:\n    def f(self, a): return a + 1"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.py").write_text(source)
    for first in (None, "def g(): pass"):
        if first:
            (tmp_path / "a.py").write_text(first)
        path, text = Mutant("a.py", "A.f", "x + 1", "x", "").planted(tmp_path)
        assert path == tmp_path / "folder" / "b.py" and text.endswith("return (a)")
    (tmp_path / "c.py").write_text(source)
    with pytest.raises(ValueError, match="occurs 2 times"):
        Mutant("a.py", "A.f", "x + 1", "x", "").planted(tmp_path)


def test_draws_do_not_depend_on_names_of_variables() -> None:
    texts = ("def f(a):\n    return a + X", "def f(b):\n    return b + X", "def f(b):\n    return b + Y")
    modules = [ast.parse(f"X = Y = 1\n{text}") for text in texts]
    original, renamed, different = (pattern.anonymous(sites_of(m)["f", "arithmetic"][0].node, m) for m in modules)
    assert original == renamed != different


def test_a_drawn_site_outlives_edits_elsewhere(tmp_path: Path) -> None:
    function = "def f(a):\n    b = a * 2\n    return [a + 1, b + 3]\n"
    second = Drawn("a.py", "f", "arithmetic", 2)
    for before in ("", "# a comment\nX = 1 + 2\n\n\ndef g(a):\n    return a + a - a\n\n\n"):
        (tmp_path / "a.py").write_text(before + function)
        second.plant(tmp_path)
        assert (tmp_path / "a.py").read_text() == before + function.replace("b + 3", "(b - 3)")
    with pytest.raises(ValueError, match="there are 3 such sites"):
        Drawn("a.py", "f", "constant", 3).plant(tmp_path)


@pytest.mark.parametrize("entry", equivalents(), ids=lambda entry: entry["before"])
def test_what_is_recorded_as_equivalent_still_exists(entry: dict[str, str]) -> None:
    """So that no reason outlives its change."""
    count = 0
    for file in files_of(entry):
        module = ast.parse((ROOT / "weft" / file).read_bytes())
        for (_, operator), edits in sites_of(module).items():
            count += sum(operator == entry["operator"] and is_recorded(entry, module, edit) for edit in edits)
    assert count and entry["why"].endswith(".")


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
