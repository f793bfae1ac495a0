"""Typed, strict configs. Imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.config.load import load_config
    from weft.config.mesh import MeshSizes, check_reshard, resolve_mesh, shrink_mesh
    from weft.config.render import to_dict, to_yaml
    from weft.config.run_schema import RunConfig
    from weft.config.schema import (
        CheckpointConfig,
        DataConfig,
        EvalConfig,
        FsdpConfig,
        MeshConfig,
        ModelConfig,
        OptimizerConfig,
        ScheduleConfig,
        SftConfig,
        StepConfig,
        TrainConfig,
    )
    from weft.config.validate import check_config

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "FsdpConfig",
    "MeshConfig",
    "MeshSizes",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "SftConfig",
    "StepConfig",
    "TrainConfig",
    "check_config",
    "check_reshard",
    "load_config",
    "resolve_mesh",
    "shrink_mesh",
    "to_dict",
    "to_yaml",
]

_MODULES = {
    "load": ("load_config",),
    "mesh": ("MeshSizes", "check_reshard", "resolve_mesh", "shrink_mesh"),
    "render": ("to_dict", "to_yaml"),
    "run_schema": ("RunConfig",),
    "schema": (
        "CheckpointConfig",
        "DataConfig",
        "EvalConfig",
        "FsdpConfig",
        "MeshConfig",
        "ModelConfig",
        "OptimizerConfig",
        "ScheduleConfig",
        "SftConfig",
        "StepConfig",
        "TrainConfig",
    ),
    "validate": ("check_config",),
}


def __getattr__(name: str) -> object:
    """Import public names when they are first used: processes that run reward functions need none of them."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"weft.config.{module}"), name)
    raise AttributeError(f"module 'weft.config' has no attribute {name!r}")
