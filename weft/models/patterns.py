"""Patterns that name parameters and modules of a model."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

_SHOWN = 6  # beginnings of names, in messages
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward


def matches(pattern: str, name: str) -> bool:
    """Whether the glob matches this name, or the name of a module that contains it; `*` also matches dots."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def outermost(root: nn.Module, pattern: str) -> list[str]:
    """Names of the outermost modules that the glob matches; for a ModuleList, of its members."""
    names: list[str] = []
    for name, child in root.named_modules():
        if not name or isinstance(child, CONTAINERS) or any(name.startswith(f"{outer}.") for outer in names):
            continue
        parent = name.rpartition(".")[0]
        listed = isinstance(root.get_submodule(parent), CONTAINERS) and fnmatchcase(parent, pattern)
        if listed or fnmatchcase(name, pattern):
            names.append(name)
    return names


def similar_names(pattern: str, names: Iterable[str]) -> str:
    """The end of an error message about a pattern without a match: similar names, or the beginnings of names."""
    names = list(names)
    parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    close = get_close_matches(pattern, sorted(parts), n=2, cutoff=0.7)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; names begin with {', '.join(list(dict.fromkeys(map(_beginning, names)))[:_SHOWN])}."


def _beginning(name: str) -> str:
    """`model.layers` of model.layers.0.mlp.weight, `lm_head` of lm_head.weight."""
    parts = name.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: max(1, numbered)])
