"""Architectures that need more than the general rules: one small file each, looked up by model_type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from weft.models.families import llama4, own_attention, phimoe, positions_only, state_mixers
from weft.models.families.family import Family
from weft.models.families.own_attention import OWN_ATTENTION
from weft.models.families.state_mixers import carries_state
from weft.ops.attention import ADAPTERS

__all__ = ["FAMILIES", "OWN_ATTENTION", "Family", "carries_state", "family_of", "with_family"]

FAMILIES: Mapping[str, Family] = {**own_attention.FAMILIES, **phimoe.FAMILIES, **state_mixers.FAMILIES}
ADAPTERS.update({**llama4.ADAPTERS, **positions_only.ADAPTERS})
_tried_families: dict[str, Family] = {}  # set by the checks at the start of this process


def family_of(model_type: str) -> Family:
    """The settings of this architecture; the defaults for most."""
    return FAMILIES.get(model_type) or _tried_families.get(model_type, Family())


@contextmanager
def with_family(model_type: str, family: Family) -> Iterator[None]:
    """A context in which `family` is the setting of an architecture without a file here. It stays so afterwards, unless
    an exception is raised."""
    _tried_families[model_type] = family
    try:
        yield
    except BaseException:
        del _tried_families[model_type]
        raise
