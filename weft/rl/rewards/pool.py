"""Worker processes for reward functions. A process that crashes or hangs is replaced; only its samples are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from weft.errors import UserError
from weft.rl.rewards.calls import RewardBatch, RewardOutcome, RewardSignature, RewardSpec
from weft.rl.workers import Worker, WorkerError, start_worker


class RewardPool:
    """Up to `size` processes, started on demand."""

    def __init__(self, functions: Sequence[RewardSpec], size: int, timeout: float) -> None:
        """timeout: limit on one call, in seconds."""
        self._functions, self._timeout = functions, timeout
        self._signatures: list[RewardSignature] = []
        self._free: asyncio.LifoQueue[Worker | None] = asyncio.LifoQueue()
        self._workers: set[Worker] = set()
        for _ in range(size):
            self._free.put_nowait(None)

    async def describe(self) -> list[RewardSignature]:
        """The signature of each function. UserError if one cannot be imported."""
        worker = await self._take()
        self._free.put_nowait(worker)
        return self._signatures

    async def call(self, number: int, batch: RewardBatch) -> list[RewardOutcome]:
        """The outcomes of the function at index `number` for a batch. If its process crashes or hangs, each sample is
        tried alone. UserError if the function returns the wrong number of values."""
        try:
            return await self._ask((number, batch))
        except WorkerError as error:
            if len(batch) == 1:
                return [RewardOutcome(None, f"the function's process {error}", late=error.late)]
        single = await asyncio.gather(*(self.call(number, batch.only(i)) for i in range(len(batch))))
        return [outcome for outcomes in single for outcome in outcomes]

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(worker.end() for worker in self._workers))
        self._workers.clear()

    async def _ask(self, request: Any) -> Any:
        worker = await self._take()
        try:
            answer = await worker.ask(request, self._timeout)
        except BaseException:
            self._workers.discard(worker)
            self._free.put_nowait(None)
            raise
        self._free.put_nowait(worker)
        if isinstance(answer, str):
            raise UserError(answer)
        return answer

    async def _take(self) -> Worker:
        worker = await self._free.get()
        if worker is None:
            names = ", ".join(function.path for function in self._functions)
            try:
                worker, self._signatures = await start_worker(
                    "weft.rl.rewards.worker", list(self._functions), f"rl.reward: the process that imports {names}"
                )
            except BaseException:
                self._free.put_nowait(None)
                raise
            self._workers.add(worker)
        return worker
