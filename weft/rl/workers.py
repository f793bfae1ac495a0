"""The controller's side of processes that run user code. A process that crashes or hangs is killed."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from weft.errors import ActorError, UserError, first_line
from weft.launch import reaper
from weft.rl.user_process import HEADER, IMPORT_SECONDS, packed
from weft.version import PACKAGE

PARENT_LOST = "ended with its parent process, which was killed or stopped: user code must not do that"
_OBEYS_SECONDS = 10.0  # seconds for a supervisor to end its processes


class WorkerError(Exception):
    """A process ended, answered something unreadable, or exceeded the time limit (late). The message is PARENT_LOST if
    its parent process was killed or stopped."""

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Worker:
    """One process, which answers one request at a time. ended: waits until the process has ended and returns its exit
    status (negative: the signal), or None if its parent process has ended. kill: kills the process and its children,
    without waiting."""

    def __init__(
        self,
        answers: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
        ended: Callable[[], Awaitable[int | None]],
        kill: Callable[[], None],
    ) -> None:
        self._answers, self._requests, self._ended, self.kill = answers, requests, ended, kill

    async def ask(self, request: Any, timeout: float) -> Any:
        """The answer to a request. timeout: seconds. WorkerError if there is no answer; the process is then ended."""
        try:
            async with asyncio.timeout(timeout):
                return await self._ask(request)
        except TimeoutError:
            if await self.end() is None:
                raise WorkerError(PARENT_LOST) from None
            raise WorkerError(f"gave no answer within {timeout:g} seconds", late=True) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerError(_ending(await self.end())) from None
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _ask(self, request: Any) -> Any:
        self._requests.write(packed(request))
        await self._requests.drain()
        (size,) = HEADER.unpack(await self._answers.readexactly(HEADER.size))
        data = await self._answers.readexactly(size)
        try:
            return pickle.loads(data)
        except Exception as error:  # a type that only that process can import, or stray output on the connection
            await self.end()
            raise WorkerError(f"sent an unreadable answer: {first_line(error)}") from error

    async def end(self) -> int | None:
        """Kill the process and its children, and wait; returns its exit status."""
        self.kill()
        status = await self._ended()
        self._requests.close()
        return status


async def start_worker(
    module: str, hello: Any, refused: str, words: Sequence[str] = (), pass_fds: Sequence[int] = ()
) -> tuple[Worker, Any]:
    """Start `python -m module`; returns the worker and its answer to the first request, (import folders, hello).

    UserError if the process dies on this request, with a message that begins with `refused`, or if it answers with a
    string, which is the message. ActorError if it or its parent process was killed, so that `--restarts` tries again.
    words: command-line arguments. pass_fds: file descriptors to inherit.
    """
    root, run = str(PACKAGE.parent), reaper.current()
    worker_socket, child_socket = socket.socketpair()
    with child_socket:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            stdin=child_socket.fileno(), stdout=child_socket.fileno(), pass_fds=pass_fds,
            env={
                **os.environ, **run.mark, "OMP_NUM_THREADS": "1",
                "PYTHONPATH": _joined(root, os.environ.get("PYTHONPATH")),
            },
            start_new_session=True,
        )  # fmt: skip
    run.add(process.pid)
    threading.Thread(target=process.wait, name=f"weft end of {module}", daemon=True).start()  # it is no zombie
    answers, requests = await asyncio.open_connection(sock=worker_socket)

    async def ended() -> int | None:
        """Wait for the supervisor; returns the status of its child. asyncio's wait would only return when all copies of
        the pipes are closed, and user code may pass them to other processes."""
        deadline = time.monotonic() + _OBEYS_SECONDS
        while (status := process.poll()) is None:
            if time.monotonic() > deadline:
                process.kill()  # the supervisor is stopped; its processes end with it
            await asyncio.sleep(0.01)
        if status < 0:
            return None
        return status if status <= 128 else 128 - status

    worker = Worker(answers, requests, ended, process.terminate)
    try:
        answer = await worker.ask((sys.path, hello), IMPORT_SECONDS)
    except WorkerError as error:
        if str(error) in (PARENT_LOST, _ending(-signal.SIGKILL)):
            raise ActorError(f"{refused} {error}.", "killed") from None
        raise UserError(f"{refused} {error}.") from None
    if isinstance(answer, str):
        await worker.end()
        raise UserError(answer)
    return worker, answer


def _joined(root: str, path: str | None) -> str:
    return root if not path else os.pathsep.join((root, path))


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by signal {-status}"
    if status is None:
        return PARENT_LOST
    return f"ended with status {status}"
