"""A RolloutEngine over several batch engines, one per actor. Waiting requests go to idle actors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weft.errors import ActorError
from weft.inference.base import Completion, EnginePart, Request, Synced
from weft.inference.weight_sync.protocol import WORKER_DIED, Delivery, SyncError, Ticket
from weft.launch.ray_actors import ActorGroup, gather_calls

_SENDER_SECONDS = 5.0  # for telling the sender that an engine has failed

Entry = tuple[Request, asyncio.Future[list[Completion]]]


class BatchPool:
    """A RolloutEngine over actors that generate in turns of `turn` seconds. drawn: tokens sampled so far.

    method: name of the actors' method (new requests by number, seconds) -> (finished completions by number, number of
    tokens sampled).
    """

    method, turn = "generate", 2.0

    def __init__(self, actors: ActorGroup) -> None:
        self.actors, self.drawn = actors, 0
        self._turns = [asyncio.Lock() for _ in range(len(actors))]
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[list[Completion]]] = {}
        self._waiting: list[Entry] = []
        self._idle = set(range(len(actors)))
        self._working: set[asyncio.Task[None]] = set()
        self._dealing = self._is_paused = False

    async def generate(self, request: Request) -> list[Completion]:
        """One completion per seed of the request. Concurrent requests are batched."""
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._deal_soon()
        return await future

    def _deal_soon(self) -> None:
        """Deal after all coroutines that are ready now have queued their requests."""
        if not self._dealing and not self._is_paused:
            self._dealing = True
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: loop.call_soon(self._deal))

    def _deal(self) -> None:
        self._dealing = False
        if self._is_paused:
            return
        shares = deal_requests([request for request, _ in self._waiting], len(self._idle))
        for number, share in zip(sorted(self._idle), shares, strict=False):
            if share:
                self._idle.discard(number)
                task = asyncio.ensure_future(self._work(number, [self._waiting[i] for i in share]))
                self._working.add(task)
                task.add_done_callback(self._working.discard)
        dealt = {i for share in shares for i in share}
        self._waiting = [entry for i, entry in enumerate(self._waiting) if i not in dealt]

    async def _work(self, number: int, entries: Sequence[Entry]) -> None:
        try:
            await self._generate(number, entries)
        except Exception as error:
            for _, future in entries:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._idle.add(number)
            if self._waiting:
                self._deal_soon()

    async def _generate(self, number: int, entries: Sequence[Entry]) -> None:
        """Complete these requests on actor `number`, turn by turn."""
        numbered = {next(self._numbers): entry for entry in entries}
        self._futures |= {key: future for key, (_, future) in numbered.items()}
        requests = {key: request for key, (request, _) in numbered.items()}
        try:
            while self._futures.keys() & numbered.keys():
                async with self._turns[number]:
                    finished, drawn = await self.actors.call_one(number, self.method, requests, self.turn)
                self.drawn += drawn
                requests = {}
                self._answer(finished)
        finally:
            for key in self._futures.keys() & numbered.keys():
                del self._futures[key]

    def _answer(self, finished: Mapping[int, list[Completion]]) -> None:
        for key, completions in finished.items():
            future = self._futures.pop(key)
            if not future.done():
                future.set_result(completions)

    async def pause(self) -> None:
        """Start no request, and wait for the running ones."""
        self._is_paused = True
        while self._working:
            await asyncio.wait(set(self._working))

    async def resume(self) -> None:
        """Start waiting requests."""
        self._is_paused = False
        if self._waiting:
            self._deal_soon()

    async def abort(self) -> None:
        """Cancel waiting requests, and wait for the running ones."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting = []
        await self.pause()
        await self.resume()

    async def wake(self, part: EnginePart) -> None:
        """Does nothing: the next sync allocates memory."""

    async def close(self) -> None:
        """Does nothing: the engines end with their actors."""


class EmbeddedPool(BatchPool):
    """The embedded engines in the trainer ranks, which alternate with training."""

    async def sleep(self) -> None:
        """Free the engines' memory."""
        await self.actors.call_all("sleep_engine")

    async def sync(self, version: int) -> Synced:
        """Copy the trainers' current weights to the engines."""
        synced: Synced = (await self.actors.call_all("sync", version))[0]
        return synced


class StandalonePool(BatchPool):
    """Standalone engines, with short turns, because weights may change between two turns.

    keep: whether unfinished requests continue with new weights; otherwise they start again (rollout.on_weight_update).
    """

    method, turn = "advance", 0.2

    def __init__(
        self, actors: ActorGroup, trainers: ActorGroup, tickets: Mapping[str, Sequence[Ticket]], keep: bool = True
    ) -> None:
        super().__init__(actors)
        self._trainers, self._keep = trainers, keep
        self._tickets = [engine_tickets[0] for engine_tickets in tickets.values()]

    async def sync(self, version: int) -> Synced:
        """Send the trainers' weights to all engines, between two turns."""
        await self.pause()
        try:
            taking = [
                decline_on_error(self.actors.call_one(number, "receive", ticket, version, self._keep), ticket)
                for number, ticket in enumerate(self._tickets)
            ]
            sent, *_ = await gather_calls([self._trainers.call_all("send", version), *taking])
        except ActorError as error:
            raise self.actors.blamed(error) from error
        finally:
            await self.resume()
        synced: Synced = sent[0]
        return synced

    async def pause(self) -> None:
        """Start no turn, and wait for the running ones."""
        self._is_paused = True
        for turn in self._turns:
            await turn.acquire()

    async def resume(self) -> None:
        """Allow turns again, and start waiting requests."""
        for turn in self._turns:
            turn.release()
        await super().resume()

    async def abort(self) -> None:
        """End running requests with the tokens they have, and cancel waiting ones."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting = []
        await self.pause()
        for finished in await self.actors.call_all("end"):
            self._answer(finished)
        await self.resume()

    async def sleep(self) -> None:
        """Free the engines' memory; they must be idle."""
        await self.actors.call_all("sleep")


async def decline_on_error(taking: Awaitable[Any], ticket: Ticket) -> Any:
    """Await an engine that receives weights with this ticket. If it fails, tell the sending trainers, which would
    otherwise wait for rollout.timeout."""
    try:
        return await taking
    except ActorError:
        await asyncio.to_thread(_decline, replace(ticket, timeout=_SENDER_SECONDS))
        raise


def _decline(ticket: Ticket) -> None:
    with suppress(SyncError):
        Delivery(ticket, WORKER_DIED).channel.close()


def deal_requests(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """Indices of each rank's requests. Requests are dealt greedily to the rank with the fewest samples, then tokens."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0)] * ranks
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].seeds), -len(requests[i].tokens), i))
    for i in order if ranks else ():
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(i)
        loads[rank] = (loads[rank][0] + len(requests[i].seeds), loads[rank][1] + len(requests[i].tokens))
    return [sorted(share) for share in shares]
