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

    def following() -> tuple[Future[T | None], Future[R]]:
        item: Future[T | None] = thread.submit(next, source, None)
        return item, thread.submit(lambda: make(_there(item)))

    try:
        item, made = following()
        while (this := item.result()) is not None:
            own, (item, made) = made, following()
            yield this, own
    finally:
        thread.shutdown(cancel_futures=True)


def _there(item: Future[T | None]) -> T:
    found = item.result()
    assert found is not None  # nobody asks for what follows the last
    return found
