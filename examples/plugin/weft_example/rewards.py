"""A reward: 1 for an empty answer, and less the longer it is. rl.reward=[short]"""

from __future__ import annotations

from typing import Any


def short(completions: list[str], **_: Any) -> list[float]:
    return [1.0 / (1.0 + len(text)) for text in completions]
