"""What torch calls differently from version to version; the one place that asks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_gather_single(output: Tensor, input: Tensor, **options: Any) -> Any:
    """torch's, by the name that it has from 2.13 on; the older one warns there at every call."""
    return _of("all_gather_single", "all_gather_into_tensor")(output, input, **options)


def reduce_scatter_single(output: Tensor, input: Tensor, **options: Any) -> Any:
    """torch's, by the name that it has from 2.13 on."""
    return _of("reduce_scatter_single", "reduce_scatter_tensor")(output, input, **options)


@cache
def varlen_attention() -> Callable[..., Any]:
    """torch's varlen_attn for any ratio of heads. From 2.12 on that has to be said; 2.11 has no word for it."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def _of(name: str, before: str) -> Any:
    """Looked up at every call: whoever watches collectives replaces them in torch.distributed."""
    return getattr(dist, name, None) or getattr(dist, before)
