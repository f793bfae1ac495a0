"""Calls to a rollout engine that is a server. Every call ends, whatever happens to the server.

A request that the server refuses (status 4xx) is a UserError: another server would refuse it, too.

The server counts as dead when its process has exited, its health route reports an error, nothing listens, or it hangs.
Then every call raises EngineDiedError and the server's processes are killed. It counts as hanging when no request has
finished for `silence` seconds although some are pending and it is not paused. A single request has no time limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from weft.errors import UserError
from weft.inference.http import Address, RefusedError
from weft.inference.process import EngineDiedError, EngineProcess

_LOOK = 0.5  # seconds between two looks at the server
_PATIENCE = 10.0  # seconds that the health route may take
_DEAF = 2.0  # seconds without a listener before the server counts as dead: its exit may wait forever for requests
_EXIT_NOTICED = 5.0  # seconds within which the end of a server is noticed
_NAMED = 6  # most requests that a message names


class Served:
    """process: the server's. address: where the server listens, or will listen. health: path of its health route.
    silence: seconds, as above."""

    def __init__(self, process: EngineProcess, address: Address, health: str, silence: float) -> None:
        self._process, self._address, self._health, self._silence = process, address, health, silence
        self._waiting: dict[int, str] = {}
        self._lost_requests: list[str] = []  # pending requests when the server died
        self._last_answer = time.monotonic()
        self._deaf: float | None = None  # since when nothing listens
        self._is_paused = self._hangs = False
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch: asyncio.Task[None] | None = None

    async def wait_ready(self, limit: float) -> None:
        """Wait until the server responds. EngineDiedError, with the end of its log, if it exits first or takes more
        than `limit` seconds (rollout.start_timeout)."""
        deadline = time.monotonic() + limit
        while True:
            if self._process.status is not None:
                raise EngineDiedError(self._message(f"ended with status {self._process.status}", "starting"))
            if time.monotonic() > deadline:
                await self._process.close()
                reason = f"was not ready after {limit:g} s (rollout.start_timeout)"
                raise EngineDiedError(self._message(reason, "starting"), "hang")
            with suppress(ConnectionError, RefusedError, TimeoutError):
                async with asyncio.timeout(self._silence):
                    await self._address.call("GET", self._health)
                break
            await asyncio.sleep(_LOOK)
        self._watch = asyncio.create_task(self._watched())

    async def work(self, path: str, body: Mapping[str, Any], description: str) -> Any:
        """The response to a POST request that generates. description: names the request in messages."""
        if not self._waiting:
            self._last_answer = time.monotonic()
        task = asyncio.ensure_future(self._address.call("POST", path, body))
        self._waiting[id(task)] = description
        try:
            answer = await self._answer(task, description, None)
        finally:
            self._waiting.pop(id(task))
        self._last_answer = time.monotonic()
        return answer

    async def order(self, path: str, body: Mapping[str, Any] | None, description: str) -> Any:
        """The response to any other POST request; the server counts as hanging if it takes `silence` seconds.
        description: names the request in messages."""
        return await self._answer(
            asyncio.ensure_future(self._address.call("POST", path, body)), description, self._silence
        )

    def set_paused(self, is_paused: bool) -> None:
        """Record whether the server is paused."""
        self._is_paused, self._last_answer = is_paused, time.monotonic()

    async def close(self) -> None:
        """End the server. Pending calls raise EngineDiedError."""
        await self._die("was closed")
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    async def _watched(self) -> None:
        while (reason := await self._trouble()) is None:
            await asyncio.sleep(_LOOK)
        await self._die(reason)

    async def _trouble(self) -> str | None:
        if self._process.status is not None:
            return f"ended with status {self._process.status}"
        silent = time.monotonic() - self._last_answer
        if self._waiting and not self._is_paused and silent > self._silence:
            self._hangs = True
            return f"has finished nothing for {silent:.0f} s"
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._address.call("GET", self._health)
        except RefusedError as error:
            return f"reports that it is broken: {self._health} returned status {error.status}"
        except TimeoutError:
            return None  # a dead server will be noticed by its exit or its silence
        except ConnectionError as error:
            refused = isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError)
            self._deaf = (self._deaf or time.monotonic()) if refused else None
            return "no longer listens" if self._deaf is not None and time.monotonic() - self._deaf > _DEAF else None
        self._deaf = None
        return None

    async def _die(self, reason: str) -> None:
        if not self._dead.done():
            self._lost_requests = sorted(set(self._waiting.values()))
            self._dead.set_result(reason)
        await self._process.close()

    async def _answer(self, task: asyncio.Future[Any], description: str, limit: float | None) -> Any:
        try:
            await asyncio.wait({task, self._dead}, return_when=asyncio.FIRST_COMPLETED, timeout=limit)
            if task.done() and not _may_be_dead(error := task.exception()):
                if isinstance(error, RefusedError) and error.is_final:
                    name, log = self._process.name, self._process.log
                    raise UserError(
                        f"rollout engine {name} refused a request while {description}, and would refuse it again: "
                        f"{error}. Check the server's options (rollout.engine_kwargs), its version, and {log}."
                    ) from error
                return task.result()
            if not task.done() and not self._dead.done():
                self._hangs = True
                await self._die(f"has not answered for {limit:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_NOTICED):
                    reason = await asyncio.shield(self._dead)
                    raise EngineDiedError(self._message(reason, description), "hang" if self._hangs else "killed")
            if isinstance(task.exception(), RefusedError):
                return task.result()  # raises RefusedError: the server runs but refused the call
            raise EngineDiedError(self._message(f"closed the connection ({task.exception()})", description))
        finally:
            task.cancel()

    def _message(self, reason: str, description: str) -> str:
        lost = [name for name in self._lost_requests if name != description]
        also = f" (and while {', '.join(lost[:_NAMED])}{', ...' if len(lost) > _NAMED else ''})" if lost else ""
        return f"rollout engine {self._process.name} {reason} while {description}{also}.\n{self._process.tail()}"


def _may_be_dead(error: BaseException | None) -> bool:
    """Whether this error shows that the server, or a process that it needs, has ended."""
    return isinstance(error, ConnectionError) or (isinstance(error, RefusedError) and error.status >= 500)


async def gather_or_cancel(calls: Iterable[Any]) -> list[Any]:
    """Await all calls; returns the results in order. If one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
