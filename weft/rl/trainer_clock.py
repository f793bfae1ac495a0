"""The shares of wall-clock in which the trainers of `weft rl` work and wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.launch.summary import Phases


class TrainerClock:
    """The shares of the trainers' time since the last `take`, by the phases of the controller's loop."""

    def __init__(self, phases: Phases, clock: Callable[[], float] = time.perf_counter) -> None:
        self._phases, self._clock = phases, clock
        self._began, self._before = clock(), dict(phases.seconds)

    def take(self) -> dict[str, float]:
        """Metric -> share: waiting for samples, training, weight sync, and the rest (evaluation, saving). They add up
        to 1."""
        now, seconds = self._clock(), dict(self._phases.seconds)
        wall = max(now - self._began, 1e-9)
        shares = {
            f"trainer_time/{name}": (seconds.get(phase, 0.0) - self._before.get(phase, 0.0)) / wall
            for name, phase in (("samples", "rollout"), ("train", "train"), ("sync", "sync"))
        }
        shares["trainer_time/other"] = max(0.0, 1.0 - sum(shares.values()))
        self._began, self._before = now, seconds
        return shares
