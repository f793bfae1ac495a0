"""A game of Gymnasium's API, without its package, and games that cannot be played. No torch: processes import this."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


class HigherLower:
    """A number from 0 to 9, by its seed. Every hint gives 0.1, and the number 1."""

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.secret, self.limit, self.steps = seed % 10, (options or {}).get("limit", 5), 0
        return "Guess a number from 0 to 9.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if action == "crash":
            os._exit(3)
        guess = int(action)
        if guess == self.secret:
            return "right", 1.0, True, False, {}
        return "higher" if guess < self.secret else "lower", 0.1, False, self.steps >= self.limit, {}


class Numbered(HigherLower):
    """The same with the actions of a Discrete space."""

    action_space = SimpleNamespace(n=10, start=0)

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        assert type(action) is int
        return super().step(str(action))


class Arrays(HigherLower):
    """Its observations are no texts."""

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return [0.0, 1.0], {}


class Endless(HigherLower):
    """Takes anything for a guess, and hints."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "higher", 0.1, False, False, {}
