"""The few architectures that the general rules do not cover: one small file each, found by model_type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """layout: how documents must be laid out, where it is known not to be `packed`. attention: HuggingFace's
    implementation name where the family does not use the attention interface."""

    layout: Literal["packed", "apart"] = "packed"
    attention: str | None = None


_REGISTRY: dict[str, Family] = {}


def register(model_type: str, family: Family) -> None:
    """Called once by each file of this folder."""
    assert model_type not in _REGISTRY, model_type
    _REGISTRY[model_type] = family


def family_of(model_type: str) -> Family:
    """What is special about this architecture; nothing for most."""
    from weft.models.families import alibi, llama4, positions_only, state_mixers  # noqa: F401  (they register themselves)

    return _REGISTRY.get(model_type, Family())
