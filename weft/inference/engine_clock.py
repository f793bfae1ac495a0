"""The shares of wall-clock in which rollout engines generate and wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class EngineClock:
    """The shares of all engines' time since the last `take`.

    An engine generates while it has requests. It waits for weights during a sync, while trainers must train before the
    next rollout step (cluster.max_staleness), and during its restart. Otherwise it waits for prompts: for the slowest
    samples on other engines, for environments, agents or rewards.
    """

    def __init__(self, engines: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        """engines: the engines that have weights from the start, or receive them with the first sync."""
        self._clock, self._at = clock, clock()
        self._ready = dict.fromkeys(range(engines), True)  # engine -> whether it has weights
        self._requests = Counter[int]()  # engine -> requests
        self._rollouts = self._pauses = 0
        self._seconds = {"generate": 0.0, "weights": 0.0, "prompts": 0.0}

    def ready(self, engine: int) -> None:
        """The engine has weights."""
        self._advance()
        self._ready[engine] = True

    def lost(self, engine: int, *, gone: bool = False) -> None:
        """The engine has failed. gone: it does not count until it is ready again."""
        self._advance()
        self._ready[engine] = False
        if gone:
            del self._ready[engine]

    @contextmanager
    def generating(self, engine: int) -> Iterator[None]:
        """Inside, the engine has a request, or several."""
        self._advance()
        self._requests[engine] += 1
        try:
            yield
        finally:
            self._advance()
            self._requests[engine] -= 1

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Inside, samples are generated, or rewarded."""
        self._advance()
        self._rollouts += 1
        try:
            yield
        finally:
            self._advance()
            self._rollouts -= 1

    def pause(self, change: int) -> None:
        """Requests are paused for a sync (change 1), or continue after it (-1)."""
        self._advance()
        self._pauses += change

    def take(self) -> dict[str, float]:
        """Metric -> share; they add up to 1. Empty without engines."""
        self._advance()
        total = sum(self._seconds.values())
        shares = {f"engine_time/{name}": seconds / total for name, seconds in self._seconds.items()} if total else {}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return shares

    def _advance(self) -> None:
        now = self._clock()
        elapsed, self._at = now - self._at, now
        for engine, is_ready in self._ready.items():
            if self._pauses or not is_ready:
                state = "weights"
            elif self._requests[engine] > 0:
                state = "generate"
            else:
                state = "prompts" if self._rollouts else "weights"
            self._seconds[state] += elapsed
