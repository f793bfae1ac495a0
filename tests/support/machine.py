"""How busy the machine is, for tests that bound how long a user waits."""

from __future__ import annotations

import os


def business() -> float:
    """Processes that want a core, for each core there is (1 or more). Bounds are multiplied by it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
