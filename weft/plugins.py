"""Names that installed packages give to their engines, environments, rewards and algorithms, as entry points."""

from __future__ import annotations

import functools
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from weft.errors import UserError, first_line

# Config key -> the group of entry points whose names it may have.
GROUPS = {
    "rollout.engine": "weft.engines",
    "rl.environment": "weft.environments",
    "rl.reward": "weft.rewards",
    "rl.algorithm": "weft.algorithms",
}


@functools.cache
def plugins(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, by name. Nothing of the packages is imported."""
    return tuple(sorted(entry_points(group=group), key=lambda entry: entry.name))


def plugin(name: str, key: str, built_in: tuple[str, ...] = ()) -> EntryPoint | None:
    """The entry point of this name for a config key, or None. UserError if two packages register it. built_in: names
    that always mean weft's built-in objects (`shadowed`)."""
    entries = [entry for entry in plugins(GROUPS[key]) if entry.name == name and name not in built_in]
    if len({(package_of(entry), entry.value) for entry in entries}) > 1:
        givers = (f"{package_of(e)} ({e.value})" for e in entries)
        raise UserError(
            f"{key}: {' and '.join(givers)} both register the name {name} ({GROUPS[key]}): uninstall one of the "
            "packages, or write the import path."
        )
    return entries[0] if entries else None


def shadowed(key: str, names: Collection[str], built_in: Collection[str]) -> list[str]:
    """A line for each entry point whose name is one of `names` and is also built in: the built-in object is used."""
    return [
        f"{key}: {entry.name} is a built-in name; weft does not use {entry.value} of {package_of(entry)}, which has "
        "the same name."
        for entry in plugins(GROUPS[key])
        if entry.name in names and entry.name in built_in
    ]


def load_plugin(entry: EntryPoint, key: str) -> Any:
    """The object that an entry point names. UserError if it cannot be imported."""
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # whatever the package's modules raise
        raise UserError(
            f"{key}: {entry.name} is {entry.value} of {package_of(entry)}, which cannot be imported: "
            f"{type(error).__name__}: {first_line(error)}. Fix the package, or uninstall it."
        ) from error


def package_of(entry: EntryPoint) -> str:
    """Name and version of the package that registers an entry point."""
    return "an unnamed package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
