"""The only file that uses Ray. It joins a cluster, or starts one on this machine, and runs groups of actors in it.

An actor that raises returns a report, like a rank of the launcher. Ray reports the death of an actor. In both cases the
complete group is ended, because other actors may wait in a collective, and the first failure is raised here.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from weft.errors import ActorError, StoppedError, StorageError, UserError, first_line
from weft.importing import import_extra
from weft.launch import entrypoint, flight, reaper, reports
from weft.launch.failures import explain, explain_hang, oom_kill_text, save_evidence
from weft.launch.flight import FlightRecord
from weft.launch.machine import ADDRESS, cpu_cores, free_port, oom_kills, variables_set
from weft.launch.monitor import FROZEN, ActorWatchdog, Evidence, RankMonitor, process_of, watching_actors
from weft.launch.ray_watchdog import RayWatchdog, watching_ray
from weft.launch.reports import RankReport
from weft.launch.scratch import kill_all, remove_abandoned_memory, scratch_folder
from weft.terminal import say

_HOSTS, _MODE, _TOKEN = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"  # variables of Ray
_LINGER_SECONDS = 2.0  # time that a failure waits for another one that may have caused it
_LISTENER_SECONDS = 10.0
_STACKS_SECONDS = 0.5  # for a process to write its stacks
_ENDING_SECONDS = 1.0  # for Ray to end an actor
_LONGEST_BASE = 20  # characters
_ROOM_SECONDS = 1.0  # between two checks whether a cluster has free resources
_PLACED_SECONDS = 600.0  # time that a cluster may need to free resources
_LEAVING_SECONDS = 10.0  # for Ray to end

# The Ray session of this process. It is global, because Ray is.
_watchdog = RayWatchdog()


@dataclass(frozen=True, slots=True)
class Bundle:
    """The resources that one actor requests."""

    cpus: float = 0.0
    gpus: float = 0.0

    def resources(self) -> dict[str, float]:
        """The resources under Ray's names, without zeros."""
        return {name: value for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value}


@contextmanager
def ray_session(address: str | None, bundles: Sequence[Bundle]) -> Iterator[None]:
    """Join the Ray cluster at `address`; for None, start one on this machine, which ends with the context.

    Other Ray clusters on this machine are not changed. Raises UserError if the cluster lacks resources for `bundles`.
    """
    is_local = address is None
    reaper.current().clean(_ray_base())
    with (
        scratch_folder("ray-", _ray_base()) if is_local else nullcontext() as folder,
        _loopback_ray() if is_local else nullcontext(),
    ):
        try:
            with _session(address, bundles, folder):
                check_capacity(bundles)
                yield
        finally:
            remove_abandoned_memory()  # of killed actors of this machine


@contextmanager
def _session(address: str | None, bundles: Sequence[Bundle], folder: Path | None) -> Iterator[None]:
    """ray_session without the check of resources. folder: for the sockets and logs of a cluster that is started
    here."""
    is_local = address is None
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is not None:
        _require_listener(address)
    options: dict[str, Any] = {"address": "local" if is_local else address}
    if is_local:
        cpus = max(cpu_cores(), round(sum(bundle.cpus for bundle in bundles) + 0.5))
        assert folder is not None
        # A subfolder, because Ray opens its folder to all users.
        options |= {"num_cpus": cpus, "include_dashboard": False, "_temp_dir": str(folder / "r")}
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    # If a part dies while Ray starts, Ray waits for it for a minute in native code, and then ends this process.
    starting = watching_ray(RayWatchdog(starting=True), entrypoint.end_with_report) if is_local else nullcontext()
    try:
        with variables_set(reaper.current().mark), _group_signals_blocked(), starting:  # for Ray's processes
            ray.init(**options, logging_level=logging.ERROR, log_to_driver=False, configure_logging=True)
    except Exception as error:  # Ray has no error type for a machine that is too busy to start in time
        _require_same_versions(address, str(error))
        if is_local:  # perhaps only now: the machine is too busy, or a part of Ray was killed; --restarts tries again
            raise ActorError(f"Ray could not be started on this machine: {first_line(error)}.", "peer") from error
        token = "" if _MODE in os.environ else " If it requires a token, set RAY_AUTH_MODE=token."
        raise UserError(f"cluster.address: no Ray cluster at {address}: {first_line(error)}.{token}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, sigterm_handler)  # Ray's handler exits with 15, the status of another failure
    global _watchdog
    # Ray's type of a process -> the process, for a Ray that this process has started.
    started = ray._private.worker._global_node.all_processes if is_local else {}
    parts = {kind: infos[0].process for kind, infos in started.items()}
    reaper.current().add(*(part.pid for part in parts.values()))
    _watchdog = RayWatchdog()
    _watchdog.add(parts)
    try:
        with watching_ray(_watchdog):
            yield
    except Exception as error:
        # A dead part of Ray has many consequences: other errors of Ray, and a cluster that seems to lack resources.
        cause = None if isinstance(error, StorageError | StoppedError) else _watchdog.cause()
        if cause is None or (isinstance(error, ActorError) and str(error) == str(cause)):
            raise
        for note in getattr(error, "__notes__", []):
            cause.add_note(note)
        raise cause from error
    finally:
        _end_session(ray, [psutil.Process(part.pid) for part in parts.values() if part.poll() is None])


@contextmanager
def _group_signals_blocked() -> Iterator[None]:
    """Inside, processes that are started block the signals that a closing terminal and SLURM send to all processes of a
    job. The controller, which handles them, gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_session(ray: Any, parts: Sequence[psutil.Process]) -> None:
    """Leave Ray, and end the processes of a Ray that this process has started (`parts`). Ray waits without limit for a
    stopped part, but not if all parts are killed."""
    global _watchdog
    watchdog, _watchdog = _watchdog, RayWatchdog()
    processes = {*parts, *watchdog.processes, *reaper.descendants(parts)}
    leaving = threading.Thread(target=ray.shutdown, name="weft leaves Ray", daemon=True)
    if watchdog.failure is None:
        leaving.start()
        leaving.join(_LEAVING_SECONDS)
        if leaving.is_alive():
            stopped = f": {names}" if (names := watchdog.stopped()) else ""
            killed = "; weft kills its processes" if parts else ""
            say(f"ending   Ray has not ended within {_LEAVING_SECONDS:g} seconds{stopped}{killed}", error=True)
    kill_all(processes | {*reaper.descendants(processes)})
    if watchdog.failure is not None:
        entrypoint.unsafe_destructors = True
        leaving.start()
    leaving.join(_LEAVING_SECONDS)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)  # it would wait again


def _require_same_versions(address: str | None, refusal: str) -> None:
    """Raise UserError if Ray refused the connection because the cluster has another version of Ray or Python. All
    processes of a cluster must have the same versions."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", refusal)
    if len(versions) != 2:
        return
    (ray, python), (own_ray, own_python) = versions
    fix = f"install the cluster's Ray here (pip install ray=={ray})" if ray != own_ray else "start weft with its Python"
    raise UserError(
        f"cluster.address: the Ray cluster at {address} has Ray {ray} and Python {python}, and this process has Ray "
        f"{own_ray} and Python {own_python}. They must be equal: {fix}, or start the cluster with these versions."
    )


def _ray_base() -> str:
    """The parent of Ray's folder. Ray's sockets are deep inside it, and a socket's path is limited to about 100
    characters."""
    base = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    return base if len(base) <= _LONGEST_BASE else "/tmp"


def _require_listener(address: str) -> None:
    """Raise UserError if nothing listens at `address`. Ray would retry silently for minutes. Names without a port, such
    as `auto`, are not checked."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=_LISTENER_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"cluster.address: no Ray cluster at {address}: {error}. Start one there (ray start --head), or set "
            "cluster.address=null, so that weft starts one on this machine."
        ) from error


def import_ray() -> Any:
    """The module ray. Raises UserError with the command that installs it."""
    return import_extra("ray", "rl", "weft rl")


@contextmanager
def _loopback_ray() -> Iterator[None]:
    """Inside, a Ray that this process starts listens on loopback and requires a token that only its processes have."""
    variables = {_HOSTS: os.environ.get(_HOSTS, "0"), _MODE: os.environ.get(_MODE, "token")}
    if variables[_MODE] == "token":
        variables[_TOKEN] = os.environ.get(_TOKEN, secrets.token_hex(32))
    ray = import_ray()
    try:
        with variables_set(variables):
            _read_settings(ray)
            yield
    finally:
        _read_settings(ray)


def _read_settings(ray: Any) -> None:
    """Let Ray read its variables again: it reads them when it is imported, which may have been earlier."""
    constants, native = ray._private.ray_constants, ray._raylet
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(_HOSTS, not constants.IS_WINDOWS_OR_OSX)
    native.Config.initialize("")
    native.AuthenticationTokenLoader.instance().reset_cache()


def exposure(address: str | None) -> list[str]:
    """A warning if the cluster requires no token."""
    if address is None or os.environ.get(_MODE) == "token":
        return []
    return [
        f"warning  the Ray cluster at {address} requires no token (RAY_AUTH_MODE): anyone who reaches it can run code"
    ]


def check_capacity(bundles: Sequence[Bundle]) -> None:
    """Raise UserError if the cluster is too small for `bundles`. Ray would wait without limit and without a message."""
    resources = _watchdog.call(import_ray().cluster_resources)
    for name, needed in (("GPU", sum(b.gpus for b in bundles)), ("CPU", sum(b.cpus for b in bundles))):
        if needed > resources.get(name, 0):
            raise UserError(
                f"the Ray cluster has {resources.get(name, 0):g} {name}s, but trainers and engines need {needed:g}: "
                "lower cluster.trainer_ranks (or rollout.num_engines, cluster.engines, cluster.devices), or "
                "join a larger cluster (cluster.address)."
            )
        nodes = _watchdog.call(import_ray().nodes)
        largest = max((node["Resources"].get(name, 0) for node in nodes if node["Alive"]), default=0)
        requested = max(bundle.resources().get(name, 0) for bundle in bundles)
        if requested > largest:
            raise UserError(
                f"one actor needs {requested:g} {name}s, but no host of the Ray cluster has more than {largest:g}. An "
                f"engine is on one host, so set rollout.tp to {largest:g} or less."
            )


@dataclass(eq=False)
class ActorGroup:
    """Actors of one kind, numbered from 0. A call to a group that makes no progress ends with an error; it never hangs.

    name: of one actor, for messages. watchdog: of the actors on this machine. placed: Ray's placement group; None if
    the actors request nothing. ray: the watchdog of a Ray that this run started. oom_kills: the kernel's count before
    the actors started. start: starts the process of an actor, given its number, and returns Ray's handle. turns: locks
    of devices that are shared with other groups; call_all holds them. joining: the resources of an actor that joins the
    group later, and whose handle is None until then. joined: number -> placement group of actors that have joined.
    """

    name: str
    handles: list[Any]
    watchdog: ActorWatchdog
    placed: Any = None  # its placement group
    ray: RayWatchdog = field(default_factory=RayWatchdog)
    oom_kills: int = field(default_factory=lambda: oom_kills() or 0)
    start: Callable[[int], Any] | None = None
    turns: Sequence[asyncio.Lock] = ()
    joining: Bundle | None = None
    joined: dict[int, Any] = field(default_factory=dict)

    @property
    def can_restart(self) -> bool:
        """Whether a new actor could be started: False if a Ray that this run started has failed."""
        return self.ray.failure is None

    @property
    def scratch(self) -> Path:
        return self.watchdog.scratch

    def __len__(self) -> int:
        return len(self.handles)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call this method on every actor; returns the results in order. List and dict arguments are put into Ray's
        store once."""
        # Ray's store is in the raylet, which does not answer if it is stopped: hence ray.call in a thread.
        put = import_ray().put
        stored = [
            await asyncio.to_thread(self.ray.call, partial(put, arg))
            if len(self) > 1 and isinstance(arg, list | dict)
            else arg
            for arg in args
        ]
        try:
            async with AsyncExitStack() as turn:
                for lock in self.turns:
                    await turn.enter_async_context(lock)
                return await gather_calls([self.call_one(number, method, *stored) for number in range(len(self))])
        except ActorError as error:
            consequence = error.report is not None and error.report.is_consequence
            root_cause = await asyncio.to_thread(self._stuck) if consequence else None
            self.end()
            raise root_cause or error from error

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        """Call this method on one actor. Raises ActorError if the method raised, or if the actor died."""
        ray = import_ray()
        handle = self.handles[number]
        try:
            with self.watchdog.waiting_for(number):
                answer = await self.ray.unless_failed(handle.call.remote(method, *args))
        except ray.exceptions.RayError as error:
            if failure := await asyncio.to_thread(self.ray.cause):
                raise failure from error
            if not isinstance(error, ray.exceptions.RayActorError):
                raise
            raise self._died(number, str(error)) from error
        if isinstance(answer, RankReport):
            title = "" if answer.message.startswith(self.name) else f"{self.name} {number} failed: "
            raise ActorError(explain(answer, title, debug=False), answer.kind, answer)
        return answer

    def _died(self, number: int, reason: str) -> ActorError:
        record = flight.read_all(self.scratch / flight.FOLDER).get(number)
        activity = f"\n{record.activity()}" if record is not None else ""
        actor_reports = [report for report in reports.read_all(self.scratch) if report.rank == number]
        if actor_reports:  # the actor ended with a report
            return ActorError(
                explain(actor_reports[0], f"{self.name} {number} failed: ", debug=False),
                actor_reports[0].kind,
                actor_reports[0],
            )
        if (oom_kills() or 0) > self.oom_kills or "running low on memory" in reason:  # the kernel, or Ray's monitor
            return ActorError(oom_kill_text(f"{self.name} {number}", activity), "memory", None)
        last = next((line.strip() for line in reason.splitlines() if "has died" in line), "").partition(". ")[0]
        return ActorError(f"{self.name} {number} died{activity}" + (f"\n{last}" if last else ""), "killed", None)

    def _stuck(self) -> ActorError | None:
        """The error that names the actor for which the others waited in vain, with its stack; None if no actor waited
        and none is stopped."""
        monitor = RankMonitor(self.scratch)
        monitor.look(0.0)
        time.sleep(_STACKS_SECONDS)
        evidence = monitor.evidence()
        consequences = sorted(
            (r for r in reports.read_all(self.scratch) if r.is_consequence), key=lambda report: report.order
        )
        if not any(report.waited for report in consequences) and not evidence.states:
            return None
        number, text = explain_hang(consequences, evidence, False, self.name)
        report = next((report for report in consequences if report.rank == number), consequences[0])
        return ActorError(text, "hang", report)

    def save_evidence(self, run: Path) -> None:
        """Write the activity of each actor to RUN/flight."""
        records = flight.read_all(self.scratch / flight.FOLDER)
        evidence = Evidence({rank: replace(record, run=str(run)) for rank, record in records.items()})
        save_evidence(reports.read_all(self.scratch), {}, evidence)

    async def restart(self, number: int | None = None) -> None:
        """Replace an actor by a new process with the same resources and environment. By default all actors are replaced
        and form a new process group. An old process that still runs is killed, and its evidence is removed. Raises
        ActorError if a new process cannot be started."""
        await asyncio.to_thread(self._restart, number)

    async def join(self, number: int) -> None:
        """Start the process of an actor that has no reservation, or whose host is lost, as soon as the cluster has free
        resources. Raises ActorError if it cannot be started."""
        ray = import_ray()
        assert self.joining is not None, "actors cannot join this group"
        await asyncio.to_thread(self._leave, number)
        reserve = partial(ray.util.placement_group, [self.joining.resources()], strategy="PACK")
        placed = await asyncio.to_thread(self.ray.call, reserve)
        try:
            ready = placed.ready()
            while not (await asyncio.to_thread(self.ray.call, partial(ray.wait, [ready], timeout=_ROOM_SECONDS)))[0]:
                await asyncio.sleep(_ROOM_SECONDS)
        except BaseException:
            _release(placed)
            raise
        self.joined[number] = placed
        await asyncio.to_thread(self._restart, number)

    def _leave(self, number: int) -> None:
        """End an actor that has joined, and free its reservation."""
        placed = self.joined.pop(number, None)
        if placed is not None:
            self.end(number)
            _release(placed)

    def _restart(self, number: int | None) -> None:
        assert self.start is not None, "a group of actors that cannot be restarted"
        self.end(number)
        self.oom_kills = oom_kills() or 0
        numbers = range(len(self)) if number is None else [number]
        for n in numbers:
            for left in (reports.path_of(n, self.scratch), self.scratch / flight.FOLDER / flight.live_name(n)):
                left.unlink(missing_ok=True)
            self.handles[n] = self.start(n)
        _prepare([self.handles[n] for n in numbers], rendezvous=number is None)

    def end(self, number: int | None = None) -> None:
        """Kill this actor, by default all, which frees their resources."""
        ray = import_ray()
        for handle in filter(None, self.handles if number is None else [self.handles[number]]):
            with suppress(Exception):
                self.ray.call(partial(ray.kill, handle))
        local = [process for rank, _, process in self._local_actors() if number in (None, rank)]
        _, alive = psutil.wait_procs(local, timeout=_ENDING_SECONDS)
        for process in alive:  # Ray cannot end a stopped process
            with suppress(psutil.Error):
                process.kill()

    def blamed(self, error: ActorError) -> ActorError:
        """`error`. If it is a hang and an actor of this group is stopped, an error that names the actor instead,
        because other processes wait for it."""
        if error.kind == "hang":
            for number, record, process in self._local_actors():
                with suppress(psutil.Error):
                    if process.status() in FROZEN:
                        text = f"{self.name} {number} is {FROZEN[process.status()]}\n{record.activity()}\n{error}"
                        return ActorError(text, "hang", error.report)
        return error

    def _local_actors(self) -> list[tuple[int, FlightRecord, psutil.Process]]:
        """(number, record, process) of the actors that run on this machine."""
        records = flight.read_all(self.scratch / flight.FOLDER)
        actors = [(number, record, process_of(record, self.scratch)) for number, record in records.items()]
        return [(number, record, process) for number, record, process in actors if process is not None]


async def gather_calls(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all calls; returns the results in order. If several fail, the root cause is raised: the death of an actor
    comes first, then an error that an actor reported, then errors of actors that waited for another."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except ActorError as error:
        await asyncio.wait(tasks, timeout=_LINGER_SECONDS)
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled() and task.exception()]
        for task in tasks:
            task.cancel()
        failures = [failure for failure in errors if isinstance(failure, ActorError)] or [error]
        failures.sort(
            key=lambda e: (False, False, False) if e.report is None else (e.report.order[0], True, e.report.order[1])
        )
        raise failures[0] from error


@contextmanager
def actor_group(
    name: str, make: Callable[[int], Any], bundles: Sequence[Bundle], env: Sequence[Mapping[str, str]], *,
    reserve: Sequence[Bundle] | None = None, share_with: tuple[Any, Sequence[int]] | None = None,
    at_once: int = 1, timeout: float = 600.0, key: str = "train.timeout", turns: Sequence[asyncio.Lock] = (),
    joining: int = 0,
) -> Iterator[ActorGroup]:  # fmt: skip
    """Start one actor per bundle. The actors end with the context. make(number) runs in the actor, and returns the
    object whose methods are called. env: environment variables of each actor.

    reserve: the placement group's reservation per actor, if it exceeds the bundle because another group shares it.
    share_with: (placement group, indices): actor i uses its bundle indices[i]. at_once: concurrent calls per actor.
    With 1, the actors can form a process group; with more, the methods are coroutines. timeout, key: as in
    ActorWatchdog. turns: as in ActorGroup. joining: the number of last actors that are not started here
    (ActorGroup.join).
    """
    ray = import_ray()
    with scratch_folder() as scratch:
        first = len(bundles) - joining
        placed = _reserve(reserve or bundles[:first]) if share_with is None else share_with[0]
        indices = range(len(bundles)) if share_with is None else share_with[1]
        watchdog = _watchdog

        def start(number: int) -> Any:
            options: dict[str, Any] = {
                "num_cpus": bundles[number].cpus, "num_gpus": bundles[number].gpus, "max_restarts": 0,
                "runtime_env": {"env_vars": {reports.FOLDER_VARIABLE: str(scratch), **env[number]}},
            }  # fmt: skip
            placement_group, index = (group.joined[number], 0) if number >= first else (placed, indices[number])
            if placement_group is not None:
                options["scheduling_strategy"] = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=index
                )
            if at_once > 1:
                options["max_concurrency"] = at_once
            host = _SerialActor if at_once == 1 else _ConcurrentActor
            return watchdog.call(partial(ray.remote(host).options(**options).remote, make, number))

        group = ActorGroup(name, [], ActorWatchdog(scratch, timeout, key), placed, watchdog, start=start, turns=turns)
        group.joining = bundles[-1] if joining else None
        try:
            group.handles += [start(number) for number in range(first)]
            _prepare(group.handles, rendezvous=at_once == 1)
            group.handles += [None] * joining
            with watching_actors(group.watchdog):
                yield group
        finally:
            group.end()
            for reservation in group.joined.values():
                _release(reservation)
            if placed is not None and share_with is None:
                _release(placed)


@contextmanager
def reserved_devices(bundle: Bundle, count: int) -> Iterator[tuple[Any, list[int]]]:
    """Reserve `count` devices for actors of several groups. Yields the placement group, and the index of each device's
    bundle. Consecutive devices are on the same host, if it has enough."""
    ray = import_ray()
    placed = _reserve([bundle] * count)
    try:
        nodes = ray.util.placement_group_table(placed)["bundles_to_node_id"]
        hosts = list(dict.fromkeys(nodes[index] for index in range(count)))
        yield placed, sorted(range(count), key=lambda index: (hosts.index(nodes[index]), index))
    finally:
        _release(placed)


def _release(placed: Any) -> None:
    with suppress(ActorError):
        _watchdog.call(partial(import_ray().util.remove_placement_group, placed))


def _prepare(handles: Sequence[Any], rendezvous: bool) -> None:
    """Send all actors the working directory of this process and, for a rendezvous, the address and port of the first
    actor."""
    ray, variables = import_ray(), dict[str, str]()
    try:
        if rendezvous:
            address, port = _get(handles[0].address.remote())
            variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        calls = [handle.prepare.remote(variables, os.getcwd()) for handle in handles]
        _get(calls)
    except ray.exceptions.RayError as error:
        if failure := _watchdog.cause():
            raise failure from error
        kind = "killed" if isinstance(error, ray.exceptions.RayActorError) else "failed"
        raise ActorError(f"the actors could not be started: {first_line(error)}", kind) from error


def _get(references: Any) -> Any:
    """The results of Ray's tasks, within _PLACED_SECONDS."""
    return _watchdog.call(partial(import_ray().get, references, timeout=_PLACED_SECONDS))


def _reserve(bundles: Sequence[Bundle]) -> Any:
    """A placement group for all bundles, on as few hosts as possible; None if a bundle requests nothing."""
    ray = import_ray()
    requests = [bundle.resources() for bundle in bundles]
    if not all(requests):
        return None
    placed = _watchdog.call(partial(ray.util.placement_group, requests, strategy="PACK"))
    try:
        _get(placed.ready())
    except ray.exceptions.GetTimeoutError as error:
        ray.util.remove_placement_group(placed)
        raise UserError(
            f"the Ray cluster had no free resources for {len(bundles)} actors of {requests[0]} within "
            f"{_PLACED_SECONDS:.0f} seconds: other programs use them. Wait until they end, or request less."
        ) from error
    return placed


class _Actor:
    """The process of an actor. The object is created at the first call."""

    def __init__(self, make: Callable[[int], Any], number: int) -> None:
        self._number = number
        self._scratch = entrypoint.set_up_actor(number)
        self._make: Callable[[int], Any] | None = make
        self._object: Any = None

    def address(self) -> tuple[str, int]:
        """The address at which other actors reach this host, and a free port on it."""
        is_local = os.environ.get("GLOO_SOCKET_IFNAME") == "lo"
        address = "127.0.0.1" if is_local else str(import_ray().util.get_node_ip_address())
        return address, free_port()

    def prepare(self, variables: Mapping[str, str], folder: str) -> None:
        """Set environment variables, and change to the controller's working directory if this host has it, so that
        relative paths are valid. Called before the object is created."""
        os.environ.update(variables)
        with suppress(OSError):
            os.chdir(folder)
        os.environ[ADDRESS], _ = self.address()

    def _method(self, name: str) -> Any:
        if self._make is not None:
            self._object, self._make = self._make(self._number), None
        return getattr(self._object, name)


class _SerialActor(_Actor):
    """Runs one call at a time. An exception becomes a report, which is returned. If the object has a method `ending`,
    it is called with the exception first, so that the object can finish its work."""

    def call(self, method: str, *args: Any) -> Any:
        """The result of the object's method, or the report of its exception."""
        try:
            return self._method(method)(*args)
        except BaseException as error:
            report = reports.of_exception(self._number, error)
            with suppress(OSError):
                reports.write(report, self._scratch)
            if hasattr(self._object, "ending"):
                self._object.ending(error)
            return report
        finally:
            flight.enter(flight.ENDLESS)


class _ConcurrentActor(_Actor):
    """Like _SerialActor, but for methods that are coroutines. They run concurrently."""

    async def call(self, method: str, *args: Any) -> Any:
        """The result of the object's method, or the report of its exception."""
        try:
            return await self._method(method)(*args)
        except Exception as error:
            return reports.of_exception(self._number, error)
