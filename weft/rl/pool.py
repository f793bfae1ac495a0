"""The embedded engines of all trainer ranks as one RolloutEngine: waiting requests are dealt to free ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from weft.cluster.rays import ActorGroup
from weft.rollout.base import Completion, Request, Synced


class EmbeddedPool:
    """Takes turns with training: nothing may be generating while the trainers train or sync."""

    def __init__(self, trainers: ActorGroup) -> None:
        self.trainers = trainers
        self._waiting: list[tuple[Request, asyncio.Future[list[Completion]]]] = []
        self._idle = set(range(len(trainers)))
        self._working: set[asyncio.Task[None]] = set()
        self._dealing = False

    async def generate(self, request: Request) -> list[Completion]:
        """One completion for each of the request's seeds; what is asked for at the same time is generated together."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Completion]] = loop.create_future()
        self._waiting.append((request, future))
        self._deal_soon()
        return await future

    def _deal_soon(self) -> None:
        """Once everything that is ready now has said what it wants."""
        if not self._dealing:
            self._dealing = True
            asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(self._deal))

    def _deal(self) -> None:
        self._dealing = False
        shares = deal_requests([request for request, _ in self._waiting], len(self._idle))
        for rank, share in zip(sorted(self._idle), shares, strict=False):
            if share:
                self._idle.discard(rank)
                task = asyncio.ensure_future(self._work(rank, [self._waiting[i] for i in share]))
                self._working.add(task)
                task.add_done_callback(self._working.discard)
        taken = {i for share in shares for i in share}
        self._waiting = [entry for i, entry in enumerate(self._waiting) if i not in taken]

    async def _work(self, rank: int, entries: list[tuple[Request, asyncio.Future[list[Completion]]]]) -> None:
        try:
            found = await self.trainers.one(rank, "generate", [request for request, _ in entries])
            for (_, future), completions in zip(entries, found, strict=True):
                if not future.done():
                    future.set_result(completions)
        except Exception as error:
            for _, future in entries:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._idle.add(rank)
            if self._waiting:
                self._deal_soon()

    async def sync(self, version: int) -> Synced:
        """Give the copies the trainers' weights as they are now."""
        return (await self.trainers.all("sync", version))[0]

    async def pause(self) -> None:
        """Wait until nothing is being generated."""
        while self._working:
            await asyncio.wait(self._working)

    async def resume(self) -> None:
        """New requests are taken at any time."""

    async def abort(self) -> None:
        """What is being generated is soon done; what waits is not begun."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting = []
        await self.pause()

    async def sleep(self) -> None:
        """Drop the copies."""
        await self.trainers.all("sleep_engine")

    async def wake(self) -> None:
        """The next sync makes the copies."""

    async def close(self) -> None:
        """The trainers end with their group."""


def deal_requests(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """Indices of the requests of each rank: equal numbers of samples, and of prompt tokens as far as that allows."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0)] * ranks
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].seeds), -len(requests[i].tokens), i))
    for i in order if ranks else ():
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(i)
        loads[rank] = (loads[rank][0] + len(requests[i].seeds), loads[rank][1] + len(requests[i].tokens))
    return [sorted(share) for share in shares]
