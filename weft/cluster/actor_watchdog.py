"""Looks after actors that cannot say themselves that they hang: one that is stopped has no thread that runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from weft.cluster import reports
from weft.cluster.reports import RankReport
from weft.cluster.watch import FROZEN, Silence, process_of
from weft.cluster.watchdog import looking
from weft.telemetry import flight
from weft.telemetry.flight import Record

_TICK = 0.5


class Pulse:
    """The actors of a group that run on this machine, as far as the controller waits for them.

    timeout, key: seconds that a phase may take of which the actor does not say it itself, and the key that says so.
    scratch: where their records are, and where reports go.
    """

    def __init__(self, scratch: Path, timeout: float, key: str) -> None:
        self.scratch, self.timeout, self.key = scratch, timeout, key
        self._silence = Silence()
        self._calls = Counter[int]()
        self._asked: dict[int, float] = {}

    @contextmanager
    def waiting_for(self, number: int) -> Iterator[None]:
        """An actor has been asked for something, and has not answered yet."""
        if not self._calls[number]:
            self._asked[number] = time.monotonic()
        self._calls[number] += 1
        try:
            yield
        finally:
            self._calls[number] -= 1

    def look(self, frozen_seconds: float) -> None:
        """End those that make no progress, with a report on their behalf. frozen_seconds: in which nothing ran here."""
        for number, record in flight.read_all(self.scratch / flight.FOLDER).items():
            silence = self._silence.seconds(number, record, frozen_seconds)
            if not self._calls[number] or not self._is_too_long(number, record, silence):
                continue
            process = process_of(record, self.scratch)
            if process is not None:
                self._end(number, record, process, silence)

    def _is_too_long(self, number: int, record: Record, silence: float) -> bool:
        if record.phase == flight.ENDLESS:  # a call has been sent, and has not begun
            return min(silence, time.monotonic() - self._asked[number]) > Silence.most(self.timeout)
        limit = record.limit if record.limit is not None else self.timeout * flight.PATIENCE["load"]
        return silence > Silence.most(limit)

    def _end(self, number: int, record: Record, process: psutil.Process, silence: float) -> None:
        state = FROZEN.get(process.status())
        message = f"no progress for {silence:.0f} seconds ({self.key})" + (f"; it is {state}" if state else "")
        report = RankReport(number, time.monotonic(), message, kind="hang", where=record.where(), plain=True)
        reports.write(report, self.scratch)
        process.kill()


@contextmanager
def looked_after(pulse: Pulse) -> Iterator[None]:
    """A thread that looks every now and then."""

    def look(frozen_seconds: float) -> None:
        with suppress(psutil.Error, OSError):  # it has ended meanwhile
            pulse.look(frozen_seconds)

    with looking(look, _TICK, "weft pulse"):
        yield
