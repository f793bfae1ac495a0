"""Rules about names: they say the thing, and a class name stands once."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.project.test_house import ROOT, tree

# Names that say nothing of the thing: pronouns, articles and participles alone.
EMPTY_NAMES = {
    "again", "alike", "alone", "anything", "apart", "asked", "at", "behind", "beside", "both", "by",
    "due", "each", "elsewhere", "enough", "every", "everyone", "everything", "few", "found", "given", "having",
    "heard", "held", "here", "it", "its", "kept", "known", "least", "left", "lots", "made", "many", "mine", "more",
    "most", "nothing", "of", "once", "one", "other", "others", "ours", "own", "place", "ready", "rest", "said",
    "says", "seen", "several", "some", "something", "stuff", "such", "sure", "taken", "theirs", "them", "there",
    "these", "they", "thing", "things", "those", "told", "took", "twice", "wanted", "wants", "what", "where",
    "which", "who", "whole", "whom", "whose",
}  # fmt: skip
MOST_EMPTY = 0.005  # of all names that are bound


def bound_names(files: Iterable[Path]) -> list[str]:
    """Variables, attributes, parameters, functions and classes of files, once for each time that one is bound."""
    names: list[str | None] = []
    for node in (node for path in files for node in ast.walk(tree(path))):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.append(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
                names.append(node.name)
    return [name for name in names if name is not None]


@pytest.mark.parametrize("folder", ["weft", "tests", "benchmarks"])
def test_names_say_the_thing(folder: str) -> None:
    names = bound_names((ROOT / folder).rglob("*.py"))
    empty = Counter(name for name in names if name.strip("_").lower() in EMPTY_NAMES)
    assert sum(empty.values()) <= MOST_EMPTY * len(names), empty.most_common(20)


@pytest.mark.parametrize("folders", [("weft",), ("tests", "benchmarks")], ids=" ".join)
def test_a_class_name_stands_once(folders: tuple[str, ...]) -> None:
    """In the whole package, private classes included, and in its tests and benchmarks."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(ROOT)))
    duplicates = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert duplicates == {}
