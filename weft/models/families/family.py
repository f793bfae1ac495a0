"""The settings in which an architecture may deviate from the general rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.ops.attention_call import BOUNDS_ARGUMENT

Layout = Literal["packed", "padded"]  # documents end to end in one row, or right-padded in a batch


@dataclass(frozen=True)
class Family:
    """layout: `padded` if packed documents are known to be wrong. attention: attn_implementation of a family that does
    not use the attention interface. bounds_argument: name of the forward argument that passes sequence boundaries from
    the base model to its layers. kept_noise: keys of its config that look like noise but are not. in_inference_mode:
    classes of modules that are never in training mode."""

    layout: Layout = "packed"
    attention: str | None = None
    bounds_argument: str = BOUNDS_ARGUMENT
    kept_noise: tuple[str, ...] = ()
    in_inference_mode: tuple[str, ...] = ()
