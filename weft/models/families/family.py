"""The exceptions that an architecture can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.ops.attention_call import BOUNDS_ARGUMENT


@dataclass(frozen=True)
class Family:
    """layout: the layout of documents, where `packed` is known to be wrong. attention: HuggingFace's implementation
    name, where the family does not use the attention interface. bounds_argument: the forward argument that bounds
    travel as, from the base model to its layers."""

    layout: Literal["packed", "padded"] = "packed"
    attention: str | None = None
    bounds_argument: str = BOUNDS_ARGUMENT
