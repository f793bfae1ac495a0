"""What a program can give a run, and a config cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.objectives.base import Objective

OnStep = Callable[[Mapping[str, object]], object]


@dataclass(frozen=True)
class Hooks:
    """objective: in place of the one that train.objective names. on_step: called after each step with its line of
    metrics.jsonl, on every rank."""

    objective: Objective | None = None
    on_step: OnStep | None = None


NO_HOOKS = Hooks()


@dataclass(frozen=True)
class RlHooks:
    """rewards: functions that no import path leads to, pickled, by what rl.reward calls them. on_step: called after
    each optimizer step with its line of metrics.jsonl, in the controller."""

    rewards: Mapping[str, bytes] = field(default_factory=dict)
    on_step: OnStep | None = None


NO_RL_HOOKS = RlHooks()
