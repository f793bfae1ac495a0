"""The budget of restarts of a run's processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from weft.errors import ActorError, first_line
from weft.terminal import say


class RestartBudget:
    """Counts restarts of engines, or of the ranks of frozen models, and prints messages.

    limit: restarts within `window` seconds of one engine, or of all ranks of one model. key: of the config, which sets
    the limit. show: prints a line.
    """

    def __init__(self, limit: int, window: float, key: str, show: Callable[[str], None] = say) -> None:
        self.limit, self.window, self.key, self.show = limit, window, key, show
        self._restarts: dict[tuple[str, int | None], deque[float]] = {}
        self._count = 0
        self.engines: int | None = None  # number of present engines, if they join and leave

    def spend(self, name: str, number: int | None, error: ActorError) -> None:
        """Count a restart after this error: of process `number` in the group `name`, or of the whole group if number is
        None. ActorError, which names the error, if the budget is used up."""
        now, earlier = time.monotonic(), self._restarts.setdefault((name, number), deque())
        while earlier and now - earlier[0] > self.window:
            earlier.popleft()
        if len(earlier) >= self.limit:
            failed = f"{name}s have failed" if number is None else f"{name} {number} has failed"
            raise self.exhausted(f"{failed} {len(earlier) + 1} times", error)
        earlier.append(now)
        self._count += 1
        restarted = f"{name}s are started again" if number is None else f"{name} {number} is replaced"
        self.show(
            f"restart  {restarted}, restart {len(earlier)} of {self.limit} within {self.window:g} s ({self.key}): "
            f"{first_line(error)}"
        )

    def exhausted(self, reason: str, error: ActorError) -> ActorError:
        """The error that ends a run whose processes keep failing. error: the last one."""
        text = f"{reason} within {self.window:g} s, and {self.key} is {self.limit}. The last error:\n{error}"
        return ActorError(text, error.kind, error.report)

    def metrics(self) -> dict[str, float]:
        """`rollout/engine_restarts` of a budget of engines: since the last call; and `rollout/engines`, if their number
        changes. Empty if they are never replaced."""
        count, self._count = self._count, 0
        numbers = {} if self.engines is None else {"rollout/engines": float(self.engines)}
        return {"rollout/engine_restarts": float(count), **numbers} if self.limit else {}
