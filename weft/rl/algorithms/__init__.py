"""The algorithms of `weft rl`. Each file declares one (base.py) in DECLARES; nothing else lists them.

The config, the engine's losses, `weft verify` and docs/reference/algorithms.md read the three tables below. Imports
neither torch nor numpy, and nothing of weft's other folders.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TypeVar

from weft.rl.algorithms.base import AdvantageSpec, AlgorithmSpec, Spec, TokenLossSpec

__all__ = ["ADVANTAGES", "ALGORITHMS", "TOKEN_LOSSES", "needs_critic"]

_HELPERS = ("base", "plain", "returns", "tables")
T = TypeVar("T", AdvantageSpec, TokenLossSpec, AlgorithmSpec)


def _read_declarations() -> list[Spec]:
    """All declarations, file by file, in the order of the algorithms' papers."""
    names = [info.name for info in pkgutil.iter_modules(__path__) if info.name not in _HELPERS]
    files: list[tuple[Spec, ...]] = [importlib.import_module(f"{__name__}.{name}").DECLARES for name in names]
    files.sort(key=lambda specs: next(spec.paper for spec in specs if isinstance(spec, AlgorithmSpec)))
    return [spec for specs in files for spec in specs]


def _by_name(kind: type[T]) -> dict[str, T]:
    specs = [spec for spec in _DECLARED if isinstance(spec, kind)]
    table = {spec.name: spec for spec in specs}
    assert len(table) == len(specs), f"two declarations of {kind.__name__} have the same name"
    return table


_DECLARED = _read_declarations()
ALGORITHMS = _by_name(AlgorithmSpec)  # the values of rl.algorithm
ADVANTAGES = _by_name(AdvantageSpec)  # the values of rl.advantage, beside import paths
TOKEN_LOSSES = _by_name(TokenLossSpec)  # the values of rl.policy_loss, beside import paths


def needs_critic(advantage: str) -> bool:
    """Whether this value of rl.advantage reads a critic's values. An import path does not."""
    return advantage in ADVANTAGES and ADVANTAGES[advantage].needs_critic
