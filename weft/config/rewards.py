"""What reward functions are called. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

BUILT_IN_REWARDS = ("math", "exact_match", "regex", "format", "length")
NEEDS_MATH_VERIFY = "rl.reward: math needs math-verify: pip install 'math-verify>=0.8' (or weft[rl])"


def reward_names(paths: Sequence[str]) -> list[str]:
    """Of rl.reward, in metrics and other keys: the function's name; the whole path where two have it."""
    short = [re.split(r"[.:]", path)[-1] for path in paths]
    return [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]
