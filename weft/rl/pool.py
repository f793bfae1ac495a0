"""Engines that generate in batches, one in each actor of a group, as one RolloutEngine: what waits is dealt to those
that are free."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weft.cluster.rays import ActorGroup, together
from weft.errors import ActorError
from weft.rollout.base import Completion, EnginePart, Request, Synced
from weft.rollout.sync.protocol import GONE, Delivery, SyncError, Ticket

_SENDER_SECONDS = 5.0  # until a sender that is there has answered

Entry = tuple[Request, asyncio.Future[list[Completion]]]


class BatchPool:
    """Implements RolloutEngine over actors that generate in turns. drawn: tokens so far.

    method: of the actors: (new requests by number, seconds) -> (what is finished, tokens that were drawn). turn: its
    seconds.
    """

    method, turn = "generate", 2.0

    def __init__(self, actors: ActorGroup) -> None:
        self.actors, self.drawn = actors, 0
        self._turns = [asyncio.Lock() for _ in range(len(actors))]
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[list[Completion]]] = {}
        self._waiting: list[Entry] = []
        self._idle = set(range(len(actors)))
        self._working: set[asyncio.Task[None]] = set()
        self._dealing = self._held = False

    async def generate(self, request: Request) -> list[Completion]:
        """One completion for each of the request's seeds; what is asked for at the same time is generated together."""
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._deal_soon()
        return await future

    def _deal_soon(self) -> None:
        """Once everything that is ready now has said what it wants."""
        if not self._dealing and not self._held:
            self._dealing = True
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: loop.call_soon(self._deal))

    def _deal(self) -> None:
        self._dealing = False
        if self._held:
            return
        shares = deal_requests([request for request, _ in self._waiting], len(self._idle))
        for number, share in zip(sorted(self._idle), shares, strict=False):
            if share:
                self._idle.discard(number)
                task = asyncio.ensure_future(self._work(number, [self._waiting[i] for i in share]))
                self._working.add(task)
                task.add_done_callback(self._working.discard)
        taken = {i for share in shares for i in share}
        self._waiting = [entry for i, entry in enumerate(self._waiting) if i not in taken]

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
        """Have an engine answer these, turn by turn."""
        asked = {next(self._numbers): entry for entry in entries}
        self._asked |= {key: future for key, (_, future) in asked.items()}
        requests = {key: request for key, (request, _) in asked.items()}
        try:
            while self._asked.keys() & asked.keys():
                async with self._turns[number]:
                    finished, drawn = await self.actors.one(number, self.method, requests, self.turn)
                self.drawn += drawn
                requests = {}
                self._answer(finished)
        finally:
            for key in self._asked.keys() & asked.keys():
                del self._asked[key]

    def _answer(self, finished: Mapping[int, list[Completion]]) -> None:
        for key, completions in finished.items():
            future = self._asked.pop(key)
            if not future.done():
                future.set_result(completions)

    async def pause(self) -> None:
        """Begin nothing new, and wait until what has begun is done."""
        self._held = True
        while self._working:
            await asyncio.wait(set(self._working))

    async def resume(self) -> None:
        """Begin what waits."""
        self._held = False
        if self._waiting:
            self._deal_soon()

    async def abort(self) -> None:
        """What has begun is soon done; what waits is not begun."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting = []
        await self.pause()
        await self.resume()

    async def wake(self, part: EnginePart) -> None:
        """The next sync does."""

    async def close(self) -> None:
        """They end with their group."""


class EmbeddedPool(BatchPool):
    """The copies in the trainer ranks, which take turns with training."""

    async def sleep(self) -> None:
        """Give up the memory of the copies."""
        await self.actors.all("sleep_engine")

    async def sync(self, version: int) -> Synced:
        """Give the copies the trainers' weights as they are now."""
        synced: Synced = (await self.actors.all("sync", version))[0]
        return synced


class StandalonePool(BatchPool):
    """Copies in processes of their own, whose turns are short, because weights may change between two of them.

    keep: what is under way at a sync goes on under the new weights; otherwise it begins again (rollout.unfinished).
    """

    method, turn = "advance", 0.2

    def __init__(
        self, actors: ActorGroup, trainers: ActorGroup, tickets: Mapping[str, Sequence[Ticket]], keep: bool = True
    ) -> None:
        super().__init__(actors)
        self._trainers, self._keep = trainers, keep
        self._tickets = [own[0] for own in tickets.values()]

    async def sync(self, version: int) -> Synced:
        """Send the trainers' weights to all, between two turns."""
        await self.pause()
        try:
            taking = [
                decline_on_error(self.actors.one(number, "receive", ticket, version, self._keep), ticket)
                for number, ticket in enumerate(self._tickets)
            ]
            sent, *_ = await together([self._trainers.all("send", version), *taking])
        except ActorError as error:
            raise self.actors.blamed(error) from error
        finally:
            await self.resume()
        synced: Synced = sent[0]
        return synced

    async def pause(self) -> None:
        """Begin no further turn, and wait until those that run have ended."""
        self._held = True
        for turn in self._turns:
            await turn.acquire()

    async def resume(self) -> None:
        """Go on."""
        for turn in self._turns:
            turn.release()
        await super().resume()

    async def abort(self) -> None:
        """End what has begun; what waits is not begun."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting = []
        await self.pause()
        for finished in await self.actors.all("end"):
            self._answer(finished)
        await self.resume()

    async def sleep(self) -> None:
        """Give up their memory; nothing may be under way."""
        await self.actors.all("sleep")


async def decline_on_error(taking: Awaitable[Any], ticket: Ticket) -> Any:
    """What an engine answers that takes weights with this ticket. Where it fails, the trainers are told that nobody
    will come: they would wait for it, for as long as rollout.timeout."""
    try:
        return await taking
    except ActorError:
        await asyncio.to_thread(_decline, replace(ticket, timeout=_SENDER_SECONDS))
        raise


def _decline(ticket: Ticket) -> None:
    with suppress(SyncError):
        Delivery(ticket, GONE).channel.close()


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
