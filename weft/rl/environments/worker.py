"""The fork server of environments and agents. It imports the user's code once, so that a process for a conversation
costs only a fork: milliseconds and a megabyte.

The controller sends a conversation's number with a socket for it, or the negative number to end the conversation. It
receives (number, status) when a conversation's process has ended. No user code runs in the fork server after the
import. When the controller ends, all these processes and their children end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import math
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from weft.errors import UserError, first_line
from weft.launch.machine import end_with_parent
from weft.rl.agents.process import agent_factory
from weft.rl.environments.base import Reply, load_class
from weft.rl.user_process import (
    IMPORT_SECONDS,
    add_import_folders,
    end_if_forked,
    prefer_oom_kill,
    receive,
    send,
    supervise,
    take_over_streams,
)

ORDER = struct.Struct(">q")  # the number of a conversation; negative: kill its process
ENDED = struct.Struct(">qi")  # number, status
_MOST_PROCESSES = 10_000  # conversations, and what they start


class LateError(Exception):
    """A coroutine of an environment exceeded its time limit."""


def main() -> None:
    """argv[1]: file descriptor of the connection to the controller."""
    supervise(_MOST_PROCESSES)
    signal.alarm(IMPORT_SECONDS)  # ends a process that hangs in the import and does not see the controller end
    requests, answers = take_over_streams()
    control = socket.socket(fileno=int(sys.argv[1]))
    path, (key, name) = receive(requests)
    add_import_folders(path)
    try:
        kind = agent_factory(name) if key == "rl.agent" else load_class(name)
    except UserError as error:
        send(answers, str(error))
        return
    signal.alarm(0)
    send(answers, None)
    requests.close()
    answers.close()
    ForkServer(kind, control).serve()


class ForkServer:
    """Forks a process per conversation, kills it on request, and reports how it ended."""

    def __init__(self, kind: Callable[[], Any], control: socket.socket) -> None:
        self._kind, self._control = kind, control
        self._numbers = dict[int, int]()  # process id -> number, of running processes
        self._woken, self._wakes = socket.socketpair()

    def serve(self) -> None:
        """Run until the controller ends."""
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        gc.freeze()  # else a collection in a child touches, and so copies, all shared pages
        orders, events = select.poll(), select.poll()  # select() takes no descriptor above 1023
        orders.register(self._control, select.POLLIN)
        for waited_for in (self._control, self._woken):
            events.register(waited_for, select.POLLIN)
        while True:
            events.poll()
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(1 << 12)
            try:
                self._bury()
                if orders.poll(0) and not self._obey():
                    break
            except ConnectionError:
                break
        for process in self._numbers:
            _kill(process)

    def _obey(self) -> bool:
        data, descriptors, *_ = socket.recv_fds(self._control, ORDER.size, 1)
        if not data:
            return False
        (number,) = ORDER.unpack(data)
        if number < 0:
            for process in [process for process, session in self._numbers.items() if session == -number]:
                _kill(process)
            return True
        process = os.fork()
        if not process:
            self._live(descriptors[0])
        os.close(descriptors[0])
        with contextlib.suppress(OSError):
            os.setpgid(process, process)  # the child does the same; either may be first
        self._numbers[process] = number
        return True

    def _bury(self) -> None:
        for process in list(self._numbers):
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill(process)  # its children, before waitpid frees the process id for another process
                _, status = os.waitpid(process, 0)
                number = self._numbers.pop(process)
                self._control.sendall(ENDED.pack(number, os.waitstatus_to_exitcode(status)))

    def _live(self, descriptor: int) -> None:
        """Run a conversation in a forked process; does not return."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            for open_socket in (self._control, self._woken, self._wakes):
                open_socket.close()
            end_with_parent(signal.SIGKILL)
            prefer_oom_kill()
            np.random.seed()  # else all processes draw the same numbers; Python reseeds `random` itself after a fork
            converse(self._kind, socket.socket(fileno=descriptor))
            status = 0
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(status)


def converse(kind: Callable[[], Any], connection: socket.socket) -> None:
    """Serve calls to one environment, or one run of an agent, until the connection closes: (method, arguments, timeout
    in seconds) -> (result, error)."""
    stream, process = connection.makefile("rwb"), os.getpid()
    environment: Any = None
    while (request := receive(stream)) is not None:
        name, arguments, seconds = request
        answer: tuple[Any, str | None]
        try:
            if environment is None:
                environment = kind()
            result = _call(getattr(environment, name), arguments, seconds)
            if name == "step" or (name == "start" and result is not None):
                result = plain(result)
            answer = (None if name == "close" else result), None
        except LateError:
            answer = None, f" took more than {seconds:g} seconds"
        except (Exception, SystemExit) as error:
            answer = None, f": {type(error).__name__}: {first_line(error)}"
        end_if_forked(process)
        try:
            send(stream, answer)
        except Exception as error:  # pickle's; nothing has been written yet
            send(stream, (None, f": its reply cannot be sent: {first_line(error)}"))


def plain(reply: Any) -> Reply:
    """The reply with its containers and numbers as built-in types. TypeError or ValueError if it is no valid reply."""
    if not isinstance(reply, Reply):
        raise TypeError(f"returned {reply!r:.80}, which is not a Reply (weft.rl.environments.base)")
    if not all(isinstance(entry, Mapping) for entry in (*reply.messages, *reply.calls)):
        raise TypeError("`messages` and `calls` of a Reply are lists of dicts")
    if reply.text is not None and not isinstance(reply.text, str):
        raise TypeError(f"`text` of a Reply is {type(reply.text).__name__}, not a text")
    reward = None if reply.reward is None else float(reply.reward)
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"`reward` of a Reply is {reward}")
    return Reply(
        messages=[dict(message) for message in reply.messages],
        text=reply.text,
        tokens=None if reply.tokens is None else [int(token) for token in reply.tokens],
        calls=[dict(call) for call in reply.calls],
        done=bool(reply.done),
        reward=reward,
        notes=dict(reply.notes),
    )


def _call(method: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
    """Run a plain method in the main thread, so that it may use signals. Run a coroutine in the loop of another thread,
    where its tasks continue between calls, within the time limit."""
    if not inspect.iscoroutinefunction(method):
        return method(*arguments)
    return asyncio.run_coroutine_threadsafe(_limited(method(*arguments), seconds), _loop()).result()


async def _limited(result: Awaitable[Any], seconds: float) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await result
    except SystemExit as error:  # would end the loop
        raise RuntimeError(f"SystemExit: {error}") from error
    except TimeoutError as error:
        if limit.expired():
            raise LateError from error
        raise


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _kill(process: int) -> None:
    """Kill a process and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
