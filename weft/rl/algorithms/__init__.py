"""The algorithms of `weft rl`. Each file declares one (base.py) in DECLARES; nothing else lists them.

Installed packages add others: an entry point of the group weft.algorithms names such a tuple (weft/plugins.py). A
package that cannot be used is an error only if a config names its algorithm. Names of weft's own stay weft's.

The config, the engine's losses, `weft verify` and docs/reference/algorithms.md read the tables below. Imports
neither torch nor numpy, and nothing of weft's other folders.
"""

from __future__ import annotations

import importlib
import pkgutil

from weft.errors import UserError
from weft.plugins import GROUPS, load_plugin, package_of, plugin, plugins, shadowed
from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec, Spec, TokenLossSpec

__all__ = ["ADVANTAGES", "ALGORITHMS", "TOKEN_LOSSES", "UNUSABLE", "needs_critic"]

_HELPERS = ("base", "plain", "returns", "tables")
_KEY = "rl.algorithm"


def _built_in() -> list[tuple[Spec, ...]]:
    names = [info.name for info in pkgutil.iter_modules(__path__) if info.name not in _HELPERS]
    return [importlib.import_module(f"{__name__}.{name}").DECLARES for name in names]


def _of_packages(built_in: list[tuple[Spec, ...]]) -> tuple[list[tuple[Spec, ...]], dict[str, str]]:
    """(declarations of packages; name of an algorithm -> why its package cannot be used)."""
    givers = {(type(spec), spec.name): "weft" for specs in built_in for spec in specs}
    algorithms = tuple(name for kind, name in givers if kind is AlgorithmSpec)
    files, unusable = list[tuple[Spec, ...]](), dict[str, str]()
    for entry in {entry.name: entry for entry in plugins(GROUPS[_KEY])}.values():
        if notes := shadowed(_KEY, [entry.name], algorithms):
            unusable[entry.name] = notes[0]
            continue
        try:
            plugin(entry.name, _KEY)
            declared = load_plugin(entry, _KEY)
            giver = f"{entry.value} of {package_of(entry)}"
            if not (isinstance(declared, tuple) and all(isinstance(spec, Spec) for spec in declared)):
                raise UserError(f"{_KEY}: {giver} is not a tuple of objects of weft.rl.algorithms.base.")
            if entry.name not in {spec.name for spec in declared if isinstance(spec, AlgorithmSpec)}:
                raise UserError(f"{_KEY}: {giver} declares no algorithm named {entry.name}.")
            for spec in declared:
                if (other := givers.setdefault((type(spec), spec.name), giver)) != giver:
                    raise UserError(
                        f"{_KEY}: {giver}, for {entry.name}, declares {spec.name}, and so does {other}. Uninstall "
                        "one of the packages."
                    )
        except UserError as error:
            unusable[entry.name] = str(error)
        else:
            files.append(declared)
    return files, unusable


_FILES = _built_in()
_ADDED, UNUSABLE = _of_packages(_FILES)
# File by file, in the order of the algorithms' papers.
_FILES = sorted(
    [*_FILES, *_ADDED], key=lambda specs: next(spec.paper for spec in specs if isinstance(spec, AlgorithmSpec))
)
_DECLARED = [spec for specs in _FILES for spec in specs]
ALGORITHMS = {spec.name: spec for spec in _DECLARED if isinstance(spec, AlgorithmSpec)}  # the values of rl.algorithm
# The values of rl.advantage and of rl.policy_loss, besides import paths.
ADVANTAGES = {spec.name: spec for spec in _DECLARED if isinstance(spec, AdvantageSpec)}
TOKEN_LOSSES = {spec.name: spec for spec in _DECLARED if isinstance(spec, TokenLossSpec)}


def needs_critic(advantage: str) -> bool:
    """Whether this value of rl.advantage reads a critic's values. An import path does not."""
    return advantage in ADVANTAGES and ADVANTAGES[advantage].needs_critic
