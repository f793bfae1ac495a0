"""A queue of rollout steps, generated up to cluster.max_staleness versions ahead of training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar

Step = TypeVar("Step")


class RolloutQueue(Generic[Step]):
    """`async with RolloutQueue(make, first, last, ahead) as queue:` then repeat `await queue.take()`, train, sync,
    `await queue.trained(number)`.

    make: makes a rollout step, given its number. first, last: numbers of the first and the last step. ahead:
    cluster.max_staleness. Step n starts once step n - 1 - ahead is trained, so with 0 generation and training never
    overlap.
    """

    def __init__(self, make: Callable[[int], Awaitable[Step]], first: int, last: int, ahead: int) -> None:
        self._make, self._first, self._last, self._ahead = make, first, last, ahead
        self._trained = first - 1
        self._moved = asyncio.Condition()
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RolloutQueue[Step]:
        self._task = asyncio.ensure_future(self._produce())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._task

    async def take(self) -> Step:
        """The next rollout step. Raises the error of `make` if it failed."""
        assert self._task is not None
        waiting = asyncio.ensure_future(self._steps.get())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done() and self._task.done() and self._task.exception() is not None:
            waiting.cancel()
            await self._task
        return await waiting

    @property
    def buffered(self) -> int:
        """The number of complete rollout steps that wait for the trainers."""
        return self._steps.qsize()

    async def trained(self, number: int) -> None:
        """Report that the engines have the weights after rollout step `number`."""
        async with self._moved:
            self._trained = number
            self._moved.notify_all()

    async def _produce(self) -> None:
        for number in range(self._first, self._last + 1):
            async with self._moved:
                await self._moved.wait_for(lambda: number - 1 - self._ahead <= self._trained)  # noqa: B023
            self._steps.put_nowait(await self._make(number))
