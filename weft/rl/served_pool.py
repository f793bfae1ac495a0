"""The rollout engines of a run, and how the trainers' weights reach those that are processes of their own."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.cluster.rays import ActorGroup, controller_address
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.rl.pool import EmbeddedPool, StandalonePool
from weft.rollout.base import Synced
from weft.rollout.servers import Server, ServerPool, interpreter_of, server_names
from weft.rollout.sync.wire import Ticket


class ServedPool(ServerPool):
    """Servers beside the controller, which get weights from the trainers: vLLM by weft's sync, SGLang by directories.

    tickets: of each vLLM. folder: of the directories.
    """

    def __init__(
        self, servers: Sequence[Server], trainers: ActorGroup, tickets: Mapping[str, Sequence[Ticket]], folder: Path
    ) -> None:
        super().__init__(servers)
        self._trainers, self._tickets, self._folder = trainers, tickets, folder

    async def sync(self, version: int) -> Synced:
        """Bring every engine to the trainers' weights as they are now."""
        if self._tickets:
            sending = asyncio.ensure_future(self._trainers.all("send", version))
            await asyncio.gather(sending, self.receive(self._tickets, version))
            return sending.result()[0]
        folder = self._folder / f"version-{version}"
        synced: Synced = (await self._trainers.all("export", str(folder), version))[0]
        await self.reload(folder, version)
        shutil.rmtree(folder)
        return synced


class Reserved:
    """An actor that holds accelerators for a server, which is started beside the controller."""

    def devices(self) -> tuple[str, str]:
        """(host, CUDA_VISIBLE_DEVICES) of what Ray has given to it."""
        return socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


async def devices_of(reserved: ActorGroup | None, servers: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server; None: as the controller's. UserError where Ray has put one elsewhere."""
    if reserved is None:
        return [None] * servers
    found = await reserved.all("devices")
    for host, _ in found:
        if host != socket.gethostname():
            raise UserError(
                f"rollout.engine: engines that are servers run beside the controller, on {socket.gethostname()}, and "
                f"the cluster has room for one on {host} only: set rollout.engines to fewer, or cluster.trainer."
            )
    return [devices for _, devices in found]


def check_engines(config: RlConfig) -> None:
    """Raises UserError where rollout.engine has no environment to run in, or one that is not as tested."""
    if config.rollout.engine in ("vllm", "sglang"):
        interpreter_of(config)


async def open_engines(
    config: RlConfig, trainers: ActorGroup, standalone: ActorGroup | None, run: Path
) -> EmbeddedPool | StandalonePool | ServedPool:
    """What generates in this run; it has no weights until its first sync. standalone: actors of rollout.engine=hf, or
    those that hold accelerators for servers. run: its folder."""
    if config.rollout.engine == "embedded":
        return EmbeddedPool(trainers)
    if config.rollout.engine == "hf":
        assert standalone is not None
        hosts = {f"hf-{number}": host for number, host in enumerate(await standalone.all("host"))}
        _, tickets = (await trainers.all("open_sync", hosts, 1))[0]
        return StandalonePool(standalone, trainers, tickets)
    here = controller_address(config.cluster.address)
    hosts = dict.fromkeys(server_names(config), here) if config.rollout.engine == "vllm" else {}
    compute, tickets = (await trainers.all("open_sync", hosts, config.rollout.tp))[0]
    devices = await devices_of(standalone, config.rollout.engines)
    pool = await ServerPool.start(config, run, compute, devices=devices)
    return ServedPool(pool.servers, trainers, tickets, run / "engines")
