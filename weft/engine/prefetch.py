"""Work on the next item while the caller is busy with this one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetch(items: Iterable[T], make: Callable[[T], R]) -> Generator[tuple[T, Future[R]], None, None]:
    """Yield each item with the future of make(item), which a thread starts while the caller uses the previous item.

    The thread also draws the items, at most one ahead. Close the iterator to end it.
    """
    source, thread = iter(items), ThreadPoolExecutor(1, thread_name_prefix="ahead")

    def build(item: Future[T | None]) -> R:
        value = item.result()
        assert value is not None  # nobody reads the result after the last item
        return make(value)

    def following() -> tuple[Future[T | None], Future[R]]:
        item: Future[T | None] = thread.submit(next, source, None)
        return item, thread.submit(build, item)

    try:
        item, result = following()
        while (finished := item.result()) is not None:
            current, (item, result) = result, following()
            yield finished, current
    finally:
        thread.shutdown(cancel_futures=True)
