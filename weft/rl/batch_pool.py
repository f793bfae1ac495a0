"""A RolloutEngine over several batch engines, one per actor. Waiting requests go to idle actors."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.errors import ActorError
from weft.inference.base import CallTimes, Completion, EnginePart, Request, Synced
from weft.inference.engine_clock import EngineClock
from weft.inference.weight_sync.protocol import Ticket
from weft.launch.ray_actors import ActorGroup
from weft.rl.engine_supervisor import EngineLocation, EngineSupervisor
from weft.rl.restarts import RestartBudget

_MAX_LOGPROB = 1e-3  # rounding may put the logprob of a certain token above 0

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
        self._running: dict[int, Entry] = {}
        self._waiting: list[Entry] = []
        self._idle = set(range(len(actors)))
        self._working: set[asyncio.Task[None]] = set()
        self._dealing = self._is_paused = False
        self._forgetful = set[int]()  # actors that have lost the requests that they were working on
        self.clock = EngineClock(len(actors))
        self._began: dict[int, tuple[int, float]] = {}  # request -> actor that has it, Unix time when it got it

    async def generate(self, request: Request) -> list[Completion]:
        """One completion per seed of the request. Concurrent requests are batched."""
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._deal_soon()
        return await future

    def _deal_soon(self) -> None:
        """Assign requests after all ready coroutines have queued theirs."""
        if not self._dealing and not self._is_paused:
            self._dealing = True
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: loop.call_soon(self._deal))

    def _deal(self) -> None:
        self._dealing = False
        if self._is_paused:
            return
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]  # whose agents have ended
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
            with self.clock.generating(number):
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
        self._running |= numbered
        requests = {key: request for key, (request, _) in numbered.items()}
        try:
            while self._running.keys() & numbered.keys():
                async with self._turns[number]:
                    if number in self._forgetful:
                        requests = {key: entry[0] for key, entry in numbered.items() if key in self._running}
                        self._forgetful.discard(number)
                    requests = {key: request for key, request in requests.items() if key in self._running}
                    self._began |= dict.fromkeys(requests, (number, time.time()))
                    answer = await self.actors.call_one(number, self.method, requests, self.turn)
                finished, drawn = self._checked(number, answer)
                self.drawn += drawn
                requests = {}
                self._answer(finished)
        finally:
            for key in self._running.keys() & numbered.keys():
                del self._running[key]
            for key in numbered:
                self._began.pop(key, None)

    def _checked(self, number: int, answer: Any) -> tuple[Mapping[int, list[Completion]], int]:
        """The answer of actor `number`. ActorError if it is invalid."""
        finished, drawn = answer
        return finished, drawn

    def _answer(self, finished: Mapping[int, list[Completion]]) -> None:
        for key, completions in finished.items():
            request, future = self._running.pop(key)
            engine, began = self._began[key]
            times = CallTimes(engine, request.queued, began, time.time())
            if not future.done():
                future.set_result([replace(completion, times=times) for completion in completions])

    async def pause(self) -> None:
        """Start no turn, and wait for the running ones."""
        self._is_paused = True
        for turn in self._turns:
            await turn.acquire()
        self.clock.pause(1)

    async def resume(self) -> None:
        """Allow turns again, and start waiting requests."""
        for turn in self._turns:
            turn.release()
        self._is_paused = False
        self.clock.pause(-1)
        if self._waiting:
            self._deal_soon()

    async def abort(self) -> None:
        """End running requests with the tokens they have, and cancel waiting ones."""
        await self.pause()
        for finished in await self._end_all():
            self._answer(finished)
        # No actor has begun the requests left in self._running. Requests of a failed engine are waiting.
        for _, future in [*self._running.values(), *self._waiting]:
            future.cancel()
        self._running.clear()
        await self.resume()

    async def _end_all(self) -> list[Any]:
        """The partial completions of the requests that actors work on."""
        return await self.actors.call_all("end")

    async def _end_unwanted(self) -> None:
        """End the requests of agents that were killed or have ended."""
        entries = [*self._waiting, *self._running.values()]
        assert all(future.done() for _, future in entries), "requests are being answered"
        if entries:
            await self.abort()

    async def wake(self, part: EnginePart) -> None:
        """Does nothing: the next sync allocates memory."""

    async def hold(self) -> None:
        """Does nothing: weights change only while the engines are idle."""

    async def close(self) -> None:
        """Does nothing: the engines end with their actors."""


class EmbeddedPool(BatchPool):
    """The embedded engines in the trainer ranks, which alternate with training."""

    async def sleep(self) -> None:
        """Free the engines' memory."""
        await self._end_unwanted()
        await self.actors.call_all("sleep_engine")

    async def sync(self, version: int) -> Synced:
        """Copy the trainers' current weights to the engines."""
        self.clock.pause(1)
        try:
            synced: Synced = (await self.actors.call_all("sync", version))[0]
        finally:
            self.clock.pause(-1)
        return synced


class StandalonePool(BatchPool):
    """Standalone engines, with short turns, because weights may change between two turns. Engines that fail are
    replaced (EngineSupervisor), and other engines redo their requests."""

    method, turn = "advance", 0.2

    def __init__(
        self, actors: ActorGroup, trainers: ActorGroup, restarts: RestartBudget, *, vocab_size: int, timeout: float,
        keep: bool = True, first: int | None = None,
    ) -> None:  # fmt: skip
        """timeout: rollout.timeout. first: as in EngineSupervisor. keep: whether unfinished requests continue with new
        weights; otherwise they start again (rollout.on_weight_update)."""
        super().__init__(actors)
        self._keep, self._vocab_size = keep, vocab_size
        self._first = len(actors) if first is None else first
        self.clock = EngineClock()
        self._idle = set()
        self._busy = set[int]()
        self._attempts = weakref.WeakKeyDictionary[asyncio.Future[list[Completion]], int]()  # those that failed
        names = [f"hf-{number}" for number in range(len(actors))]
        self._supervisor = EngineSupervisor(self, actors, trainers, names, restarts, timeout, first)

    async def open(self) -> None:
        """Start the engines; they have no weights."""
        for number in range(self._first):
            self.clock.lost(number)
        await self._supervisor.open()

    async def generate(self, request: Request) -> list[Completion]:
        """One completion per seed of the request. Concurrent requests are batched."""
        if self._supervisor.failure is not None:
            raise self._supervisor.failure
        return await super().generate(request)

    async def sync(self, version: int) -> Synced:
        """Send the trainers' weights to all engines, between two turns."""
        await self.pause()
        try:
            return await self._supervisor.sync(version)
        finally:
            await self.resume()

    async def hold(self) -> None:
        """See RolloutEngine."""
        await self._supervisor.hold()

    async def _end_all(self) -> list[Any]:
        return await self._supervisor.call_ready("end")

    async def sleep(self) -> None:
        """Free the engines' memory; nobody may wait for an answer."""
        await self._end_unwanted()
        await self.hold()
        await self._supervisor.call_ready("sleep")

    async def close(self) -> None:
        """Stop replacing engines, which end with their actors."""
        await self._supervisor.close()

    # ------------------------------------------------------------ engines that fail

    async def _work(self, number: int, entries: Sequence[Entry]) -> None:
        self._busy.add(number)
        try:
            with self.clock.generating(number):
                await self._generate(number, entries)
        except ActorError as error:
            self._redo(number, entries, error)
        except Exception as error:
            self._supervisor.fail(error)
        finally:
            self._busy.discard(number)
            if number in self._supervisor.ready:
                self._idle.add(number)
            if self._waiting:
                self._deal_soon()

    def _redo(self, number: int, entries: Sequence[Entry], error: ActorError) -> None:
        """Queue the unfinished requests of an engine that failed before all others, and replace the engine. Of several
        engines, a request at which too many have failed ends the run."""
        unfinished = [(request, future) for request, future in entries if not future.done()]
        self._waiting = [*unfinished, *self._waiting]
        restarts = self._supervisor.restarts
        for request, future in unfinished:
            self._attempts[future] = self._attempts.get(future, 0) + 1
            if self._attempts[future] > restarts.limit > 0 and len(self.actors) > 1:
                text = f"{self._attempts[future]} engines have failed while they worked on {request.id}"
                self._supervisor.fail(restarts.exhausted(text, error))
        self._supervisor.lost(number, error)

    async def start_engine(self, number: int) -> EngineLocation:
        """See SupervisedPool."""
        call = partial(self.actors.call_one, number)
        return EngineLocation(await call("host"), tuple(await call("devices")), await call("torch_version"))

    async def receive(self, number: int, ticket: Ticket, version: int) -> None:
        """See SupervisedPool."""
        await self.actors.call_one(number, "receive", ticket, version, self._keep)

    def engine_is_ready(self, number: int) -> None:
        """See SupervisedPool."""
        self.clock.ready(number)
        if number not in self._busy:
            self._idle.add(number)
        if self._waiting:
            self._deal_soon()

    def engine_is_lost(self, number: int) -> None:
        """See SupervisedPool."""
        self.clock.lost(number, gone=number >= self._first)
        self._idle.discard(number)

    async def begin_again(self, number: int, runs: bool) -> None:
        """See SupervisedPool."""
        self._forgetful.add(number)
        if runs:
            await self.actors.call_one(number, "end")

    def end_requests(self, error: Exception) -> None:
        """See SupervisedPool."""
        for _, future in [*self._waiting, *self._running.values()]:
            if not future.done():
                future.set_exception(error)
        self._waiting = []

    def _checked(self, number: int, answer: Any) -> tuple[Mapping[int, list[Completion]], int]:
        try:
            finished, drawn = answer
            for key, completions in finished.items():
                require_completions(self._running[key][0], completions, self._vocab_size)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            text = f"{self.actors.name} {number} returned an invalid completion: {type(error).__name__}: {error}"
            raise ActorError(text, "failed") from error
        return finished, int(drawn)


def require_completions(request: Request, completions: Sequence[Completion], vocab_size: int) -> None:
    """Raise ValueError unless these can be the completions of a request: one per seed, ids of the vocabulary, and a
    finite logprob and a version for each token."""
    if len(completions) != len(request.seeds):
        raise ValueError(f"{len(completions)} completions of {request.id} for {len(request.seeds)} seeds")
    for completion in completions:
        tokens, logprobs = completion.tokens, completion.logprobs
        count = len(tokens)
        if not 0 < count <= request.sampling.max_new_tokens and completion.finish != "abort":
            raise ValueError(f"{count} tokens of {request.id}, which has room for {request.sampling.max_new_tokens}")
        wrong = [token for token in tokens if not (isinstance(token, int) and 0 <= token < vocab_size)]
        if wrong:
            raise ValueError(f"token {wrong[0]!r:.40} of {request.id}, in a vocabulary of {vocab_size}")
        if len(logprobs) != count or sum(number for _, number in completion.versions) != count:
            raise ValueError(f"{len(logprobs)} logprobs and versions {completion.versions} for {count} tokens")
        masses = completion.kept_logmass or ()
        unusable = [value for value in (*logprobs, *masses) if not (math.isfinite(value) and value <= _MAX_LOGPROB)]
        if unusable:
            raise ValueError(f"logprob {unusable[0]!r:.40} of {request.id}")


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
