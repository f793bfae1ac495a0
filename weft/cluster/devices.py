"""Accelerators that a dry run can assume where there is none. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import UserError

_GIB = 1 << 30


@dataclass(frozen=True)
class Accelerator:
    """memory: bytes that torch reports for it, to within a few percent: makers state more than a process can have."""

    name: str
    memory: int


ACCELERATORS = {
    name: Accelerator(name, int(gib * _GIB))
    for name, gib in {
        "t4-16gb": 14.6, "a10g-24gb": 22.0, "l4-24gb": 22.0, "rtx3090-24gb": 23.6, "rtx4090-24gb": 23.5,
        "rtx5090-32gb": 31.4, "v100-32gb": 31.7, "a100-40gb": 39.4, "l40s-48gb": 44.4, "a100-80gb": 79.1,
        "h100-80gb": 79.1, "gh200-96gb": 94.5, "h200-141gb": 139.8, "b200-192gb": 178.4, "mi300x-192gb": 191.5,
    }.items()
}  # fmt: skip


def accelerator(name: str | None) -> Accelerator | None:
    """Of that name, or None for None; UserError, naming all, where there is none."""
    if name is None:
        return None
    if name not in ACCELERATORS:
        raise UserError(f"--assume {name}: weft knows {', '.join(ACCELERATORS)}.")
    return ACCELERATORS[name]
