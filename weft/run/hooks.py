"""Callbacks and objects that a program passes to a run and a config cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.objectives.base import Objective

OnStep = Callable[[Mapping[str, object]], object]


@dataclass(frozen=True)
class Hooks:
    """objective: replaces that of train.objective. on_step: called after each step with its line of metrics.jsonl, on
    every rank."""

    objective: Objective | None = None
    on_step: OnStep | None = None


NO_HOOKS = Hooks()


@dataclass(frozen=True)
class RlHooks:
    """rewards: pickled functions without an import path, by their names in rl.reward. on_step: called after each
    optimizer step with its line of metrics.jsonl, in the controller."""

    rewards: Mapping[str, bytes] = field(default_factory=dict)
    on_step: OnStep | None = None


NO_RL_HOOKS = RlHooks()
