"""Callbacks and objects that a program passes to a run, and that a config cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.engine.losses.base import Loss

OnStep = Callable[[Mapping[str, object]], object]


@dataclass(frozen=True)
class Hooks:
    """For `weft sft`. objective: replaces train.loss. on_step: called on every rank after each step, with its line
    of metrics.jsonl."""

    objective: Loss | None = None
    on_step: OnStep | None = None


NO_HOOKS = Hooks()


@dataclass(frozen=True)
class RlHooks:
    """For `weft rl`. rewards: name in rl.reward -> pickled function, for functions that cannot be imported. on_step:
    called in the controller after each optimizer step, with its line of metrics.jsonl."""

    rewards: Mapping[str, bytes] = field(default_factory=dict)
    on_step: OnStep | None = None


NO_RL_HOOKS = RlHooks()
