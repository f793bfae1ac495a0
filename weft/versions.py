"""Differences between versions of torch, found by feature and never by number; no other file looks for them.

models/hf.py does the same for transformers' internals. Importing this imports no torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# (oldest, newest) that the suite has passed with: docs/reference/versions.md.
TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 11), (2, 15)),
    "transformers": ((5, 17), (5, 23)),
}


def untested_versions() -> list[str]:
    """A sentence for each library that is installed in a version that weft was not tested with."""
    sentences = []
    for name, (oldest, newest) in TESTED.items():
        installed = installed_version(name)
        numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
        if numbers and not oldest <= numbers <= newest:
            word = "newer" if numbers > newest else "older"
            tested = f"{_dotted(oldest)} to {_dotted(newest)}"
            sentences.append(f"{name} {installed} is {word} than weft was tested with: {tested}")
    return sentences


@cache  # importlib.metadata parses the package's whole description each time
def installed_version(package: str) -> str:
    """The version in a package's metadata; "" if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def launch_config(*, shutdown_timeout: float, **options: Any) -> Any:
    """torch's LaunchConfig. shutdown_timeout: seconds between SIGTERM and SIGKILL of ranks; torch 2.11 waits 30."""
    from torch.distributed.launcher.api import LaunchConfig

    if any(field.name == "shutdown_timeout" for field in fields(LaunchConfig)):
        options["shutdown_timeout"] = shutdown_timeout
    return LaunchConfig(**options)


def all_gather_single(output: Tensor, input: Tensor, **options: Any) -> Any:
    """torch.distributed.all_gather_single, the name from 2.13 on; the older name warns there at every call."""
    return _collective("all_gather_single", "all_gather_into_tensor")(output, input, **options)


def reduce_scatter_single(output: Tensor, input: Tensor, **options: Any) -> Any:
    """torch.distributed.reduce_scatter_single, the name from 2.13 on."""
    return _collective("reduce_scatter_single", "reduce_scatter_tensor")(output, input, **options)


def set_allocator(settings: str) -> None:
    """Set the CUDA allocator's settings, written as in PYTORCH_ALLOC_CONF, which it reads once. Where torch has the new
    function, the older name warns."""
    import torch

    function = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    function(settings)


@cache
def varlen_attention() -> Callable[..., Any]:
    """torch's varlen_attn for grouped-query attention: 2.12 and later need an argument for it, which 2.11 does not
    have."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def _collective(name: str, before: str) -> Any:
    """Looked up at every call, because observers of collectives replace them in torch.distributed."""
    import torch.distributed as dist

    return getattr(dist, name, None) or getattr(dist, before)
