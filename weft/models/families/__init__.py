"""Architectures that need more than the general rules: one small file each, looked up by model_type."""

from __future__ import annotations

from collections.abc import Mapping

from weft.models.families import alibi, llama4, phimoe, positions_only, state_mixers
from weft.models.families.family import Family
from weft.models.families.state_mixers import carries_state
from weft.ops.attention import ADAPTERS

__all__ = ["FAMILIES", "Family", "carries_state", "family_of"]

FAMILIES: Mapping[str, Family] = {**alibi.FAMILIES, **phimoe.FAMILIES, **state_mixers.FAMILIES}
ADAPTERS.update({**llama4.ADAPTERS, **positions_only.ADAPTERS})


def family_of(model_type: str) -> Family:
    """The settings of this architecture; the defaults for most."""
    return FAMILIES.get(model_type, Family())
