"""The controller's side of the processes of environments and agents: one process per conversation."""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
from collections.abc import Callable
from contextlib import suppress

from weft.rl.environments.worker import ENDED, ORDER
from weft.rl.workers import Worker, start_worker

_OBEYS_SECONDS = 10.0  # within which the fork server must end a process
_AT_ONCE = 1024  # the most open conversations; further ones wait


class EnvironmentPool:
    """Starts one process per conversation with the environment class at this import path, or with an agent. key: which
    key of the config names it, `rl.environment` or `rl.agent`."""

    def __init__(self, path: str, at_once: int = _AT_ONCE, key: str = "rl.environment") -> None:
        self.path, self.key = path, key
        self._room = asyncio.Semaphore(at_once)
        self._server: _ForkServer | None = None
        self._starting = asyncio.Lock()

    async def open(self) -> Worker:
        """A new process for one conversation; the caller must end it. Waits while `at_once` conversations are open.
        UserError if the class cannot be imported."""
        await self._room.acquire()
        async with self._starting:
            if self._server is None or not self._server.alive:
                self._server = await _ForkServer.start(self.key, self.path)
        return await self._server.open(self._room.release)

    async def close(self) -> None:
        """End all processes."""
        if self._server is not None:
            await self._server.close()
            self._server = None


class _ForkServer:
    """The process that environment processes are forked from (environment_worker.py)."""

    def __init__(self, worker: Worker, control: socket.socket) -> None:
        self.alive = True
        self._worker, self._control = worker, control
        self._numbers = itertools.count(1)
        self._ended = dict[int, asyncio.Future[int | None]]()
        self._listening = b""
        asyncio.get_running_loop().add_reader(control.fileno(), self._listen)

    @classmethod
    async def start(cls, key: str, path: str) -> _ForkServer:
        _allow_many_files()
        control, server_end = socket.socketpair()
        with server_end:
            words, descriptors = [str(server_end.fileno())], [server_end.fileno()]
            refused = f"{key}: the process that imports {path}"
            try:
                worker, _ = await start_worker("weft.rl.environments.worker", (key, path), refused, words, descriptors)
            except BaseException:
                control.close()
                raise
        return cls(worker, control)

    async def open(self, when_ended: Callable[[], None]) -> Worker:
        number = next(self._numbers)
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        ended.add_done_callback(lambda _: when_ended())
        connection, child_end = socket.socketpair()
        with child_end:
            self._ended[number] = ended
            try:
                socket.send_fds(self._control, [ORDER.pack(number)], [child_end.fileno()])
            except OSError:
                self._lost()  # resolves `ended`, so the caller's next request fails
        answers, requests = await asyncio.open_connection(sock=connection)

        def kill() -> None:
            if not ended.done():
                with suppress(OSError):
                    self._control.sendall(ORDER.pack(-number))
                asyncio.get_running_loop().call_later(_OBEYS_SECONDS, self._require_end, ended)

        return Worker(answers, requests, lambda: asyncio.shield(ended), kill)

    async def close(self) -> None:
        self._lost()
        await self._worker.end()

    def _listen(self) -> None:
        try:
            data = self._control.recv(1 << 12)
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        self._listening += data
        while len(self._listening) >= ENDED.size:
            number, status = ENDED.unpack_from(self._listening)
            self._listening = self._listening[ENDED.size :]
            self._ended.pop(number).set_result(status)

    def _require_end(self, ended: asyncio.Future[int | None]) -> None:
        """Kill a fork server that does not react, perhaps because it is stopped; its forked processes end with it."""
        if not ended.done():
            self._worker.kill()
            self._lost()

    def _lost(self) -> None:
        """Mark the fork server as gone. Its forked processes end with it, with unknown status."""
        if self.alive:
            self.alive = False
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
        while self._ended:
            self._ended.popitem()[1].set_result(None)


def _allow_many_files() -> None:
    """Raise the limit on open files: each of hundreds of simultaneous conversations has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard_limit = hard if hard != resource.RLIM_INFINITY else 1 << 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard_limit, 1 << 16)), hard))
