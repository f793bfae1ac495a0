"""Typed, strict configs. Imports no torch."""

from __future__ import annotations

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
