"""Watches the processes of a Ray that a run has started. Without it, nothing would detect that one of them is stopped,
and Ray detects the death of its GCS only after a minute."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from weft.errors import ActorError
from weft.launch import flight, reports
from weft.launch.machine import oom_kills
from weft.launch.monitor import FROZEN, StoppedClock
from weft.launch.status import Kind
from weft.launch.watchdog import periodically

T = TypeVar("T")
STOPPED_SECONDS = 5.0  # time that a part of Ray may be stopped
_TICK = 0.5
_SEARCH_SECONDS = 2.0  # between two searches for children of the raylet, which read all processes of the machine
_POLL = 0.1  # seconds between two checks of a blocking call
# Ray's type of a process that it starts here -> its name in messages. A run does not need the other types (the log
# monitor, the dashboard, the autoscaler's monitor).
NEEDED = {"gcs_server": "Ray's GCS (gcs_server)", "raylet": "Ray's raylet"}
_AGENTS = {  # words in the command line of a child of the raylet -> its name. If one ends, the raylet ends.
    "DashboardAgent": "Ray's dashboard agent", "dashboard/agent.py": "Ray's dashboard agent",
    "RuntimeEnvAgent": "Ray's agent of runtime environments",
    "runtime_env/agent/main.py": "Ray's agent of runtime environments",
}  # fmt: skip


_WORKER = "a Ray worker"


@dataclass
class _RayProcess:
    """A process of Ray. started: whether this process is its parent, and so receives its exit status."""

    name: str
    process: psutil.Process
    started: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> str:
        """psutil's status; STATUS_DEAD if it has ended."""
        if self.started is not None and self.started.poll() is not None:
            return psutil.STATUS_DEAD
        try:
            status = self.process.status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_DEAD
        return psutil.STATUS_DEAD if status == psutil.STATUS_ZOMBIE else status

    @property
    def label(self) -> str:
        return f"{self.name}, process {self.process.pid},"

    def how_it_ended(self) -> str:
        status = None if self.started is None else self.started.returncode
        if status is None:
            return ""
        if status >= 0:
            return f" (exit status {status})"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f" (killed by {name})"


@dataclass(eq=False)
class RayWatchdog:
    """The state of a Ray that the controller started. For a cluster that the run joined, it has no parts and never
    fails. starting: whether this process is starting a Ray, so that its parts must still be found."""

    starting: bool = False
    _parts: dict[psutil.Process, _RayProcess] = field(default_factory=dict)
    _waiting: set[asyncio.Future[None]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _oom_kills: int | None = field(default_factory=oom_kills)
    _children: set[psutil.Process] = field(default_factory=set)
    _stops: StoppedClock = field(default_factory=StoppedClock)
    _frozen: float = 0.0
    _next_search: float = 0.0
    _failed: tuple[str, Kind] | None = None

    @property
    def failure(self) -> ActorError | None:
        """The error that ends the run, or None. Each access makes a new exception object, to be raised by one call."""
        return None if self._failed is None else ActorError(*self._failed)

    @property
    def processes(self) -> list[psutil.Process]:
        """The watched processes, and the processes that the raylet has started."""
        return [*self._parts, *self._children]

    def add(self, started: Mapping[str, subprocess.Popen[bytes]]) -> None:
        """Watch these processes, by Ray's names of their types, and the children of the raylet."""
        for kind, popen in started.items():
            if kind in NEEDED:
                with suppress(psutil.Error):
                    process = psutil.Process(popen.pid)
                    self._parts[process] = _RayProcess(NEEDED[kind], process, popen)

    def look(self, frozen_seconds: float) -> None:
        """Note the failure if a part of Ray has died or is stopped. frozen_seconds: time in which this process did not
        run, which does not count."""
        with self._lock:
            self._frozen = max(self._frozen, frozen_seconds)
            if self._failed is not None:
                return
            self._find_started()
            self._find_children()
            dead = [part for part in self._parts.values() if part.state == psutil.STATUS_DEAD]
            # The raylet ends after an agent has ended, so the agent is the cause.
            dead.sort(key=lambda part: part.started is not None and (part.started.returncode or 0) >= 0)
            seconds = {part.label: self._stops.seconds(part.process, self._frozen) for part in self._parts.values()}
            stopped = [part for part in self._parts.values() if seconds[part.label] > STOPPED_SECONDS]
            kills = oom_kills()
            if dead and kills is not None and self._oom_kills is not None and kills > self._oom_kills:
                self._fail("memory", f"{dead[0].label} was killed by the kernel, which is short of memory")
            elif dead:
                self._fail("killed", f"{dead[0].label} has died{dead[0].how_it_ended()}")
            elif stopped:
                state = FROZEN.get(stopped[0].state, "stopped")
                self._fail("hang", f"{stopped[0].label} has been {state} for {STOPPED_SECONDS:g} seconds")
                stopped[0].process.kill()  # so that a call that waits for it ends

    async def unless_failed(self, waited: Awaitable[T]) -> T:
        """Await. Raises `failure` as soon as a part of Ray has failed."""
        failed = asyncio.get_running_loop().create_future()
        with self._lock:
            if error := self.failure:
                raise error
            self._waiting.add(failed)
        task = asyncio.ensure_future(waited)
        try:
            await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and (error := self.failure):
                raise error
            return await task
        finally:
            with self._lock:
                self._waiting.discard(failed)
            failed.cancel()
            task.cancel()

    def call(self, function: Callable[[], T]) -> T:
        """Run a call of Ray that may block without limit in a thread. Raises `failure` as soon as a part has failed."""
        answered: Future[T] = Future()

        def run() -> None:
            try:
                answered.set_result(function())
            except BaseException as error:
                answered.set_exception(error)

        if error := self.failure:
            raise error
        threading.Thread(target=run, name="weft call of Ray", daemon=True).start()
        while not answered.done():
            wait((answered,), timeout=_POLL)
            if not answered.done() and (error := self.failure):
                raise error
        return answered.result()

    def cause(self) -> ActorError | None:
        """The failure of a part of Ray that may have caused the death of an actor."""
        self.look(self._frozen)
        return self.failure

    def stopped(self) -> str:
        """Words for the parts that are stopped now, or ""."""
        states = {part.label: FROZEN.get(part.state) for part in self._parts.values()}
        return "; ".join(f"{name} is {state}" for name, state in states.items() if state is not None)

    def _find_started(self) -> None:
        """Watch the parts that a starting Ray has so far. They are children of this process."""
        for child in psutil.Process().children() if self.starting else ():
            with suppress(psutil.Error):
                if child.name() in NEEDED and child not in self._parts:
                    self._parts[child] = _RayProcess(NEEDED[child.name()], child)

    def _find_children(self) -> None:
        """Watch the agents of the raylet, and workers that stop before they become actors."""
        if time.monotonic() < self._next_search:
            return
        self._next_search = time.monotonic() + _SEARCH_SECONDS
        self._children = {child for child in self._children if child.is_running()}
        for process, part in list(self._parts.items()):
            if part.name == _WORKER and part.state not in FROZEN:
                del self._parts[process]
        raylets = [part.process for part in self._parts.values() if part.name == NEEDED["raylet"]]
        for raylet in raylets:
            children: list[psutil.Process] = []
            with suppress(psutil.Error):
                children = raylet.children()
            for child in children:
                with suppress(psutil.Error):
                    self._children.add(child)
                    words = " ".join(child.cmdline())
                    name = next((name for pattern, name in _AGENTS.items() if pattern in words), None)
                    if name is None and child.status() in FROZEN and not _is_watched_actor(child):
                        name = _WORKER
                    if name is not None and child not in self._parts:
                        self._parts[child] = _RayProcess(name, child)

    def _fail(self, kind: Kind, problem: str) -> None:
        self._failed = f"{problem}, and the run cannot continue without it.", kind
        for failed in self._waiting:
            failed.get_loop().call_soon_threadsafe(_resolve, failed)


def _resolve(failed: asyncio.Future[None]) -> None:
    if not failed.done():
        failed.set_result(None)


def _is_watched_actor(process: psutil.Process) -> bool:
    """Whether it is an actor whose flight record the watchdog of its group reads."""
    folder = process.environ().get(reports.FOLDER_VARIABLE)
    records = flight.read_all(Path(folder) / flight.FOLDER) if folder else {}
    return any(record.pid == process.pid for record in records.values())


@contextmanager
def watching_ray(watchdog: RayWatchdog, end: Callable[[ActorError], None] | None = None) -> Iterator[None]:
    """Run the watchdog in a thread. end: called in that thread with the failure, once there is one."""

    def look(frozen_seconds: float) -> None:
        with suppress(psutil.Error, OSError):
            watchdog.look(frozen_seconds)
        if end is not None and (failure := watchdog.failure):
            end(failure)

    with periodically(look, _TICK, "weft Ray watchdog"):
        yield
