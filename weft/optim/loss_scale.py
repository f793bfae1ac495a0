"""Dynamic loss scaling for fp16, whose smallest gradients would vanish (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 1.0


@dataclass
class LossScale:
    """The factor on the loss of the next step: halved when a gradient overflows, doubled after `interval` good steps.

    A power of two, so that scaling changes no digit. good: steps since it changed. overflows: steps skipped so far.
    """

    scale: float
    interval: int
    good: int = 0
    overflows: int = 0

    def overflow(self) -> bool:
        """Note a gradient that is not finite: True where a smaller scale may help, and it is halved; False at 1."""
        if self.scale <= SMALLEST:
            return False
        self.scale, self.good = self.scale / 2, 0
        self.overflows += 1
        return True

    def succeed(self) -> None:
        """Note a step that was taken."""
        self.good += 1
        if self.good >= self.interval:
            self.scale, self.good = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for a checkpoint."""
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from such numbers; `interval` stays the config's."""
        self.scale, self.good, self.overflows = float(state["scale"]), int(state["good"]), int(state["overflows"])
