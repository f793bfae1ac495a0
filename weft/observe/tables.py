"""stub"""
from __future__ import annotations
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class OptimizerGroupRow:
    """Parameters that the optimizer treats alike. elements: over all ranks. examples: names, layer numbers as `*`."""

    name: str
    weight_decay: float
    parameters: int
    elements: int
    examples: tuple[str, ...]
