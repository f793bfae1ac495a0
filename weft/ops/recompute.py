"""Results that a recomputed layer takes from its forward instead of computing them again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# keep: stores a result in a layer's forward. take: iterates over the stored results in its recomputation.
_thread = threading.local()


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """(context of a layer's forward, context of its recomputation), for `context_fn` of torch.utils.checkpoint."""
    results: list[Any] = []
    return _inside(keep=results.append), _inside(take=results)


@contextmanager
def _inside(keep: Callable[[Any], None] | None = None, take: list[Any] | None = None) -> Iterator[None]:
    before = vars(_thread).copy()
    # Each recomputation begins anew: a graph that is retained recomputes its layers at each backward.
    _thread.keep, _thread.take = keep, None if take is None else iter(take)
    try:
        yield
    finally:
        vars(_thread).clear()
        vars(_thread).update(before)


@torch.compiler.disable
def reuse_in_recompute(compute: Callable[[], T]) -> T:
    """compute(), or in recomputation its result in forward. Such calls must be in the same order in both."""
    results = getattr(_thread, "take", None)
    if results is not None:
        result: T = next(results)
        return result
    result, keep = compute(), getattr(_thread, "keep", None)
    if keep is not None:
        keep(result)
    return result
