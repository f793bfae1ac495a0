"""Ends actors that hang without being able to report it: the threads of a stopped process do not run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from weft.launch import flight, reports
from weft.launch.flight import FlightRecord
from weft.launch.reports import RankReport
from weft.launch.watch import FROZEN, SilenceClock, StoppedClock, process_of
from weft.launch.watchdog import periodically

_TICK = 0.5


class ActorWatchdog:
    """Watches the actors of a group that run on this machine, while the controller waits for them.

    timeout: seconds that a phase may take without progress, unless the actor's own record has a limit; key: the config
    key of that timeout. scratch: the folder with the actors' records, where reports are written.
    """

    def __init__(self, scratch: Path, timeout: float, key: str) -> None:
        self.scratch, self.timeout, self.key = scratch, timeout, key
        self._silence, self._stops = SilenceClock(), StoppedClock()
        self._calls = Counter[int]()
        self._called_at: dict[int, float] = {}

    @contextmanager
    def waiting_for(self, number: int) -> Iterator[None]:
        """Inside, this actor has a call to answer."""
        if not self._calls[number]:
            self._called_at[number] = time.monotonic()
        self._calls[number] += 1
        try:
            yield
        finally:
            self._calls[number] -= 1

    def look(self, frozen_seconds: float) -> None:
        """Kill the actors that make no progress, and write a report for each. frozen_seconds: time in which this
        process itself did not run, which does not count."""
        for number, record in flight.read_all(self.scratch / flight.FOLDER).items():
            silence = self._silence.seconds(number, record, frozen_seconds)
            process = process_of(record, self.scratch)
            if process is None:
                continue
            stopped = self._stops.seconds(process, frozen_seconds)
            if self._calls[number] and (
                stopped > StoppedClock.patience(self.timeout) or self._is_too_long(number, record, silence)
            ):
                self._end(number, record, process, silence)

    def _is_too_long(self, number: int, record: FlightRecord, silence: float) -> bool:
        if record.phase == flight.ENDLESS:  # a call has been sent, and has not begun
            return min(silence, time.monotonic() - self._called_at[number]) > SilenceClock.patience(self.timeout)
        limit = record.limit if record.limit is not None else self.timeout * flight.PATIENCE["load"]
        return silence > SilenceClock.patience(limit)

    def _end(self, number: int, record: FlightRecord, process: psutil.Process, silence: float) -> None:
        state = FROZEN.get(process.status())
        message = f"no progress for {silence:.0f} seconds ({self.key})" + (f"; it is {state}" if state else "")
        report = RankReport(number, time.monotonic(), message, kind="hang", activity=record.activity(), plain=True)
        reports.write(report, self.scratch)
        process.kill()


@contextmanager
def watching_actors(watchdog: ActorWatchdog) -> Iterator[None]:
    """Run the watchdog in a thread."""

    def look(frozen_seconds: float) -> None:
        with suppress(psutil.Error, OSError):  # the actor has ended meanwhile
            watchdog.look(frozen_seconds)

    with periodically(look, _TICK, "weft actor watchdog"):
        yield
