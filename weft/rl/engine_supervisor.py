"""Replaces rollout engines that fail, while the run continues.

An engine fails when its process dies, hangs, raises, or returns an invalid completion. A new process gets its number.
It gets the trainers' weights at the next sync, or at once while the trainers still have the weights of the last sync.
Requests depend on their seeds only, so any engine with the same weights can redo them.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from weft.errors import ActorError, first_line
from weft.inference.base import Synced
from weft.inference.weight_sync.protocol import WORKER_DIED, Delivery, SyncError, Ticket
from weft.inference.weight_sync.sender import SyncFailure
from weft.launch.monitor import SilenceClock
from weft.launch.ray_actors import ActorGroup
from weft.rl.restarts import RestartBudget

_SENDER_SECONDS = 5.0  # for telling the sender that an engine has failed


@dataclass(frozen=True)
class EngineLocation:
    """Where an engine runs: the address of its host, UUIDs of the CUDA devices that it sees, and its torch."""

    host: str
    devices: tuple[str, ...]
    torch: str


class SupervisedPool(Protocol):
    """The interface of a pool of engines for their supervisor."""

    async def start_engine(self, number: int) -> EngineLocation:
        """Wait until the process of an engine can receive weights."""
        ...

    async def receive(self, number: int, ticket: Ticket, version: int) -> None:
        """Let an engine receive weights."""
        ...

    def engine_is_ready(self, number: int) -> None:
        """An engine has weights."""
        ...

    def engine_is_lost(self, number: int) -> None:
        """An engine has failed, and gets no requests until it is ready again."""
        ...

    async def begin_again(self, number: int, runs: bool) -> None:
        """A sync failed: the engine starts its requests again once it is ready. runs: whether its process is still the
        same."""
        ...

    def end_requests(self, error: Exception) -> None:
        """The run ends with this error."""
        ...


class ReadingPool(SupervisedPool, Protocol):
    """The same for engines that read weights from a directory."""

    async def read(self, number: int, folder: Path, version: int) -> None:
        """Let an engine read weights."""
        ...


class EngineSupervisor:
    """Starts the engines of a pool, fills them with weights, and replaces failed engines.

    ready: the engines that have weights. failure: the error that ends the run, once there is one.
    """

    def __init__(
        self, pool: SupervisedPool, actors: ActorGroup, trainers: ActorGroup, names: Sequence[str],
        restarts: RestartBudget, timeout: float, first: int | None = None, workers: int = 1,
    ) -> None:  # fmt: skip
        """names: of the engines, for weight sync. timeout: rollout.timeout. first: number of the engines at the start;
        others join when the cluster has room, and may leave (cluster.engines). None: all. workers: processes of each
        engine that receive weights."""
        self.actors, self.restarts = actors, restarts
        self._first = len(actors) if first is None else first
        self._members = set(range(self._first))
        self._coming: dict[int, asyncio.Task[None]] = {}
        self._pool, self._trainers, self._names, self._workers = pool, trainers, list(names), workers
        self._patience = SilenceClock.patience(timeout)
        self.ready = set[int]()
        self.failure: Exception | None = None
        self._locations: dict[int, EngineLocation] = {}
        self._known_locations: dict[int, EngineLocation] = {}  # engines for which the trainers have tickets
        self._tickets: Mapping[str, Sequence[Ticket]] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._filling = set[asyncio.Task[None]]()
        self._sending = asyncio.Lock()
        self._attempt = 0  # number of the last transfer of weights
        self._version: int | None = None  # of the trainers' weights, while they are those of the last sync

    async def locate(self, locations: Mapping[int, EngineLocation]) -> None:
        """Prepare the trainers to send to where engines will start. UserError if a transport cannot reach one."""
        self._locations |= locations
        await self._open_sync()

    async def open(self) -> None:
        """Start all engines, except engines that join later. ActorError if an engine cannot be started."""
        for number in range(self._first):
            self._starting[number] = asyncio.ensure_future(self._start(number, None))
        await self._all_started()
        for number in range(self._first, len(self.actors)):
            self.restarts.engines = self._first
            self._come(number, None)

    async def sync(self, version: int) -> Synced:
        """Send the trainers' weights to all engines. Engines that fail meanwhile are replaced, and receive the weights
        too."""
        async with self._sending:
            self.ready.clear()
            while True:
                await self._all_started()
                synced = await self._send(version, sorted(self._members - self.ready))
                if synced is not None and self.ready >= self._members:
                    self._version = version
                    return synced

    async def hold(self) -> None:
        """Wait until no weights are being sent. From then on, the trainers' weights may change: a new engine waits for
        the next sync."""
        async with self._sending:
            self._version = None

    def lost(self, number: int, error: ActorError) -> None:
        """Replace an engine that has failed with this error, in the background."""
        self.ready.discard(number)
        self._pool.engine_is_lost(number)
        if not self._replaceable(error):
            self.fail(error)
        elif number >= self._first:
            if number in self._members:
                self._members.discard(number)
                self._locations.pop(number, None)
                text = f"{self.actors.name} {number} has left: {self._counts()}: {first_line(error)}"
                self.restarts.show(f"engines  {text}")
                self._come(number, error)
        elif number not in self._starting and self.failure is None:
            self._starting[number] = asyncio.ensure_future(self._start(number, error))

    def fail(self, error: Exception) -> None:
        """End the run with this error."""
        if self.failure is None:
            self.failure = error
            self._pool.end_requests(error)

    async def call_ready(self, method: str, *args: Any, among: Collection[int] | None = None) -> list[Any]:
        """Call this method on all engines with weights, or on those in `among`; returns the results of engines that do
        not fail."""

        async def call(number: int) -> list[Any]:
            try:
                return [await self.actors.call_one(number, method, *args)]
            except ActorError as error:
                self.lost(number, error)
                return []

        numbers = sorted(self.ready if among is None else self.ready & set(among))
        return [result for results in await asyncio.gather(*map(call, numbers)) for result in results]

    async def close(self) -> None:
        """Stop replacing engines."""
        starting = dict(self._starting)
        tasks = [*starting.values(), *self._filling, *self._coming.values()]
        for task in tasks:
            task.cancel()
        for number in starting:
            await asyncio.to_thread(self.actors.end, number)
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ processes

    async def _start(self, number: int, error: ActorError | None) -> None:
        """Start the process of an engine; after an error, a new one. Another failure leads to another restart."""
        began, failed = time.monotonic(), error is not None
        try:
            while True:
                if error is not None:
                    self.restarts.spend(self.actors.name, number, error)
                try:
                    if error is not None:
                        await self.actors.restart(number)
                    self._locations[number] = await self._pool.start_engine(number)
                    break
                except ActorError as failure:
                    if not self._replaceable(failure):
                        raise
                    error, failed = failure, True
        except Exception as final:
            self.fail(final)
            return
        finally:
            del self._starting[number]
        if failed:
            seconds = time.monotonic() - began
            self.restarts.show(f"restart  {self.actors.name} {number} runs again after {seconds:.1f} s")
            task = asyncio.ensure_future(self._fill(number))
            self._filling.add(task)
            task.add_done_callback(self._filling.discard)

    def _come(self, number: int, error: ActorError | None) -> None:
        """Let an engine join as soon as the cluster has room, after this error. An engine whose budget of restarts is
        used up does not join again."""
        try:
            if error is not None:
                self.restarts.spend(self.actors.name, number, error)
        except ActorError as final:
            self.restarts.show(f"engines  {self.actors.name} {number} does not join again: {first_line(final)}")
            return
        self._coming[number] = asyncio.ensure_future(self._join(number))

    async def _join(self, number: int) -> None:
        try:
            await self.actors.join(number)
            self._locations[number] = await self._pool.start_engine(number)
        except ActorError as error:
            if self._replaceable(error):
                self._come(number, error)
            elif error.kind == "user":  # its host cannot run engines: the others continue
                self.restarts.show(f"engines  {self.actors.name} {number} does not join: {first_line(error)}")
            else:
                self.fail(error)
            return
        except Exception as final:
            self.fail(final)
            return
        self._members.add(number)
        self.restarts.show(f"engines  {self.actors.name} {number} has joined: {self._counts()}")
        await self._fill(number)

    def _counts(self) -> str:
        self.restarts.engines = len(self._members)
        return f"{len(self._members)} of {self._first} to {len(self.actors)}"

    async def _all_started(self) -> None:
        while self._starting:
            await asyncio.wait(self._starting.values())
        if self.failure is not None:
            raise self.failure

    def _replaceable(self, error: ActorError) -> bool:
        """Whether a new engine may succeed where one failed with this error."""
        return self.restarts.limit > 0 and error.kind != "user" and self.actors.can_restart

    # ------------------------------------------------------------ weights

    async def _fill(self, number: int) -> None:
        """Send the weights of the last sync to a new engine, if the trainers still have them."""
        try:
            async with self._sending:
                is_wanted = number in self._members and number not in self.ready and number not in self._starting
                if self._version is not None and is_wanted:
                    await self._send(self._version, [number])
        except Exception as error:
            self.fail(error)

    async def _send(self, version: int, numbers: Sequence[int]) -> Synced | None:
        """Send the trainers' weights to these engines. Engines that confirm are ready; engines that fail are replaced.
        Returns None if the sync failed, after which engines that have not failed need it again."""
        if self._locations != self._known_locations:
            await self._open_sync()
        self._attempt += 1
        names = {self._names[number]: number for number in numbers}
        receiving = {
            number: asyncio.ensure_future(self._receive(number, self._tickets[name][0], version))
            for name, number in names.items()
        }
        try:
            sent = (await self._trainers.call_all("send", version, tuple(names), self._attempt))[0]
            await asyncio.wait(receiving.values(), timeout=self._patience)
        except ActorError as error:
            raise self.actors.blamed(error) from error
        finally:
            unfinished = {number: task for number, task in receiving.items() if not task.done()}
            for task in unfinished.values():
                task.cancel()
        errors = dict[int, ActorError]()
        for number, task in receiving.items():
            if number in unfinished:
                text = f"{self.actors.name} {number} did not finish receiving version {version} (rollout.timeout)"
                errors[number] = ActorError(text, "hang")
            elif (failure := task.result()) is not None:
                errors[number] = failure
        # After a sync that all engines have confirmed, an engine's error cannot come from another engine.
        confirmed = isinstance(sent, Synced)
        failed = {n: failure for n, failure in errors.items() if confirmed or not _is_sync_error(failure)}
        if isinstance(sent, SyncFailure):
            if sent.engine in names:
                failed.setdefault(names[sent.engine], sent.error())
            if not failed:
                raise sent.error()
        for number, failure in failed.items():
            self.lost(number, failure)
        if isinstance(sent, SyncFailure):
            for number in numbers:
                try:
                    await self._pool.begin_again(number, runs=number not in failed)
                except ActorError as error:
                    self.lost(number, error)
            return None
        for number in set(numbers) - failed.keys():
            self._is_ready(number)
        return sent

    def _is_ready(self, number: int) -> None:
        self.ready.add(number)
        self._pool.engine_is_ready(number)

    async def _receive(self, number: int, ticket: Ticket, version: int) -> ActorError | None:
        """Let an engine receive weights; returns its error."""
        try:
            await decline_on_error(self._pool.receive(number, ticket, version), ticket, self._attempt)
        except ActorError as error:
            return error
        return None

    async def _open_sync(self) -> None:
        """Prepare the trainers to send to where the engines are now."""
        locations_now = dict(self._locations)  # another engine may join meanwhile
        locations = {self._names[number]: location for number, location in sorted(locations_now.items())}
        hosts = {name: location.host for name, location in locations.items()}
        devices = {name: location.devices for name, location in locations.items()}
        torches = {name: location.torch for name, location in locations.items()}
        self._tickets = (await self._trainers.call_all("open_sync", hosts, self._workers, devices, torches))[0]
        self._known_locations = locations_now


class FolderSupervisor(EngineSupervisor):
    """The same for engines that read weights from a HuggingFace directory, which the trainers write."""

    def __init__(self, folder: Path, pool: ReadingPool, *args: Any, **options: Any) -> None:
        """folder: where directories are written. args, options: as for EngineSupervisor."""
        super().__init__(pool, *args, **options)
        self._folder, self._readers = folder, pool

    async def _send(self, version: int, numbers: Sequence[int]) -> Synced | None:
        folder = self._folder / f"version-{version}"
        synced: Synced = (await self._trainers.call_all("export", str(folder), version))[0]
        reading = (self._readers.read(number, folder, version) for number in numbers)
        for number, failure in zip(numbers, await asyncio.gather(*reading, return_exceptions=True), strict=True):
            if isinstance(failure, ActorError):
                self.lost(number, failure)
            elif failure is not None:
                raise failure
            else:
                self._is_ready(number)
        shutil.rmtree(folder)
        return synced


def _is_sync_error(error: ActorError) -> bool:
    """Whether an engine reports that a sync failed, which may be another engine's fault. A server engine reports an
    ActorError instead, whose traceback contains the cause."""
    return (
        error.kind == "failed"
        and error.report is not None
        and "SyncError: " in f"{error.report.message}\n{error.report.traceback}"
    )


async def decline_on_error(taking: Awaitable[Any], ticket: Ticket, attempt: int | None = None) -> Any:
    """Await an engine that receives weights with this ticket. If it fails, tell the sending trainers, which would
    otherwise wait for rollout.timeout. attempt: as in Sender.send."""
    try:
        return await taking
    except ActorError:
        await asyncio.to_thread(_decline, replace(ticket, timeout=_SENDER_SECONDS), attempt)
        raise


def _decline(ticket: Ticket, attempt: int | None) -> None:
    with suppress(SyncError):
        Delivery(ticket, WORKER_DIED, has=attempt).channel.close()
