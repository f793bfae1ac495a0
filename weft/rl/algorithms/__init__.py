"""The algorithms of `weft rl`. Each file declares one (base.py) in DECLARES; nothing else lists them.

Installed packages add others: an entry point of the group weft.algorithms names such a tuple (weft/plugins.py).

The config, the engine's losses, `weft verify` and docs/reference/algorithms.md read the three tables below. Imports
neither torch nor numpy, and nothing of weft's other folders.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TypeVar

from weft.errors import UserError
from weft.plugins import GROUPS, load_plugin, plugins
from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec, Spec, TokenLossSpec

__all__ = ["ADVANTAGES", "ALGORITHMS", "TOKEN_LOSSES", "needs_critic"]

_HELPERS = ("base", "plain", "returns", "tables")
T = TypeVar("T", AdvantageSpec, TokenLossSpec, AlgorithmSpec)


def _read_declarations() -> list[Spec]:
    """All declarations, file by file, in the order of the algorithms' papers."""
    names = [info.name for info in pkgutil.iter_modules(__path__) if info.name not in _HELPERS]
    files: list[tuple[Spec, ...]] = [importlib.import_module(f"{__name__}.{name}").DECLARES for name in names]
    for entry in plugins(GROUPS["rl.algorithm"]):
        declared = load_plugin(entry, "rl.algorithm")
        if not (isinstance(declared, tuple) and all(isinstance(spec, Spec) for spec in declared)):
            raise UserError(f"rl.algorithm: {entry.value} is no tuple of what weft.rl.algorithms.base declares.")
        if entry.name not in {spec.name for spec in declared if isinstance(spec, AlgorithmSpec)}:
            raise UserError(f"rl.algorithm: {entry.value} declares no algorithm of the name {entry.name}.")
        files.append(declared)
    files.sort(key=lambda specs: next(spec.paper for spec in specs if isinstance(spec, AlgorithmSpec)))
    return [spec for specs in files for spec in specs]


def _by_name(kind: type[T]) -> dict[str, T]:
    specs = [spec for spec in _DECLARED if isinstance(spec, kind)]
    table = {spec.name: spec for spec in specs}
    if len(table) < len(specs):
        repeated = next(spec.name for spec in specs if sum(spec.name == other.name for other in specs) > 1)
        raise UserError(
            f"rl.algorithm: {repeated} is declared twice, by packages or by one and weft (weft.algorithms): uninstall "
            "one of the packages."
        )
    return table


_DECLARED = _read_declarations()
ALGORITHMS = _by_name(AlgorithmSpec)  # the values of rl.algorithm
ADVANTAGES = _by_name(AdvantageSpec)  # the values of rl.advantage, beside import paths
TOKEN_LOSSES = _by_name(TokenLossSpec)  # the values of rl.policy_loss, beside import paths


def needs_critic(advantage: str) -> bool:
    """Whether this value of rl.advantage reads a critic's values. An import path does not."""
    return advantage in ADVANTAGES and ADVANTAGES[advantage].needs_critic
