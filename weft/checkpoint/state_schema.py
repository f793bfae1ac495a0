"""The schema of state.json. A checkpoint with a missing or mistyped part is damaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

from weft.config.coerce import MismatchError, coerce, describe
from weft.config.schema import ScheduleConfig
from weft.config.yaml12 import Node
from weft.launch.summary import RunSummary


@dataclass(frozen=True)
class _TensorSchema:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _NumberSchema:
    value: bool | int | float
    dtype: str | None
    host: bool


@dataclass(frozen=True)
class _LossScaleSchema:
    scale: float
    good: int
    overflows: int


@dataclass(frozen=True)
class _DataSchema:
    documents: int
    digest: str


@dataclass(frozen=True)
class _ModelSchema:
    sha256: str


@dataclass(frozen=True)
class _BestSchema:
    kept: bool
    metric: str
    of: str
    value: float | None
    step: int
    mark: float | None
    waited: int
    exact: float


def _summary() -> dict[str, Any]:
    """The types of RunSummary.counts, whose lists and deques are lists in JSON."""
    hints = {name: hint for name, hint in get_type_hints(RunSummary).items() if name not in ("model", "data")}
    numbers = tuple[float | None, ...]
    return {f"summary.{n}": numbers if get_origin(hint) in (list, deque) else hint for n, hint in hints.items()}


# The part of an engine: its tensors and scalars, and which box of which tensor is in which rank's file.
ENGINE: dict[str, Any] = {
    "id": str, "step": int, "mesh": dict[str, int], "mesh.world": int, "versions": dict[str, str | None],
    "tensors": dict[str, _TensorSchema], "scalars": dict[str, _NumberSchema], "loss_scale": _LossScaleSchema | None,
    "files": tuple[dict[str, Any], ...],
}  # fmt: skip
# The part of a run, in the state.json of its first engine. A name with a question mark may be missing, or empty.
RUN: dict[str, Any] = {
    "steps": int, "updates": int, "bad_in_a_row": int, "config": dict[str, dict[str, Any]],
    "config.schedule": ScheduleConfig, "config.optimizer.lr": float, "data": _DataSchema, "model": _ModelSchema,
    "seconds": dict[str, float], **_summary(), "evaluation?": _BestSchema,
}  # fmt: skip
RL_RUN: dict[str, Any] = {**RUN, "rollout": int, "taken": int, "empty_in_a_row": int, "replayed": bool}

_FROM_ONE = ("steps", "mesh.world")


def find_problem(content: Mapping[str, Any], parts: Mapping[str, Any]) -> str | None:
    """The first missing or mistyped part, in words; None if there is none. parts: dotted name -> type."""
    for name, hint in parts.items():
        value: Any = content
        for key in name.removesuffix("?").split("."):
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
        if name.endswith("?") and value in (_MISSING, {}):
            continue
        if value is _MISSING:
            return f"it lacks {name}"
        if hint is int and type(value) is int and value < (name in _FROM_ONE):
            return f"{name} is {value}"
        try:
            coerce(Node(value, name), hint)
        except MismatchError as error:
            return f"{name.removesuffix('?')} must be {describe(hint)}{': ' * bool(str(error))}{error}"
    return None


_MISSING = object()
