"""Observations of a launcher about its ranks, and of a controller about its actors: flight records, stacks, states.

The processes have watchdogs (watchdog.py), but the watchdog's thread does not run in a process that is stopped or that
keeps Python's lock. The launcher reports such a rank, and kills ranks that still run after a failure; the controller
kills such an actor.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from weft.launch import flight, reports
from weft.launch.flight import FlightRecord
from weft.launch.machine import oom_kills
from weft.launch.reports import RankReport
from weft.launch.watchdog import BEHIND_SECONDS, BEHIND_SHARE, STACKS, main_stack, periodically

STOP_SECONDS = 5  # from a rank's failure to SIGKILL for the ranks that do not end
# Seconds, and share of the limit, that the launcher waits longer than the ranks' watchdogs.
_BEHIND_SECONDS, _BEHIND_SHARE = 10.0, 0.2
_TICK, _ACTOR_TICK = 0.2, 0.5
FROZEN = {psutil.STATUS_STOPPED: "stopped (SIGSTOP)", psutil.STATUS_TRACING_STOP: "stopped by a debugger",
           psutil.STATUS_DISK_SLEEP: "waiting for a disk or a driver (state D)"}  # fmt: skip
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class Evidence:
    """The observations of each rank. records: flight records. stacks: of the main thread in a hang or crash, innermost
    call first. states: of processes, if a state explains a hang. oom_kills: number of processes that the kernel killed
    for lack of memory since the start; None if unknown."""

    records: Mapping[int, FlightRecord] = field(default_factory=dict)
    stacks: Mapping[int, list[str]] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    oom_kills: int | None = None


class SilenceClock:
    """Measures how long each rank's record has shown no progress, without the time in which this process did not
    run."""

    def __init__(self) -> None:
        self._excused: dict[int, tuple[int, float]] = {}  # rank -> changes, and frozen seconds when they were read

    def seconds(self, rank: int, record: FlightRecord, frozen_seconds: float) -> float:
        """Seconds since the rank's record last changed."""
        changes, excused = self._excused.get(rank, (-1, 0.0))
        if record.changes != changes:
            self._excused[rank] = (record.changes, frozen_seconds)
            return 0.0
        return time.monotonic() - record.since - (frozen_seconds - excused)

    @staticmethod
    def patience(limit: float) -> float:
        """The seconds of silence after which another process reports a rank with a limit of `limit` seconds."""
        return limit * (1 + _BEHIND_SHARE) + _BEHIND_SECONDS


class StoppedClock:
    """Measures how long each process has been stopped, without the time in which this process did not run. A stopped
    process makes no progress in any phase, so the longer limits of slow phases do not apply."""

    def __init__(self) -> None:
        self._since: dict[psutil.Process, tuple[float, float]] = {}  # monotonic seconds, frozen seconds

    def seconds(self, process: psutil.Process, frozen_seconds: float) -> float:
        """Seconds since the process was first observed as stopped; 0 if it runs."""
        with suppress(psutil.Error):
            if process.status() in _STOPPED:
                since, frozen = self._since.setdefault(process, (time.monotonic(), frozen_seconds))
                return time.monotonic() - since - (frozen_seconds - frozen)
        self._since.pop(process, None)
        return 0.0

    @staticmethod
    def patience(timeout: float) -> float:
        """The seconds after which a stopped rank is reported. Ranks that wait for it in a collective report first."""
        return timeout * (1 + BEHIND_SHARE) + BEHIND_SECONDS


def process_of(record: FlightRecord, scratch: Path) -> psutil.Process | None:
    """The process of a record, if it runs on this machine and its environment names the record's folder."""
    with suppress(psutil.Error):
        process = psutil.Process(record.pid)
        if process.environ().get(reports.FOLDER_VARIABLE) == str(scratch):
            return process
    return None


class RankMonitor:
    """Observes the ranks whose environment names the folder `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._kills = scratch, oom_kills()
        self._states: dict[int, str] = {}
        self._has_noted_states = self._has_requested_stacks = self._has_killed = False
        self._silence, self._stops = SilenceClock(), StoppedClock()
        self._processes: dict[int, psutil.Process] = {}  # by process id

    def evidence(self) -> Evidence:
        """Everything known so far."""
        kills = oom_kills()
        kills = None if kills is None or self._kills is None else kills - self._kills
        records = flight.read_all(self._scratch / flight.FOLDER)
        stacks = {}
        for rank in records:
            with suppress(OSError):
                stacks[rank] = main_stack((self._scratch / STACKS / str(rank)).read_text(errors="replace"))
        return Evidence(records, {rank: stack for rank, stack in stacks.items() if stack}, self._states, kills)

    def look(self, frozen_seconds: float) -> None:
        """Note which ranks are stopped when one has failed, request stacks if a rank has reported a hang, and kill
        ranks that still run STOP_SECONDS after a failure."""
        errors = [report for report in reports.read_all(self._scratch) if not report.is_verdict]
        if not errors:
            self._report_silent(frozen_seconds)
            return
        if not self._has_noted_states:
            self._has_noted_states = True
            for rank, child in self._ranks():
                with suppress(psutil.Error):
                    if child.status() in FROZEN:
                        self._states[rank] = FROZEN[child.status()]
        if not self._has_requested_stacks and any(report.kind == "hang" for report in errors):
            self._has_requested_stacks = True
            for rank, child in self._ranks():
                with suppress(psutil.Error):
                    if (self._scratch / STACKS / str(rank)).exists():  # the rank has a handler for the signal
                        child.send_signal(signal.SIGUSR2)
        # The agent would wait half a minute for a stopped rank.
        if not self._has_killed and time.monotonic() - errors[0].time > STOP_SECONDS:
            self._has_killed = True
            for _, child in self._ranks():
                with suppress(psutil.Error):
                    child.kill()

    def processes(self) -> list[psutil.Process]:
        """The ranks that have been started so far."""
        return [child for _, child in self._ranks()]

    def _ranks(self) -> Iterator[tuple[int, psutil.Process]]:
        """The ranks that have a record, and children of this process without a record yet, by their environment."""
        records = flight.read_all(self._scratch / flight.FOLDER)
        children = {child.pid: child for child in psutil.Process().children()}
        for rank, record in records.items():
            process = children.pop(record.pid, None) or process_of(record, self._scratch)
            if process is not None:
                yield rank, process
        for child in children.values():
            with suppress(psutil.Error):
                environment = child.environ()
                if environment.get(reports.FOLDER_VARIABLE) == str(self._scratch) and "RANK" in environment:
                    yield int(environment["RANK"]), child

    def _report_silent(self, frozen_seconds: float) -> None:
        """Report on behalf of a rank that makes no progress and cannot report it."""
        for rank, record in flight.read_all(self._scratch / flight.FOLDER).items():
            silence = self._silence.seconds(rank, record, frozen_seconds)
            if record.pid not in self._processes:
                self._processes |= {process.pid: process for _, process in self._ranks()}
            process = self._processes.get(record.pid)
            stopped = 0.0 if process is None else self._stops.seconds(process, frozen_seconds)
            too_long = record.limit is not None and silence > SilenceClock.patience(record.limit)
            if too_long or (record.timeout is not None and stopped > StoppedClock.patience(record.timeout)):
                message = f"no progress for {silence:.0f} seconds"
                for number, child in self._ranks():
                    with suppress(psutil.Error):
                        if number == rank and child.status() in FROZEN:
                            message += f"; it is {FROZEN[child.status()]}"
                report = RankReport(rank, time.monotonic(), message, kind="hang", activity=record.activity())
                reports.write(report, self._scratch)
                return


@contextmanager
def watching(scratch: Path) -> Iterator[RankMonitor]:
    """Observe the ranks in a thread until they have ended."""
    watch = RankMonitor(scratch)
    with periodically(watch.look, _TICK, "weft watch"):
        yield watch


# ---------------------------------------------------------------- actors


class ActorWatchdog:
    """Watches the actors of a group on this machine while the controller waits for them.

    timeout: seconds that a phase may take without progress, unless the actor's record has another limit; key: the
    config key of this timeout. scratch: the folder with the actors' records, in which reports are written.
    """

    def __init__(self, scratch: Path, timeout: float, key: str) -> None:
        self.scratch, self.timeout, self.key = scratch, timeout, key
        self._silence, self._stops = SilenceClock(), StoppedClock()
        self._calls = Counter[int]()
        self._called_at: dict[int, float] = {}

    @contextmanager
    def waiting_for(self, number: int) -> Iterator[None]:
        """Inside, the controller waits for a call to this actor."""
        if not self._calls[number]:
            self._called_at[number] = time.monotonic()
        self._calls[number] += 1
        try:
            yield
        finally:
            self._calls[number] -= 1

    def look(self, frozen_seconds: float) -> None:
        """Kill the actors that make no progress, and write a report for each. frozen_seconds: time in which this
        process did not run, which does not count."""
        for number, record in flight.read_all(self.scratch / flight.FOLDER).items():
            silence = self._silence.seconds(number, record, frozen_seconds)
            process = process_of(record, self.scratch)
            if process is None:
                continue
            stopped = self._stops.seconds(process, frozen_seconds)
            if self._calls[number] and (
                stopped > StoppedClock.patience(self.timeout) or self._is_too_long(number, record, silence)
            ):
                self._kill(number, record, process, silence)

    def _is_too_long(self, number: int, record: FlightRecord, silence: float) -> bool:
        if record.phase == flight.ENDLESS:  # a call was sent but has not begun
            return min(silence, time.monotonic() - self._called_at[number]) > SilenceClock.patience(self.timeout)
        limit = record.limit if record.limit is not None else self.timeout * flight.PATIENCE["load"]
        return silence > SilenceClock.patience(limit)

    def _kill(self, number: int, record: FlightRecord, process: psutil.Process, silence: float) -> None:
        state = FROZEN.get(process.status())
        message = f"no progress for {silence:.0f} seconds ({self.key})" + (f"; it is {state}" if state else "")
        report = RankReport(number, time.monotonic(), message, kind="hang", activity=record.activity(), plain=True)
        reports.write(report, self.scratch)
        process.kill()


@contextmanager
def watching_actors(watchdog: ActorWatchdog) -> Iterator[None]:
    """Run the watchdog in a thread until the context ends."""

    def look(frozen_seconds: float) -> None:
        with suppress(psutil.Error, OSError):  # the actor may have ended
            watchdog.look(frozen_seconds)

    with periodically(look, _ACTOR_TICK, "weft actor watchdog"):
        yield
