"""The engine configs of frozen models in `weft dpo` and `weft distill`: the reference, and teachers."""

from __future__ import annotations

from dataclasses import replace

from weft.config.distill_schema import DistillConfig, is_opened
from weft.config.dpo_schema import DpoConfig, own_reference
from weft.engine.config import EngineConfig
from weft.engine.frozen import FrozenAtPath, frozen_config


def preference_reference(config: DpoConfig, trained: EngineConfig) -> EngineConfig | None:
    """The engine config of the reference of preferences. None without a reference, or if the reference is the trained
    model without its adapters. trained: of the trained model."""
    if not own_reference(config):
        return None
    frozen = frozen_config(trained, config.reference)
    adapted = config.lora.path is not None and config.reference.path is None
    return replace(frozen, lora=trained.lora) if adapted else frozen


def closes_reference(config: DpoConfig) -> bool:
    """Whether the reference is closed before the first step, because the cache on disk contains all its results."""
    return config.preference.cache == "disk" and "kto" not in config.preference.losses


def teacher_paths(config: DistillConfig) -> list[str]:
    """The models that weft opens in addition to the student, in order."""
    return [teacher for teacher in config.distill.named if is_opened(teacher)]


def frozen_teacher_config(config: DistillConfig, path: str, student: EngineConfig) -> EngineConfig:
    """The engine config of a teacher. student: the engine config of the trained model."""
    return frozen_config(student, FrozenAtPath.from_config(path, config.teacher))
