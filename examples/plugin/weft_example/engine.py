"""An engine: weft's own in a process of its own, which counts what it is asked. rollout.engine=counting"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.inference.base import Completion, Request
from weft.inference.standalone import Standalone


class CountingEngine(Standalone):
    """Replace `receive`, `generate`, `advance`, `end` and `sleep` to generate by other means."""

    asked = 0

    def generate(
        self, requests: Sequence[Request], proceed: Callable[[], bool] | None = None
    ) -> list[list[Completion]]:
        self.asked += len(requests)
        return super().generate(requests, proceed)
