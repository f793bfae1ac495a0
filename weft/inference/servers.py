"""Rollout engines that are servers; an actor on the same host starts, calls and ends each."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config.rl_schema import RlConfig
from weft.errors import ActorError, UserError
from weft.inference.sglang import SglangEngine
from weft.inference.vllm.engine import VllmEngine
from weft.inference.vllm.interpreter import Interpreter, find, program_of
from weft.inference.vllm.server import settings_of
from weft.inference.weight_sync.protocol import SyncError
from weft.launch import flight
from weft.launch.machine import host_address

CALLS = 10_000  # concurrent calls of an actor, so that a pause or abort does not wait for pending requests
_VARIABLES = ("VLLM_", "SGLANG_", "SGL_")
_BEAT = 1.0  # seconds between two heartbeats


def interpreter_of(config: RlConfig) -> Interpreter:
    """The local Python that runs rollout.engine. UserError, with what to do, if there is none or if its vLLM has an
    untested version."""
    if config.rollout.engine == "vllm":
        return find(config.rollout.python)
    assert config.rollout.python is not None, "checked with the config"
    program = program_of(Path(config.rollout.python).expanduser())
    if not program.is_file():
        raise UserError(f"rollout.python: there is no Python at {program} to run SGLang.")
    return Interpreter(program, "", cpu=False)


def server_names(config: RlConfig) -> list[str]:
    """The names of the engines, such as "vllm-0", for messages, logs and weight sync; including engines that may join
    later."""
    count = config.cluster.engines.get("max", config.rollout.count)
    return [f"{config.rollout.engine}-{number}" for number in range(count)]


def server_variables() -> dict[str, str]:
    """This process's environment variables that configure engines; the actors get them on every host."""
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


class HostedServer:
    """The object in an actor: one engine that is a server on the actor's host.

    Calls may be concurrent. The server has the actor's environment and accelerators, and ends whenever the actor ends.
    """

    def __init__(self, config: RlConfig, number: int) -> None:
        self._config, self._name = config, server_names(config)[number]
        self._engine: VllmEngine | SglangEngine | None = None
        self._beating: asyncio.Task[None] | None = None

    async def host(self) -> str:
        """This host's address."""
        return host_address()

    async def torch_version(self) -> str:
        """The version of torch in the server's environment, which receives weights."""
        with _located():
            return interpreter_of(self._config).torch

    async def check(self, model_is_local: bool) -> None:
        """Raise UserError if the engine could not run on this host. model_is_local: whether model.path is a folder on
        the controller's host."""
        with _located():
            interpreter, memory = interpreter_of(self._config), self._config.rollout.gpu_memory_utilization
            if interpreter.cpu and memory is not None and memory % 1:
                raise UserError(
                    f"rollout.gpu_memory_utilization is {memory:g}: on CPU this key is vLLM's cache in GiB, an "
                    "integer of at least 1. Set it to 1 or more."
                )
            path = self._config.model.path
            if model_is_local and not Path(path).expanduser().is_dir():
                raise UserError(
                    f"model.path: {self._name} reads config and tokenizer from {path}, which does not exist on its "
                    "host. Put it on a file system that all hosts share, or at the same path on each host."
                )

    async def start(self, run: str, compute: str, devices: str | None = None) -> None:
        """Start the server, unless it runs, and wait until it responds. It must not sample before the first sync. run:
        the run's folder; the log goes to RUN/engines on this host. compute: the trainers' compute dtype, such as
        "bf16". devices: CUDA_VISIBLE_DEVICES of the server; None: the actor's."""
        if self._engine is not None:
            return
        flight.watch(self._config.rollout.timeout, "rollout.timeout")
        flight.enter("serve")
        self._beating = asyncio.create_task(_beat())
        with _located():
            is_vllm = self._config.rollout.engine == "vllm"
            settings = settings_of(
                self._config, interpreter_of(self._config), self._name, Path(run), compute, weights=not is_vllm
            )
            if devices is not None:
                settings = replace(settings, variables={"CUDA_VISIBLE_DEVICES": devices})
            if is_vllm:
                self._engine = await VllmEngine.start(settings, version=None)
            else:
                self._engine = await SglangEngine.start(settings)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the engine, of RolloutEngine or `receive`; returns its result."""
        assert self._engine is not None, "call start() first"
        with _located():
            return await getattr(self._engine, method)(*args)

    async def reload(self, folder: Path, version: int) -> None:
        """Load all weights from a HuggingFace directory."""
        with _located():
            if not folder.is_dir():
                raise UserError(
                    f"run.dir: {self._name} reads weights from {folder}, which does not exist on its host. Put "
                    "run.dir on a file system that all hosts share."
                )
        await self.ask("reload", folder, version)

    async def close(self) -> None:
        """End the server and all its processes."""
        if self._beating is not None:
            self._beating.cancel()
            flight.enter(flight.ENDLESS)
        if self._engine is not None:
            await self._engine.close()


async def _beat() -> None:
    """Record a heartbeat regularly: an event loop that records none for rollout.timeout counts as hanging."""
    while True:
        flight.beat()
        await asyncio.sleep(_BEAT)


@contextmanager
def _located() -> Iterator[None]:
    """Inside, on a cluster, errors get a note with the host. A SyncError becomes an ActorError."""
    try:
        yield
    except Exception as error:
        raised = ActorError(str(error), "failed") if isinstance(error, SyncError) else error
        if host_address() != "127.0.0.1":
            raised.add_note(f"This was on host {socket.gethostname()} ({host_address()}).")
        if raised is error:
            raise
        raise raised from error
