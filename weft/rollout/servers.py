"""Rollout engines that are servers of their own: started by the config, and several of them as one RolloutEngine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.config.rl_schema import RlConfig
from weft.rollout.base import Completion, Request
from weft.rollout.served import together
from weft.rollout.sglang import SglangEngine
from weft.rollout.sync.wire import Ticket
from weft.rollout.vllm.engine import VllmEngine
from weft.rollout.vllm.interpreter import Interpreter, find, program_of
from weft.rollout.vllm.server import settings_of

Server = VllmEngine | SglangEngine


def interpreter_of(config: RlConfig) -> Interpreter:
    """The Python that rollout.engine runs with. Raises UserError, with what to do, where there is none."""
    if config.rollout.engine == "vllm":
        return find(config.rollout.python)
    assert config.rollout.python is not None, "checked with the config"
    return Interpreter(program_of(Path(config.rollout.python).expanduser()), "", cpu=False)


def server_names(config: RlConfig) -> list[str]:
    """Of the engines, as in "vllm-0": in messages, of their logs, and for weight sync."""
    return [f"{config.rollout.engine}-{number}" for number in range(config.rollout.engines)]


async def start(
    config: RlConfig, name: str, run: Path, compute: str, version: int | None, devices: str | None = None
) -> Server:
    """Start one engine and wait until it answers.

    name: of server_names. run: its log goes to RUN/engines. compute: the trainer's dtype, as in "bf16". version: of the
    weights at model.path; None: those are not to be sampled from, and requests wait for the first sync. devices: its
    CUDA_VISIBLE_DEVICES; None: as this process's.
    """
    waits = version is None and config.rollout.engine == "vllm"
    settings = settings_of(config, interpreter_of(config), name, run, compute, weights=not waits)
    if devices is not None:
        settings = replace(settings, variables={"CUDA_VISIBLE_DEVICES": devices})
    if config.rollout.engine == "sglang":
        return await SglangEngine.start(settings, version or 0)
    return await VllmEngine.start(settings, version)


class ServerPool:
    """Implements RolloutEngine. A request goes whole to the engine that has least to do: its samples share the cache of
    their prompt. When an engine dies, whoever waits for it learns so, and the pool is to be closed."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self._loads = [0] * len(self.servers)

    @classmethod
    async def start(
        cls, config: RlConfig, run: Path, compute: str, version: int | None = None,
        devices: Sequence[str | None] | None = None,
    ) -> ServerPool:  # fmt: skip
        """All engines of the config, started side by side; as `start` for each."""
        names = server_names(config)
        each = zip(names, devices or [None] * len(names), strict=True)
        calls = [asyncio.ensure_future(start(config, name, run, compute, version, own)) for name, own in each]
        done = await asyncio.gather(*calls, return_exceptions=True)
        servers = [server for server in done if not isinstance(server, BaseException)]
        errors = [error for error in done if isinstance(error, BaseException)]
        if errors:
            await together(server.close() for server in servers)
            raise errors[0]
        return cls(servers)

    async def generate(self, request: Request) -> list[Completion]:
        """One completion for each of the request's seeds."""
        place = min(range(len(self.servers)), key=lambda n: (self._loads[n], n))
        load = len(request.seeds) * (len(request.tokens) + request.sampling.max_new_tokens)
        self._loads[place] += load
        try:
            return await self.servers[place].generate(request)
        finally:
            self._loads[place] -= load

    async def receive(self, tickets: Mapping[str, Sequence[Ticket]], version: int) -> None:
        """Each engine takes this version with its ticket (Sender.tickets), while the sender sends it."""
        await together(
            server.receive(tickets[server.settings.name][0], version)
            for server in self.servers
            if isinstance(server, VllmEngine)
        )

    async def reload(self, folder: Path, version: int) -> None:
        """Each engine takes all weights from a HuggingFace directory."""
        await together(server.reload(folder, version) for server in self.servers)

    async def pause(self) -> None:
        """Hold all that is being generated."""
        await together(server.pause() for server in self.servers)

    async def resume(self) -> None:
        """Go on with it."""
        await together(server.resume() for server in self.servers)

    async def abort(self) -> None:
        """End all that is being generated."""
        await together(server.abort() for server in self.servers)

    async def sleep(self) -> None:
        """Give up memory."""
        await together(server.sleep() for server in self.servers)

    async def wake(self) -> None:
        """Take memory again."""
        await together(server.wake() for server in self.servers)

    async def close(self) -> None:
        """End all engines."""
        await together(server.close() for server in self.servers)
