"""The one file that uses Ray: a cluster (joined, or this machine's own for the time), and groups of actors in it.

An actor that raises answers with a report, as a rank of the launcher leaves one; one that dies is reported by Ray. Then
the whole group is ended, because the others may wait in a collective, and the first failure is raised here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.cluster import reports
from weft.cluster.failures import explain, keep_evidence, what_stands
from weft.cluster.machine import ADDRESS, cpu_cores
from weft.cluster.reports import RankReport
from weft.cluster.status import Kind
from weft.cluster.watch import Evidence
from weft.errors import ActorError, UserError, first_line
from weft.observe import flight
from weft.observe.flight import Record

_LINGER_SECONDS = 2.0  # how long a failure waits for one that may lie behind it
_LISTENER_SECONDS = 10.0
_PLACED_SECONDS = 600.0  # how long a cluster may take to make room


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one actor asks of a cluster."""

    cpus: float = 0.0
    gpus: float = 0.0

    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        return {name: value for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value}


@contextmanager
def ray_session(address: str | None, bundles: Sequence[Bundle]) -> Iterator[None]:
    """Ray, joined at `address`, or started on this machine for the time and ended with this process.

    Other Ray clusters of this machine are left alone. UserError where the cluster has not the room for `bundles`.
    """
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own = address is None
    if address is not None:
        _require_listener(address)
    options: dict[str, Any] = {"address": "local" if own else address}
    if own:
        cpus = max(cpu_cores(), round(sum(bundle.cpus for bundle in bundles) + 0.5))
        options |= {"num_cpus": cpus, "include_dashboard": False}
    try:
        ray.init(**options, logging_level=logging.ERROR, log_to_driver=False, configure_logging=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        what = "Ray could not be started on this machine" if own else f"cluster.address: no Ray cluster at {address}"
        raise UserError(f"{what}: {error}.") from error
    try:
        _check_room(bundles)
        yield
    finally:
        ray.shutdown()


def controller_address(cluster: str | None) -> str:
    """Of the controller's machine, as own_address() says in actors there. cluster: as in ray_session."""
    return "127.0.0.1" if cluster is None else str(import_ray().util.get_node_ip_address())


def _require_listener(address: str) -> None:
    """Ray itself would try for minutes, without a word. Names such as `auto` have no port to try."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=_LISTENER_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"cluster.address: no Ray cluster at {address}: {error}. Start one there (ray start --head), or leave "
            "cluster.address out for one on this machine."
        ) from error


def import_ray() -> Any:
    """Ray, or a UserError that says how to install it."""
    try:
        import ray
    except ImportError as error:
        raise UserError("weft rl runs on Ray, which is not installed: pip install 'weft[rl]'.") from error
    return ray


def _check_room(bundles: Sequence[Bundle]) -> None:
    """A placement that does not fit would wait for ever without a word."""
    there = import_ray().cluster_resources()
    for name, needed in (("GPU", sum(b.gpus for b in bundles)), ("CPU", sum(b.cpus for b in bundles))):
        if needed > there.get(name, 0):
            raise UserError(
                f"the Ray cluster has {there.get(name, 0):g} {name}s, and trainers and engines ask for {needed:g}: set "
                "cluster.trainer (or rollout.engines) to fewer, or join a larger cluster (cluster.address)."
            )


@dataclass
class ActorGroup:
    """Actors of one kind, numbered from 0. Every wait for them ends: they end themselves where they make no progress.

    name: what messages call one of them. scratch: where their flight records are, if they run on this machine.
    """

    name: str
    handles: list[Any]
    scratch: Path
    run: str = ""
    _failed: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(self.handles)

    async def all(self, method: str, *args: Any) -> list[Any]:
        """The results of this method on every actor, in order; arguments are stored once for all."""
        ray = import_ray()
        stored = [ray.put(arg) if isinstance(arg, list | dict) and len(self) > 1 else arg for arg in args]
        calls = [self.one(number, method, *stored) for number in range(len(self))]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        except ActorError as error:
            raise await self._first_failure(tasks, error) from error

    async def one(self, number: int, method: str, *args: Any) -> Any:
        """The result of one actor. ActorError where it failed or died."""
        ray = import_ray()
        handle = self.handles[number]
        try:
            answer = await handle.call.remote(method, *args)
        except ray.exceptions.RayActorError as error:
            raise self._died(number, str(error)) from error
        if isinstance(answer, RankReport):
            raise ActorError(explain(answer, f"{self.name} {number} failed: ", debug=False), answer.kind, answer)
        return answer

    def _died(self, number: int, reason: str) -> ActorError:
        record = flight.read_all(self.scratch / flight.FOLDER).get(number)
        where = f"\n{record.where()}" if record is not None else ""
        found = [report for report in reports.read_all(self.scratch) if report.rank == number]
        if found:  # it ended itself, and said why
            return ActorError(explain(found[0], f"{self.name} {number} failed: ", debug=False), found[0].kind, found[0])
        kind: Kind = "killed"
        last = next((line.strip() for line in reason.splitlines() if "exit" in line.lower()), "")
        return ActorError(f"{self.name} {number} died{where}" + (f"\n{last}" if last else ""), kind, None)

    async def _first_failure(self, tasks: Sequence[asyncio.Future[Any]], error: ActorError) -> ActorError:
        """Of several failures, the one that is not another's consequence; the group is ended then."""
        await asyncio.wait(tasks, timeout=_LINGER_SECONDS)
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled() and task.exception()]
        for task in tasks:
            task.cancel()
        self.end()
        found = [other for other in errors if isinstance(other, ActorError)] or [error]
        found.sort(key=lambda e: (e.report is not None and e.report.is_consequence, 0 if e.report is None else 1))
        return found[0]

    def keep_evidence(self, run: Path) -> None:
        """RUN/flight: what each was doing."""
        records = flight.read_all(self.scratch / flight.FOLDER)
        seen = Evidence({rank: _in_run(record, run) for rank, record in records.items()})
        keep_evidence(reports.read_all(self.scratch), {}, seen)

    def end(self) -> None:
        """Kill them; what they hold is freed."""
        ray = import_ray()
        for handle in self.handles:
            with suppress(Exception):
                ray.kill(handle)


def _in_run(record: Record, run: Path) -> Record:
    return replace(record, run=str(run))


def what_is_left(run: Path) -> str:
    """Lines on what a failed run has left."""
    return what_stands(str(run))


@contextmanager
def actor_group(
    name: str, make: Callable[[int], Any], bundles: Sequence[Bundle], env: Sequence[Mapping[str, str]]
) -> Iterator[ActorGroup]:
    """One actor for each bundle, placed together; ended with the context. make(number) runs in the actor, and what it
    returns is the object whose methods are called there. env: variables of each."""
    ray = import_ray()
    scratch = Path(tempfile.mkdtemp(prefix="weft-"))
    placed = _place(bundles)
    group = ActorGroup(name, [], scratch)
    try:
        for number, bundle in enumerate(bundles):
            options: dict[str, Any] = {
                "num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "max_restarts": 0,
                "runtime_env": {"env_vars": {reports.FOLDER_VARIABLE: str(scratch), **env[number]}},
            }  # fmt: skip
            if placed is not None:
                options["scheduling_strategy"] = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placed, placement_group_bundle_index=number
                )
            group.handles.append(ray.remote(_Host).options(**options).remote(make, number))
        _introduce(group.handles)
        yield group
    finally:
        group.end()
        if placed is not None:
            ray.util.remove_placement_group(placed)
        shutil.rmtree(scratch, ignore_errors=True)


def _introduce(handles: Sequence[Any]) -> None:
    """Tell all of them where the first waits for the others."""
    ray = import_ray()
    try:
        address, port = ray.get(handles[0].address.remote(), timeout=_PLACED_SECONDS)
        variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        ray.get([handle.prepare.remote(variables) for handle in handles], timeout=_PLACED_SECONDS)
    except ray.exceptions.RayError as error:
        raise ActorError(f"the actors could not be started: {first_line(error)}", "failed") from error


def _place(bundles: Sequence[Bundle]) -> Any:
    """Room for all of them, as near to each other as there is; None where they ask for nothing."""
    ray = import_ray()
    wanted = [bundle.resources() for bundle in bundles]
    if not all(wanted):
        return None
    placed = ray.util.placement_group(wanted, strategy="PACK")
    try:
        ray.get(placed.ready(), timeout=_PLACED_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        ray.util.remove_placement_group(placed)
        raise UserError(
            f"the Ray cluster found no room for {len(bundles)} actors of {wanted[0]} within {_PLACED_SECONDS:.0f} "
            "seconds: others use it; wait for them, or ask for fewer."
        ) from error
    return placed


class _Host:
    """The process of an actor: makes the object, calls its methods, and answers with a report where one raises."""

    def __init__(self, make: Callable[[int], Any], number: int) -> None:
        from weft.cluster.guard import settle_actor

        self._number = number
        self._scratch = settle_actor(number)
        self._make: Callable[[int], Any] | None = make
        self._object: Any = None

    def address(self) -> tuple[str, int]:
        """Where this process can be reached by the others, and a port that is free there."""
        alone = os.environ.get("GLOO_SOCKET_IFNAME") == "lo"
        address = "127.0.0.1" if alone else str(import_ray().util.get_node_ip_address())
        with socket.socket() as server:
            server.bind(("", 0))
            return address, int(server.getsockname()[1])

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Set variables of the environment, before anything is made."""
        os.environ.update(variables)
        os.environ[ADDRESS], _ = self.address()

    def call(self, method: str, *args: Any) -> Any:
        """What the object's method returns, or the report of its exception."""
        try:
            if self._make is not None:
                self._object, self._make = self._make(self._number), None
            return getattr(self._object, method)(*args)
        except BaseException as error:
            report = reports.of_exception(self._number, error)
            with suppress(OSError):
                reports.write(report, self._scratch)
            return report
        finally:
            flight.at(flight.ENDLESS)


async def within(awaitable: Awaitable[Any], seconds: float, what: str) -> Any:
    """Its result; ActorError, of the kind `hang`, where it takes longer."""
    began = time.monotonic()
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError as error:
        waited = time.monotonic() - began
        raise ActorError(f"{what}: no answer for {waited:.0f} seconds (train.timeout)", "hang", None) from error
