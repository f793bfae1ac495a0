"""A draft of a config: what was taken over from another trainer's, and what was not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.config.checks import BUILT_IN
from weft.config.coerce import MismatchError, coerce, describe
from weft.config.compat.names import advice_for, entry_of, weft_value
from weft.config.keys import Key, schema_keys
from weft.config.schema import SftConfig
from weft.config.yaml12 import Node, read_value, show


@dataclass
class Draft:
    """taken: key -> (value, origin, their name). left: their name -> advice. unfit: keys whose value weft cannot take,
    so that no default replaces it."""

    taken: dict[str, tuple[Any, str, str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)

    def value(self, key: str, default: Any = None) -> Any:
        """The value taken for a key."""
        return self.taken[key][0] if key in self.taken else default

    def take(self, key: str, value: Any, name: str, origin: str = "") -> None:
        """Set a key, if the schema has it and the value fits. name: theirs. origin: in words."""
        spec = schema_keys(SftConfig).get(key)
        fitting = None if spec is None else _fitting(spec, value)
        if fitting is None:
            self.left[name] = self._unfit(spec, value, advice_for(name)) if spec else f"weft has no {key}."
            self.unfit.add(key)
        else:
            self.taken[key] = (fitting, origin or entry_of(name) or name, name)

    @staticmethod
    def _unfit(spec: Key, value: Any, advice: str | None) -> str:
        text = f"{show(value)} is no value of {spec.name}"
        return f"{text}: {advice}" if spec.type is str and advice else f"{text}, which is {describe(spec.type)}."

    def drop(self, key: str, because: str) -> None:
        """Remove a key that was taken, with a reason."""
        _, _, name = self.taken.pop(key)
        if name != key:
            self.left[name] = because


def _fitting(key: Key, value: Any) -> Any:
    """The value as this key takes it, or None where it cannot."""
    ours = weft_value(key.name, value)
    if key.name == "optimizer.name" and ours is None and not _is_optimizer(value):
        return None
    if isinstance(value, str) and "," in value and "tuple" in str(key.type) and not value.startswith("["):
        value = [part.strip() for part in value.split(",")]  # LLaMA-Factory's lists
    for candidate in (None if ours is None else read_value(ours, "").value, value, *numbers_of(value)):
        try:
            if candidate is not None:
                coerce(Node(candidate, ""), key.type)
                return candidate
        except MismatchError:
            continue
    return None


def _is_optimizer(value: Any) -> bool:
    return value in BUILT_IN or (isinstance(value, str) and bool(re.fullmatch(r"torch\.optim\.\w+", value)))


def numbers_of(value: Any) -> Iterator[int | float]:
    """The number that YAML 1.1, an argument parser or quotes would make of a value: 3.0 as 3, "2e-5", 1_000."""
    try:
        number = float(value.replace("_", "") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return
    if isinstance(value, bool) or not math.isfinite(number):
        return
    if number.is_integer():
        yield int(number)
    yield number
