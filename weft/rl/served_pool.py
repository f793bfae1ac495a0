"""The rollout engines of a run: servers as one RolloutEngine, and the choice of the pool for rollout.engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config.conditions import SERVERS, in_own_process
from weft.config.rl_schema import RlConfig
from weft.engine.sleep import Part
from weft.errors import ActorError, UserError
from weft.inference.base import CallTimes, Completion, EnginePart, Request, Synced
from weft.inference.engine_clock import EngineClock
from weft.inference.servers import interpreter_of, server_names
from weft.inference.weight_sync.protocol import Ticket
from weft.launch.ray_actors import ActorGroup, gather_calls
from weft.models import hf
from weft.rl.batch_pool import EmbeddedPool, StandalonePool, require_completions
from weft.rl.engine_supervisor import EngineLocation, EngineSupervisor, FolderSupervisor
from weft.rl.placement import shared_ranks
from weft.rl.restarts import RestartBudget
from weft.rl.trainer_group import RankGroup


class ServedPool:
    """A RolloutEngine over actors that each run a server (HostedServer), on any host.

    All samples of a request go to the engine with the least work, so that they share the prompt's cache. Engines that
    fail are replaced (EngineSupervisor), and their requests are redone with their seeds. vLLM gets weights by weight
    sync, SGLang from HuggingFace directories.
    """

    def __init__(
        self, config: RlConfig, actors: ActorGroup, trainers: ActorGroup, restarts: RestartBudget, run: Path,
        compute: str, vocab_size: int, devices: Sequence[tuple[str | None, list[str]]] = (),
    ) -> None:  # fmt: skip
        """run, compute: as in HostedServer.start. devices: of the first engines, from devices_of_trainers()."""
        self.actors, self.drawn = actors, 0  # drawn: tokens of completed requests
        self._run, self._compute, self._vocab_size, self._devices = run, compute, vocab_size, devices
        self._loads = [0] * len(actors)
        self._losses = [0] * len(actors)  # how often each engine has failed
        self._waiting = set[asyncio.Future[None]]()  # requests that no engine has
        self._running = set[asyncio.Future[Any]]()
        self._is_paused, self._asleep = False, set[int]()
        self._aborts = 0  # number of calls of abort()
        self._first = config.rollout.count
        arguments = (actors, trainers, server_names(config), restarts, config.rollout.timeout, self._first)
        self._supervisor = (
            EngineSupervisor(self, *arguments, workers=config.rollout.tp)
            if config.rollout.engine == "vllm"
            else FolderSupervisor(run / "engines", self, *arguments)
        )
        self.clock = EngineClock()

    async def locate(self) -> None:
        """Refuse a transport that cannot reach an engine, before any starts."""
        if not isinstance(self._supervisor, FolderSupervisor):
            await self._supervisor.locate({n: await self._location(n) for n in range(self._first)})

    async def open(self) -> None:
        """Start the engines; they have no weights. ActorError if one does not start: an engine that cannot start at
        first, for example because of an unknown option, would not start a second time."""
        for number in range(self._first):
            self.clock.lost(number)
        await gather_calls([self.start_engine(number) for number in range(self._first)])
        await self._supervisor.open()

    async def generate(self, request: Request) -> list[Completion]:
        """One completion per seed of the request."""
        load = len(request.seeds) * (len(request.tokens) + request.sampling.max_new_tokens)
        failures, aborts = 0, self._aborts
        while True:
            number = await self._engine_with_room(aborts)
            losses = self._losses[number]
            self._loads[number] += load
            began = time.time()
            try:
                with self.clock.generating(number):
                    completions = await self._completed(number, request)
                self.drawn += sum(len(completion.tokens) for completion in completions)
                times = CallTimes(number, request.queued, began, time.time())
                return [replace(completion, times=times) for completion in completions]
            except ActorError as error:
                failures += 1
                self._fail_if_fatal(request, failures, error)
                if losses == self._losses[number]:  # else the failed engine has already been replaced
                    self._supervisor.lost(number, error)
            finally:
                self._loads[number] -= load

    async def _completed(self, number: int, request: Request) -> list[Completion]:
        """The answer of an engine. ActorError if it fails, or if the answer is not a valid completion."""
        call = asyncio.ensure_future(self.actors.call_one(number, "ask", "generate", request))
        self._running.add(call)
        try:
            completions: list[Completion] = await call
            require_completions(request, completions, self._vocab_size)
            return completions
        except asyncio.CancelledError:
            if self._supervisor.failure is not None and call.cancelled():
                raise self._supervisor.failure from None
            raise
        except (TypeError, ValueError, AttributeError) as error:
            text = f"{self.actors.name} {number} returned an invalid completion: {type(error).__name__}: {error}"
            raise ActorError(text, "failed") from error
        finally:
            self._running.discard(call)

    async def _engine_with_room(self, aborts: int) -> int:
        """The engine with weights that has the least work; waits until there is such an engine. aborts: number of calls
        of abort() before the request; CancelledError after a further call."""
        while True:
            if self._supervisor.failure is not None:
                raise self._supervisor.failure
            if self._aborts > aborts:
                raise asyncio.CancelledError
            if self._supervisor.ready and not self._is_paused:
                return min(self._supervisor.ready, key=lambda number: (self._loads[number], number))
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(turn)
            try:
                await turn
            finally:
                self._waiting.discard(turn)

    def _fail_if_fatal(self, request: Request, failures: int, error: ActorError) -> None:
        """End the run if too many of several engines have failed while they worked on this request."""
        restarts = self._supervisor.restarts
        if failures > restarts.limit > 0 and len(self.actors) > 1:
            text = f"{failures} engines have failed while they worked on {request.id}"
            self._supervisor.fail(restarts.exhausted(text, error))

    def _deal(self) -> None:
        """Let waiting requests look for an engine."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    async def sync(self, version: int) -> Synced:
        """Send the trainers' current weights to every engine."""
        self.clock.pause(1)
        try:
            return await self._supervisor.sync(version)
        finally:
            self.clock.pause(-1)

    async def hold(self) -> None:
        """See RolloutEngine."""
        await self._supervisor.hold()

    async def pause(self) -> None:
        """Pause all requests."""
        self._is_paused = True
        await self._supervisor.call_ready("ask", "pause")

    async def resume(self) -> None:
        """Continue all requests."""
        await self._supervisor.call_ready("ask", "resume")
        self._is_paused = False
        self._deal()

    async def abort(self) -> None:
        """End running requests with their tokens so far, and cancel waiting requests, including repeated ones."""
        self._aborts += 1
        self._deal()
        await self._supervisor.call_ready("ask", "abort")

    async def sleep(self) -> None:
        """Free the engines' memory."""
        await self.hold()
        self._asleep = set(self._supervisor.ready)
        await self._supervisor.call_ready("ask", "sleep")

    async def wake(self, part: EnginePart) -> None:
        """Allocate memory again; see RolloutEngine.wake. An engine that was replaced meanwhile is awake."""
        await self._supervisor.call_ready("ask", "wake", part, among=self._asleep)

    async def close(self) -> None:
        """End all engines; errors of engines that have already ended are ignored."""
        await self._supervisor.close()
        ending = [self.actors.call_one(number, "close") for number in range(len(self.actors))]
        await asyncio.gather(*ending, return_exceptions=True)

    # ------------------------------------------------------------ engines that fail

    async def start_engine(self, number: int) -> EngineLocation:
        """See SupervisedPool."""
        visible = self._devices[number][0] if number < len(self._devices) else None
        await self.actors.call_one(number, "start", str(self._run), self._compute, visible)
        return await self._location(number)

    async def _location(self, number: int) -> EngineLocation:
        uuids = self._devices[number][1] if number < len(self._devices) else []
        host, torch = [await self.actors.call_one(number, method) for method in ("host", "torch_version")]
        return EngineLocation(host, tuple(uuids), torch)

    async def receive(self, number: int, ticket: Ticket, version: int) -> None:
        """See SupervisedPool."""
        await self.actors.call_one(number, "ask", "receive", ticket, version)

    async def read(self, number: int, folder: Path, version: int) -> None:
        """See ReadingPool."""
        await self.actors.call_one(number, "reload", folder, version)

    def engine_is_ready(self, number: int) -> None:
        """See SupervisedPool."""
        self.clock.ready(number)
        self._deal()

    def engine_is_lost(self, number: int) -> None:
        """See SupervisedPool."""
        self.clock.lost(number, gone=number >= self._first)
        self._losses[number] += 1
        self._asleep.discard(number)

    async def begin_again(self, number: int, runs: bool) -> None:
        """Does nothing: a server keeps its requests until it has weights again."""

    def end_requests(self, error: Exception) -> None:
        """See SupervisedPool."""
        self._deal()
        for call in self._running:
            call.cancel()


def check_engines(config: RlConfig) -> None:
    """Raise UserError if rollout.engine would run on this machine and its environment is missing or untested. For the
    hosts of a cluster, see check_hosts()."""
    if config.rollout.engine in SERVERS and config.cluster.address is None:
        interpreter_of(config)


async def check_hosts(config: RlConfig, standalone: ActorGroup | None) -> None:
    """Like check_engines(), on the hosts where Ray has placed the engines, before anything is loaded."""
    if standalone is not None and config.rollout.engine in SERVERS:
        is_local = Path(config.model.path).expanduser().is_dir()
        await gather_calls([standalone.call_one(n, "check", is_local) for n in range(config.rollout.count)])


async def devices_of_trainers(config: RlConfig, trainers: ActorGroup) -> list[tuple[str | None, list[str]]]:
    """(CUDA_VISIBLE_DEVICES, device UUIDs) of each server. A colocated server gets those of the rollout.tp trainer
    ranks whose devices it shares; UserError if these ranks are on several hosts. Otherwise (None, []): Ray chooses."""
    if config.cluster.placement != "colocated":
        return [(None, [])] * config.rollout.count
    rank_devices = await trainers.call_all("devices")
    devices: list[tuple[str | None, list[str]]] = []
    for number in range(config.rollout.count):
        ranks = shared_ranks(config, number)
        shared = [rank_devices[rank] for rank in ranks]
        if len({rank.host for rank in shared}) > 1:
            raise UserError(
                f"rollout.tp is {config.rollout.tp}, but trainer ranks {', '.join(map(str, ranks))}, whose devices "
                "one engine shares (cluster.placement=colocated), are on several hosts. Lower rollout.tp."
            )
        visible = ",".join(rank.visible for rank in shared if rank.visible) or None
        devices.append((visible, [uuid for rank in shared for uuid in rank.uuids]))
    return devices


async def open_engines(
    config: RlConfig,
    trainers: ActorGroup,
    standalone: ActorGroup | None,
    run: Path,
    compute: str,
    restarts: RestartBudget,
    parts: Sequence[Part] = (),
    sharing: Sequence[RankGroup] = (),
) -> EmbeddedPool | StandalonePool | ServedPool:
    """The engine pool of a run. Its engines have no weights until the first sync.

    standalone: the actors of separate engines. run: the run's folder. compute: the trainers' compute dtype, such as
    "bf16". restarts: the budget for replacing engines. parts: the parts of the groups in `sharing` (DeviceSharing)
    that sleep while servers start on their devices.
    """
    if config.rollout.engine == "embedded":
        return EmbeddedPool(trainers)
    assert standalone is not None
    vocab_size = hf.read_config(config.model.path).get_text_config().vocab_size
    if in_own_process(config.rollout.engine):
        standalone_pool = StandalonePool(
            standalone, trainers, restarts, vocab_size=vocab_size, timeout=config.rollout.timeout,
            keep=config.rollout.on_weight_update == "continue",
            first=config.rollout.count,
        )  # fmt: skip
        await standalone_pool.open()
        return standalone_pool
    devices = await devices_of_trainers(config, trainers)
    pool = ServedPool(config, standalone, trainers, restarts, run.absolute(), compute, vocab_size, devices)
    try:
        await pool.locate()
        if parts:
            await gather_calls([group.call_all("sleep", list(parts)) for group in sharing])
        await pool.open()
    except BaseException:
        await pool.close()
        raise
    return pool
