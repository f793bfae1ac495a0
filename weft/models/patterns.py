"""Patterns that name parameters and modules of a model."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they run nothing themselves


def names_it(pattern: str, name: str) -> bool:
    """Whether `pattern` names this parameter or module, or one that holds it; `*` is any text, dots included."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def outermost(root: nn.Module, pattern: str) -> list[str]:
    """The outermost modules that the pattern names, by glob; of a list that it names, the members."""
    found: list[str] = []
    for name, child in root.named_modules():
        if not name or isinstance(child, CONTAINERS) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        parent = name.rpartition(".")[0]
        listed = isinstance(root.get_submodule(parent), CONTAINERS) and fnmatchcase(parent, pattern)
        if listed or fnmatchcase(name, pattern):
            found.append(name)
    return found


def nearest(pattern: str, names: Iterable[str]) -> str:
    """The end of a message about a pattern that matches none of the names: what may have been meant."""
    parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    close = get_close_matches(pattern, sorted(parts), n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(close)}?" if close else f"; names begin like {min(parts, key=len)}."
