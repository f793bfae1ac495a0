"""Processes that run reward functions: one that crashes or hangs is replaced, and only its samples know of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import weft
from weft.errors import UserError
from weft.rl.reward_calls import Batch, Described, Named, Outcome
from weft.rl.reward_worker import HEADER, packed

_START = 120.0  # seconds that a process may take to import the functions


class WorkerError(Exception):
    """The process ended, or did not answer in time; the message says which."""


class Worker:
    """One process. It answers one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.described: list[Described] = []

    @classmethod
    async def start(cls, functions: Sequence[Named]) -> Worker:
        """Raises UserError where a function cannot be imported."""
        root = str(Path(weft.__file__).parent.parent)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "weft.rl.reward_worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _joined(root, os.environ.get("PYTHONPATH"))},
            start_new_session=True,
        )  # fmt: skip
        worker = cls(process)
        try:
            answer = await worker.ask((sys.path, list(functions)), _START)
        except WorkerError as error:
            raise UserError(f"rl.reward: the process that imports {_names(functions)} {error}.") from None
        if isinstance(answer, str):
            await worker.end()
            raise UserError(answer)
        worker.described = answer
        return worker

    async def ask(self, request: Any, timeout: float) -> Any:
        """The answer. Raises WorkerError, after which the process is gone."""
        try:
            async with asyncio.timeout(timeout):
                return await self._ask(request)
        except TimeoutError:
            await self.end()
            raise WorkerError(f"gave no answer within {timeout:g} seconds") from None
        except (asyncio.IncompleteReadError, ConnectionError, pickle.UnpicklingError):
            await self.end()
            raise WorkerError(_ending(self._process.returncode)) from None
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _ask(self, request: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(packed(request))
        await stdin.drain()
        (size,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
        return pickle.loads(await stdout.readexactly(size))

    async def end(self) -> None:
        """Ends the process and what it has started, whatever it is doing."""
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """As `end`, without waiting for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class RewardPool:
    """So many processes, each started when it is first needed."""

    def __init__(self, functions: Sequence[Named], size: int, timeout: float) -> None:
        """timeout: seconds of one call."""
        self._functions, self._timeout = functions, timeout
        self._free: asyncio.LifoQueue[Worker | None] = asyncio.LifoQueue()
        self._workers: set[Worker] = set()
        for _ in range(size):
            self._free.put_nowait(None)

    async def describe(self) -> list[Described]:
        """What is known of each function. Raises UserError where one cannot be imported."""
        worker = await self._take()
        self._free.put_nowait(worker)
        return worker.described

    async def call(self, number: int, batch: Batch) -> list[Outcome]:
        """What function `number` makes of a batch. Where its process crashes or hangs, each sample is tried alone."""
        try:
            return await self._ask((number, batch))
        except WorkerError as error:
            if len(batch) == 1:
                return [Outcome(None, f"the function's process {error}")]
        alone = await asyncio.gather(*(self.call(number, batch.only(i)) for i in range(len(batch))))
        return [outcome for outcomes in alone for outcome in outcomes]

    async def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            await worker.end()
        self._workers.clear()

    async def _ask(self, request: Any) -> Any:
        worker = await self._take()
        try:
            answer = await worker.ask(request, self._timeout)
        except BaseException:
            self._workers.discard(worker)
            self._free.put_nowait(None)
            raise
        self._free.put_nowait(worker)
        return answer

    async def _take(self) -> Worker:
        worker = await self._free.get()
        if worker is None:
            try:
                worker = await Worker.start(self._functions)
            except BaseException:
                self._free.put_nowait(None)
                raise
            self._workers.add(worker)
        return worker


def _joined(root: str, path: str | None) -> str:
    return root if not path else os.pathsep.join((root, path))


def _names(functions: Sequence[Named]) -> str:
    return ", ".join(function.path for function in functions)


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by signal {-status}"
    return f"ended with status {status}"
