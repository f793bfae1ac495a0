"""Worker processes that tokenise blocks.

Workers are separate commands. A fork would lose the threads of a rank (torch, gloo, tokenizers), and a process spawned
by multiprocessing would run the user's script again. Each worker uses one thread.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

from weft.data.blocks import Block
from weft.errors import ActorError, UserError
from weft.launch import flight
from weft.launch.machine import end_with_parent, oom_kills
from weft.version import PACKAGE

if TYPE_CHECKING:
    from weft.data.encode import Encoder
    from weft.data.table import Chunk

_AHEAD = 3  # finished blocks per worker that may wait for their turn
_ENDING_SECONDS = 1.0  # seconds to wait for the exit status of a worker whose connection has closed


class BlockTask(Protocol):
    """The work of a worker: create an encoder once, and encode blocks with it (TokeniseTask). seconds_for: the time
    limit of a block, if any. too_slow: the error for a block that exceeds it."""

    def make_encoder(self) -> Encoder: ...
    def encode(self, encoder: Encoder, block: Block) -> Chunk: ...
    def seconds_for(self, block: Block) -> float | None: ...
    def too_slow(self, block: Block) -> UserError: ...


class WorkerPool:
    """A pool of processes: `with WorkerPool(task, 4) as pool: for size, chunk in pool.map(blocks): ...`"""

    def __init__(self, task: BlockTask, count: int) -> None:
        self._task, self._count = task, count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, tuple[int, float, Block]] = {}  # number of its block, and when it was sent
        self._oom_kills = oom_kills() or 0

    def __enter__(self) -> WorkerPool:
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {
            **os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, paths)]),
        }  # fmt: skip
        task = pickle.dumps(self._task)
        for _ in range(self._count):
            connection, child_end = Pipe()
            command = [sys.executable, "-m", "weft.data.workers", str(child_end.fileno())]
            process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            child_end.close()
            self._processes.append(process)
            self._idle.append(connection)
            with suppress(OSError):  # the worker has died: `map` reports it
                connection.send_bytes(task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in [*self._idle, *self._busy]:
            connection.close()  # a waiting worker then exits
        for process in self._processes:
            if error is not None:
                process.kill()
            process.wait()

    def map(self, blocks: Iterable[Block]) -> Iterator[tuple[int, Chunk]]:
        """Yields (size, chunk) of each block, in order. Raises the UserError of the first bad block, as a single
        process would, and ActorError if a worker dies."""
        numbered = enumerate(blocks)
        sizes: dict[int, int] = {}
        done: dict[int, Any] = {}
        turn, has_more = 0, True
        while has_more or self._busy or done:
            while has_more and self._idle and len(done) < _AHEAD * self._count:
                number, block = next(numbered, (-1, None))
                if block is None:
                    has_more = False
                    break
                sizes[number] = block.size
                self._send(self._idle.pop(), number, block)
            while turn in done:
                yield sizes.pop(turn), _result(done.pop(turn))
                turn += 1
            for answered in self._wait():
                connection = cast("Connection[Any, Any]", answered)
                number, *_ = self._busy.pop(connection)
                done[number] = self._receive(connection)
                self._idle.append(connection)
                flight.beat()

    def _wait(self) -> list[Any]:
        """Waits until busy workers have answers, and returns these workers. Raises UserError if a worker exceeds the
        time limit of its block."""
        if not self._busy:
            return []
        _, since, block = min(self._busy.values(), key=lambda sent: sent[1])
        seconds = self._task.seconds_for(block)
        timeout = None if seconds is None else max(0.0, since + seconds - time.monotonic())
        answered = wait(list(self._busy), timeout)
        if not answered:
            raise self._task.too_slow(block)
        return answered

    def _send(self, connection: Connection, number: int, block: Block) -> None:
        try:
            connection.send_bytes(pickle.dumps(block))
        except OSError:
            raise self._died() from None
        self._busy[connection] = number, time.monotonic(), block

    def _receive(self, connection: Connection) -> Any:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> ActorError:
        """The error for a dead worker, with its exit status, or with the cause if the kernel killed it for lack of
        memory."""
        end = time.monotonic() + _ENDING_SECONDS
        while not (ended := [p.returncode for p in self._processes if p.poll() is not None]) and time.monotonic() < end:
            time.sleep(0.01)
        if (oom_kills() or 0) > self._oom_kills:
            text = "was killed by the kernel, which is short of memory. Lower data.workers"
            return ActorError(f"a process that tokenises {text}.", "memory")
        status = ended[0] if ended else 0
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return ActorError(
            f"a process that tokenises has died ({how}). If it ran out of memory, lower data.workers.",
            "killed",
        )


def _result(answer: tuple[str, Any]) -> Chunk:
    how, value = answer
    if how == "mistake":
        raise UserError(value)
    if how == "limit":
        raise value
    if how == "crash":
        raise RuntimeError(f"a process that tokenises failed:\n{value}")
    chunk: Chunk = value
    return chunk


def serve(connection: Connection) -> None:
    """The main loop of a worker: receives a BlockTask, then blocks, until the connection is closed."""
    encoder = None
    try:
        task: BlockTask = pickle.loads(connection.recv_bytes())
        while True:
            block: Block = pickle.loads(connection.recv_bytes())
            answer: tuple[str, Any]
            try:
                encoder = encoder or task.make_encoder()
                answer = ("chunk", task.encode(encoder, block))
            except UserError as error:
                answer = ("mistake", str(error))
            except (RecursionError, MemoryError) as error:  # caused by the row, not a bug
                answer = ("limit", error)
            except Exception:
                answer = ("crash", traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer))
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)  # a stopped process does not notice that its connection closes
    serve(Connection(int(sys.argv[1])))
