"""The exceptions that an architecture can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """layout: the layout of documents, where `packed` is known to be wrong. attention: HuggingFace's implementation
    name, where the family does not use the attention interface."""

    layout: Literal["packed", "padded"] = "packed"
    attention: str | None = None
