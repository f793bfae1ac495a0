"""What the launcher observes of its ranks besides their exit: records, stacks, process states. Ranks that outlive a
failure are killed here."""

from __future__ import annotations

import signal
import time
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
# Seconds, and share of the limit, by which the launcher stays behind the ranks' own watchdogs. A rank that holds
# Python's lock cannot run its own.
_BEHIND_SECONDS, _BEHIND_SHARE = 10.0, 0.2
_TICK = 0.2
FROZEN = {psutil.STATUS_STOPPED: "stopped (SIGSTOP)", psutil.STATUS_TRACING_STOP: "stopped by a debugger",
           psutil.STATUS_DISK_SLEEP: "waiting for a disk or a driver (state D)"}  # fmt: skip
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class Evidence:
    """What is known of each rank. records: its flight record. stacks: its main thread's stack in a hang or crash,
    innermost call first. states: the state of its process, if that explains a hang. oom_kills: number of processes that
    the kernel killed meanwhile for want of memory; None if unknown."""

    records: Mapping[int, FlightRecord] = field(default_factory=dict)
    stacks: Mapping[int, list[str]] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    oom_kills: int | None = None


class SilenceClock:
    """How long each rank has shown no progress, by its record, without the time in which this process did not run."""

    def __init__(self) -> None:
        self._excused: dict[int, tuple[int, float]] = {}  # rank -> changes, frozen seconds when they were seen

    def seconds(self, rank: int, record: FlightRecord, frozen_seconds: float) -> float:
        """Seconds since the rank's record last changed."""
        changes, excused = self._excused.get(rank, (-1, 0.0))
        if record.changes != changes:
            self._excused[rank] = (record.changes, frozen_seconds)
            return 0.0
        return time.monotonic() - record.since - (frozen_seconds - excused)

    @staticmethod
    def patience(limit: float) -> float:
        """The seconds of silence after which another process reports a rank whose own limit is `limit` seconds."""
        return limit * (1 + _BEHIND_SHARE) + _BEHIND_SECONDS


class StoppedClock:
    """How long each process has been stopped, without the time in which this process did not run. Whatever phase a
    stopped process is in, it makes no progress: it need not be given the time of a slow phase."""

    def __init__(self) -> None:
        self._since: dict[psutil.Process, tuple[float, float]] = {}  # monotonic seconds, frozen seconds

    def seconds(self, process: psutil.Process, frozen_seconds: float) -> float:
        """Seconds since it was first seen to be stopped; 0 if it is not."""
        with suppress(psutil.Error):
            if process.status() in _STOPPED:
                since, frozen = self._since.setdefault(process, (time.monotonic(), frozen_seconds))
                return time.monotonic() - since - (frozen_seconds - frozen)
        self._since.pop(process, None)
        return 0.0

    @staticmethod
    def patience(timeout: float) -> float:
        """The seconds after which a stopped rank is reported: those that wait for it in a collective know first."""
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
        """Note which ranks are stopped when one has failed, and request stacks where it has reported a hang; kill ranks
        that outlive a failed one by STOP_SECONDS."""
        errors = [report for report in reports.read_all(self._scratch) if not report.is_verdict]
        if not errors:
            self._report_silent(frozen_seconds)
            return
        if not self._has_noted_states:
            self._has_noted_states = True
            self._note_states()
        if not self._has_requested_stacks and any(report.kind == "hang" for report in errors):
            self._has_requested_stacks = True
            self._ask_for_stacks()
        # The agent would wait half a minute for a rank that is stopped.
        if not self._has_killed and time.monotonic() - errors[0].time > STOP_SECONDS:
            self._has_killed = True
            for _, child in self._ranks():
                with suppress(psutil.Error):
                    child.kill()

    def processes(self) -> list[psutil.Process]:
        """The ranks that have been started so far."""
        return [child for _, child in self._ranks()]

    def _ranks(self) -> Iterator[tuple[int, psutil.Process]]:
        """The ranks that have a record, and children of this process that have none yet, by their environment."""
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

    def _note_states(self) -> None:
        for rank, child in self._ranks():
            with suppress(psutil.Error):
                state = FROZEN.get(child.status())
                if state is not None:
                    self._states[rank] = state

    def _ask_for_stacks(self) -> None:
        for rank, child in self._ranks():
            with suppress(psutil.Error):
                if (self._scratch / STACKS / str(rank)).exists():  # it has a handler for the signal
                    child.send_signal(signal.SIGUSR2)

    def _report_silent(self, frozen_seconds: float) -> None:
        """Report on behalf of a rank that makes no progress and cannot say so."""
        for rank, record in flight.read_all(self._scratch / flight.FOLDER).items():
            silence = self._silence.seconds(rank, record, frozen_seconds)
            if record.pid not in self._processes:
                self._processes |= {process.pid: process for _, process in self._ranks()}
            process = self._processes.get(record.pid)
            stopped = 0.0 if process is None else self._stops.seconds(process, frozen_seconds)
            too_long = record.limit is not None and silence > SilenceClock.patience(record.limit)
            if too_long or (record.timeout is not None and stopped > StoppedClock.patience(record.timeout)):
                message = f"no progress for {silence:.0f} seconds{self._frozen(rank)}"
                report = RankReport(rank, time.monotonic(), message, kind="hang", activity=record.activity())
                reports.write(report, self._scratch)
                return

    def _frozen(self, rank: int) -> str:
        """Words for the state of a rank's process, if that explains the hang; else empty."""
        for number, process in self._ranks():
            with suppress(psutil.Error):
                if number == rank and process.status() in FROZEN:
                    return f"; it is {FROZEN[process.status()]}"
        return ""


@contextmanager
def watching(scratch: Path) -> Iterator[RankMonitor]:
    """Observe the ranks in a thread until they have ended."""
    watch = RankMonitor(scratch)
    with periodically(watch.look, _TICK, "weft watch"):
        yield watch
