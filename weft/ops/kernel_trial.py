"""Triton kernels are compared with torch's operations on the run's device before a run uses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch


def try_kernels(work: str, device: torch.device, worst: Callable[[], float]) -> bool:
    """Whether kernels run on this device and equal torch's operations; warns if they do not. Without Triton: False.

    work: what computes without them, such as "the head computes". worst: the largest difference, in units of what
    rounding allows.
    """
    if find_spec("triton") is None:
        return False
    try:
        difference = worst()
        failure = "" if difference <= 1.0 else f"they differ by {difference:.3g} of what rounding allows"
    except Exception as error:  # from a compiler, a driver, or a kernel that this device lacks
        failure = f"they do not run ({type(error).__name__}: {error})"
    if failure:
        warnings.warn(f"{work} without its Triton kernels on {device}: {failure}", stacklevel=3)
    return not failure
