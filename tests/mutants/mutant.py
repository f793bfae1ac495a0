"""A small bug in one function, and the tests that must fail with it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """file: below weft/. function: its qualified name. before: text that occurs there once; after: what replaces it.

    tests: of which at least one must fail, as pytest is given them, separated by spaces.
    """

    file: str
    function: str
    before: str
    after: str
    tests: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}: {self.before!r} -> {self.after!r}"

    def plant(self, package: Path) -> None:
        """Write the bug into this copy of weft/. ValueError where the function is not as the mutant knows it."""
        path = package / self.file
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        first, last = span(ast.parse("".join(lines)), self.function)
        body = "".join(lines[first:last])
        if body.count(self.before) != 1:
            raise ValueError(f"{self.name}: occurs {body.count(self.before)} times")
        changed = body.replace(self.before, self.after)
        path.write_text("".join(lines[:first]) + changed + "".join(lines[last:]), encoding="utf-8")
        ast.parse(path.read_text(encoding="utf-8"))


def span(tree: ast.Module, name: str) -> tuple[int, int]:
    """Lines [first, last) of a function, counted from 0. ValueError where there is none."""
    found: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((one for one in found if isinstance(one, kinds) and one.name == part), None)
        if node is None:
            raise ValueError(f"no function {name}")
        found = node.body
    assert node is not None and node.end_lineno is not None
    return node.lineno - 1, node.end_lineno
