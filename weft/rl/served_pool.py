"""The rollout engines of a run: servers as one RolloutEngine, and the choice of the pool for rollout.engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.config.conditions import SERVERS, in_own_process
from weft.config.rl_schema import RlConfig
from weft.engine.sleep import Part
from weft.errors import ActorError, UserError
from weft.inference.base import Completion, EnginePart, Request, Synced
from weft.inference.servers import interpreter_of, server_names
from weft.inference.weight_sync.protocol import Ticket
from weft.inference.weight_sync.sender import SyncFailure
from weft.launch.ray_actors import ActorGroup, gather_calls
from weft.models import hf
from weft.rl.batch_pool import EmbeddedPool, StandalonePool
from weft.rl.engine_supervisor import decline_on_error
from weft.rl.placement import shared_ranks
from weft.rl.restarts import RestartBudget
from weft.rl.trainer_group import RankGroup


class ServedPool:
    """A RolloutEngine over actors that each run a server (HostedServer), on any host.

    All samples of a request go to the engine with the least work, so that they share the prompt's cache. vLLM gets
    weights by weight sync, SGLang from HuggingFace directories.
    """

    def __init__(
        self, actors: ActorGroup, trainers: ActorGroup, tickets: Mapping[str, Sequence[Ticket]], folder: Path
    ) -> None:
        """tickets: of each vLLM engine; empty for SGLang. folder: where SGLang's directories are written."""
        self.actors = actors
        self._trainers, self._tickets, self._folder = (
            trainers,
            [engine_tickets[0] for engine_tickets in tickets.values()],
            folder,
        )
        self._loads = [0] * len(actors)
        self.drawn = 0  # tokens of completed requests

    async def generate(self, request: Request) -> list[Completion]:
        """One completion per seed of the request."""
        index = min(range(len(self._loads)), key=lambda n: (self._loads[n], n))
        load = len(request.seeds) * (len(request.tokens) + request.sampling.max_new_tokens)
        self._loads[index] += load
        try:
            completions: list[Completion] = await self.actors.call_one(index, "ask", "generate", request)
            self.drawn += sum(len(completion.tokens) for completion in completions)
            return completions
        finally:
            self._loads[index] -= load

    async def sync(self, version: int) -> Synced:
        """Send the trainers' current weights to every engine."""
        synced: Synced
        if self._tickets:
            taking = [
                decline_on_error(self.actors.call_one(n, "ask", "receive", ticket, version), ticket)
                for n, ticket in enumerate(self._tickets)
            ]
            try:
                (synced, *_), *_ = await gather_calls([self._send(version), *taking])
            except ActorError as error:
                raise self.actors.blamed(error) from error
            return synced
        folder = self._folder / f"version-{version}"
        synced = (await self._trainers.call_all("export", str(folder), version))[0]
        await self.actors.call_all("reload", folder, version)
        shutil.rmtree(folder)
        return synced

    async def _send(self, version: int) -> list[Synced]:
        """What the trainers have sent. ActorError if they could not."""
        sent = await self._trainers.call_all("send", version)
        if isinstance(sent[0], SyncFailure):
            raise sent[0].error()
        return sent

    async def hold(self) -> None:
        """Does nothing: only a sync sends weights."""

    async def pause(self) -> None:
        """Pause all requests."""
        await self.actors.call_all("ask", "pause")

    async def resume(self) -> None:
        """Continue all requests."""
        await self.actors.call_all("ask", "resume")

    async def abort(self) -> None:
        """End all requests."""
        await self.actors.call_all("ask", "abort")

    async def sleep(self) -> None:
        """Free the engines' memory."""
        await self.actors.call_all("ask", "sleep")

    async def wake(self, part: EnginePart) -> None:
        """Allocate memory again; see RolloutEngine.wake."""
        await self.actors.call_all("ask", "wake", part)

    async def close(self) -> None:
        """End all engines; errors of engines that have already ended are ignored."""
        ending = [self.actors.call_one(number, "close") for number in range(len(self.actors))]
        await asyncio.gather(*ending, return_exceptions=True)


def check_engines(config: RlConfig) -> None:
    """Raise UserError if rollout.engine would run on this machine and its environment is missing or untested. For the
    hosts of a cluster, see check_hosts()."""
    if config.rollout.engine in SERVERS and config.cluster.address is None:
        interpreter_of(config)


async def check_hosts(config: RlConfig, standalone: ActorGroup | None) -> None:
    """Like check_engines(), on the hosts where Ray has placed the engines, before anything is loaded."""
    if standalone is not None and config.rollout.engine in SERVERS:
        await standalone.call_all("check", Path(config.model.path).expanduser().is_dir())


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
                f"rollout.tp is {config.rollout.tp}, but trainer ranks {', '.join(map(str, ranks))}, whose devices an "
                "engine is to have (cluster.placement=colocated), are on several hosts: set rollout.tp to fewer."
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
    if in_own_process(config.rollout.engine):
        vocab_size = hf.read_config(config.model.path).get_text_config().vocab_size
        standalone_pool = StandalonePool(
            standalone, trainers, restarts, vocab_size=vocab_size, timeout=config.rollout.timeout,
            keep=config.rollout.on_weight_update == "continue",
            first=config.rollout.count,
        )  # fmt: skip
        await standalone_pool.open()
        return standalone_pool
    takes = config.rollout.engine == "vllm"
    hosts = dict(zip(server_names(config), await standalone.call_all("host"), strict=True)) if takes else {}
    devices = await devices_of_trainers(config, trainers)
    visible = dict(zip(hosts, (uuids for _, uuids in devices), strict=False))  # hosts: empty for SGLang
    torches = dict(zip(hosts, await standalone.call_all("torch_version"), strict=True)) if takes else {}
    tickets = (await trainers.call_all("open_sync", hosts, config.rollout.tp, visible, torches))[0]
    run = run.absolute()
    pool = ServedPool(standalone, trainers, tickets, run / "engines")
    try:
        if parts:
            await gather_calls([group.call_all("sleep", list(parts)) for group in sharing])
        starting = [
            standalone.call_one(n, "start", str(run), compute, visible_devices)
            for n, (visible_devices, _) in enumerate(devices)
        ]
        await gather_calls(starting)
    except BaseException:
        await pool.close()
        raise
    return pool
