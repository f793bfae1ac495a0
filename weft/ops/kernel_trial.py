"""Decides whether Triton kernels run, and compares them with torch's operations on the run's device before that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from weft.launch.simulated import device_kind, is_simulated


def uses_kernels(x: Tensor, check: Callable[[torch.device, torch.dtype], bool]) -> bool:
    """Whether Triton kernels process this tensor: it is 16-bit, on CUDA, and the kernels passed `check`. Simulations,
    which have no device, use them unchecked."""
    if device_kind(x.device) != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return is_simulated() or check(x.device, x.dtype)


def try_kernels(work: str, device: torch.device, worst: Callable[[], float]) -> bool:
    """Whether kernels run on this device and equal torch's operations. Warns if they do not. False without Triton.

    work: subject and verb of the warning, such as "the head computes". worst: computes the largest difference, as a
    multiple of the tolerance for rounding.
    """
    if find_spec("triton") is None:
        return False
    try:
        difference = worst()
        failure = "" if difference <= 1.0 else f"their results differ by {difference:.3g} times the tolerance"
    except Exception as error:  # of the compiler, the driver, or a kernel that this device does not support
        failure = f"they do not run ({type(error).__name__}: {error})"
    if failure:
        warnings.warn(f"{work} without Triton kernels on {device}: {failure}", stacklevel=3)
    return not failure
