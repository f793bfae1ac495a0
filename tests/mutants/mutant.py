"""A small bug in one function, and the tests that must fail with it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.mutants import pattern
from tests.mutants.pattern import Match, Node


@dataclass(frozen=True)
class Mutant:
    """before: a pattern (see pattern.py) that occurs once in the function; after: what replaces it.

    file: below weft/. function: its qualified name. Both are where the search begins: a function that is not there was
    renamed, inlined or moved, and the pattern is looked for in functions of the same last name, in the whole file, and in
    functions of the same qualified name elsewhere.
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
        """Write the bug into this copy of weft/. ValueError where the pattern does not occur once."""
        path, text = self.planted(package)
        path.write_text(text, encoding="utf-8")

    def planted(self, package: Path) -> tuple[Path, str]:
        """(A file of weft/, its text with the bug)."""
        before, after = self.patterns()
        path = package / self.file
        matches = self._matches_in(before, path) if path.exists() else []
        if not matches:
            for candidate in sorted(package.rglob("*.py")):
                if candidate != path and self.function in dict(pattern.functions(read(candidate)[1])):
                    matches += self._matches_in(before, candidate)
        if len(matches) != 1:
            raise ValueError(f"{self.name}: occurs {len(matches)} times")
        path, match, scope = matches[0]
        source, module = read(path)
        unknown = pattern.unknown_names(after, match.bindings, scope)
        if unknown:
            raise ValueError(f"{self.name}: no such names there: {', '.join(sorted(unknown))}")
        text = pattern.write(source, module, match, pattern.filled(after, match.bindings))
        ast.parse(text)
        return path, text

    def patterns(self) -> tuple[Node, Node]:
        """(before, after): both expressions, or both statements."""
        before, after = pattern.parse(self.before), pattern.parse(self.after)
        if isinstance(before, list) != isinstance(after, list):
            return pattern.parse_statements(self.before), pattern.parse_statements(self.after)
        return before, after

    def _matches_in(self, before: Node, path: Path) -> list[tuple[Path, Match, ast.AST]]:
        """(The file, a match, the tree in which it was looked for) for every match in a file."""
        module = read(path)[1]
        functions = dict(pattern.functions(module))
        last = self.function.rpartition(".")[2]
        scopes = [node for name, node in functions.items() if name.rpartition(".")[2] == last]
        if self.function in functions:
            scopes = [functions[self.function]]
        matches = [(path, match, scope) for scope in scopes for match in pattern.find(before, scope, module)]
        return matches or [(path, match, module) for match in pattern.find(before, module, module, pattern.RENAMED)]


@lru_cache(maxsize=1000)
def _read(path: Path, modified: int) -> tuple[str, ast.Module]:
    source = path.read_text(encoding="utf-8")
    return source, ast.parse(source)


def read(path: Path) -> tuple[str, ast.Module]:
    """(Text, syntax tree) of a file, read once while it does not change."""
    return _read(path, path.stat().st_mtime_ns)
