"""The best evaluation of a run, and how many evaluations have passed without an improvement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.schema import EvalConfig


@dataclass
class BestEvaluation:
    """The lowest value of eval.metric so far.

    digest: of the evaluation data. value, step: of the best evaluation; step is 0 if there is none. mark: the value
    that patience compares with; it is replaced by a value lower by more than min_delta, so that small improvements add
    up. waited: evaluations since the mark was set. exact: eval/exact of the last evaluation.
    """

    config: EvalConfig
    digest: str = ""
    value: float | None = None
    step: int = 0
    mark: float | None = None
    waited: int = 0
    exact: float = 0.0

    def update(self, step: int, figures: Mapping[str, float | None]) -> bool:
        """Records the evaluation of a step. Returns whether it is the best so far. A non-finite value is no
        improvement. Step 0 is a baseline for later steps but never the best, because nothing is saved there."""
        self.exact = figures.get("eval/exact") or 0.0
        value = figures.get(self.config.metric)
        if value is None or not math.isfinite(value):
            self.waited += 1
            return False
        if self.mark is None or value < self.mark - self.config.min_delta:
            self.mark, self.waited = value, 0
        else:
            self.waited += 1
        if not step or (self.value is not None and value >= self.value):
            return False
        self.value, self.step = value, step
        return True

    @property
    def ends(self) -> str | None:
        """The key that ends the run: eval.target if it is reached, eval.patience if it is exhausted; else None."""
        if self.config.target is not None and self.exact >= self.config.target:
            return "eval.target"
        exhausted = self.config.patience is not None and self.waited >= self.config.patience
        return "eval.patience" if exhausted else None

    def state(self, saved: bool) -> dict[str, Any]:
        """The state for a checkpoint, as `restore` takes it. saved: whether the best checkpoint is saved."""
        return {
            "kept": saved,
            "metric": self.config.metric,
            "of": self.digest,
            "value": self.value,
            "step": self.step,
            "mark": self.mark,
            "waited": self.waited,
            "exact": self.exact,
        }

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Restores a checkpoint's state, unless its documents or its metric are different ones. Returns messages for
        the user."""
        if not state:
            return []
        if (state["metric"], state["of"]) != (self.config.metric, self.digest):
            return ["eval     other held-out documents, or another eval.metric, than before: its best is forgotten"]
        self.value, self.step, self.mark, self.waited = (state[name] for name in ("value", "step", "mark", "waited"))
        self.exact = state["exact"]
        return []
