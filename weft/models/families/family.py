"""What the general rules do not say of an architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """layout: how documents must be laid out, where it is known not to be `packed`. attention: HuggingFace's
    implementation name where the family does not use the attention interface."""

    layout: Literal["packed", "apart"] = "packed"
    attention: str | None = None
