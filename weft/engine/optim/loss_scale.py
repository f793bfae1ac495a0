"""Dynamic loss scaling for fp16: keeps small gradients from underflow (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 1.0


@dataclass
class LossScale:
    """The factor on the next step's loss. It halves after an overflow, and doubles after `interval` finite steps.

    The scale is a power of two, so that scaling is exact. good: finite steps since the last change. overflows: steps
    skipped so far.
    """

    scale: float
    interval: int
    good: int = 0
    overflows: int = 0

    def overflow(self) -> bool:
        """Record a non-finite gradient; True if the scale was halved, False at the smallest scale."""
        if self.scale <= SMALLEST:
            return False
        self.scale, self.good = self.scale / 2, 0
        self.overflows += 1
        return True

    def succeed(self) -> None:
        """Record a step with finite gradients."""
        self.good += 1
        if self.good >= self.interval:
            self.scale, self.good = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for a checkpoint."""
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore state_dict(). `interval` keeps its value from the config."""
        self.scale, self.good, self.overflows = float(state["scale"]), int(state["good"]), int(state["overflows"])
