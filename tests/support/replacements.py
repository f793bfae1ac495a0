"""Finds what tests have replaced in packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from unittest.mock import NonCallableMock

_FOR_GOOD = {"weft.engine.selfcheck.architecture.compute_result"}  # by shared_results.py


def replacements(*packages: str) -> Iterator[str]:
    """Functions, classes and mocks of tests among the attributes of the packages' modules and classes."""
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(tuple(f"{package}." for package in packages)):
            continue
        for holder in (module, *(item for item in vars(module).values() if _defined_in(item) == name)):
            for key, item in list(vars(holder).items()) if isinstance(holder, (type, ModuleType)) else ():
                if isinstance(item, NonCallableMock) or str(_defined_in(item)).startswith("tests."):
                    path = f"{name}.{getattr(holder, '__qualname__', '')}.{key}".replace("..", ".")
                    if path not in _FOR_GOOD:
                        yield path


def _defined_in(item: object) -> object:
    return getattr(item, "__module__", None) if isinstance(item, (type, FunctionType)) else None
