"""Frozen models on separate ranks, in the commands that share the loop of `weft sft`: reference.ranks of `weft dpo`,
teacher.ranks of `weft distill`. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.schema import FrozenRanksConfig

_IN_TURNS = {"ranks": None, "dp_replicate": None, "dp_shard": None, "tp": None, "pp": None}


def frozen_section(config: Any) -> tuple[str, FrozenRanksConfig] | None:
    """(Name of the config section, the section) of a model with separate ranks; None if there is none."""
    section: tuple[str, FrozenRanksConfig] | None = None
    if isinstance(config, DpoConfig):
        section = "reference", config.reference
    if isinstance(config, DistillConfig):
        section = "teacher", config.teacher
    return section if section is not None and section[1].ranks is not None else None


def frozen_ranks(config: Any) -> int:
    """The number of the run's ranks that have only a frozen model."""
    section = frozen_section(config)
    return 0 if section is None else section[1].ranks or 0


def in_turns(config: Any) -> tuple[Any, list[str]]:
    """(The config in which the frozen model alternates with the trained model on the same ranks and mesh; a line that
    reports this change, or no line)."""
    section = frozen_section(config)
    if section is None:
        return config, []
    name, keys = section
    line = f"ranks    the {name} alternates with the trained model here; {name}.ranks={keys.ranks} is not applied"
    return replace(config, **{name: replace(keys, **_IN_TURNS)}), [line]
