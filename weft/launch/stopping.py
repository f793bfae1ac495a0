"""Signals that end a run. The launcher forwards the first signal to its ranks, which save. A second ends them at
once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, ClassVar

import psutil

from weft.terminal import say

# SIGHUP: the terminal has been closed. SIGUSR1: SLURM can send it before it preempts a job.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0  # a terminal or SLURM may signal several processes, which forward the signal to each other


def is_ignored(number: signal.Signals) -> bool:
    """Whether this process must not handle the signal: nohup lets programs ignore SIGHUP."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


class SignalHandlers:
    """`with ...:` calls `first(number)` for the first of SIGNALS and `repeated(number)` for a later one."""

    def __init__(self) -> None:
        self.number = 0
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def first(self, number: int) -> None:
        """Handle the first signal. `self.number` is already set."""

    def repeated(self, number: int) -> None:
        """Handle a later signal: end this process as if there were no handler."""
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._received_at = number, time.monotonic()
            self.first(number)
        elif time.monotonic() - self._received_at > SAME_REQUEST_SECONDS:
            self.repeated(number)

    def __enter__(self) -> Any:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if not is_ignored(number)]
            self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def announce_ending_signal() -> None:
    """Install handlers that print the signal that ended the process, for a process that has nothing to save."""

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # the terminal may be closed
            os.write(sys.stderr.fileno(), f"stopped by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if not is_ignored(number):
            signal.signal(number, end)


class StopSignals(SignalHandlers):
    """The handlers of a rank, whose loop polls `number` between steps. promise: the loop's reaction to a signal, which
    is printed at once.

    Only Python's main thread can handle signals. In another thread, `with` returns the instance that the main thread
    entered, if there is one.
    """

    _listening: ClassVar[StopSignals | None] = None

    def __init__(self, promise: str = "") -> None:
        super().__init__()
        self.promise = promise

    def first(self, number: int) -> None:
        # Not through a stream: streams are not reentrant, and the signal may have arrived during a write.
        if self.promise:
            text = (
                f"\nstopping {signal.Signals(number).name}: {self.promise}; a second signal ends it at once, unsaved\n"
            )
            with suppress(OSError):
                os.write(2, text.encode())

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            if StopSignals._listening is None:
                return self
            StopSignals._listening.promise = self.promise
            return StopSignals._listening
        StopSignals._listening = self
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if StopSignals._listening is self:
            StopSignals._listening = None
        super().__exit__(kind, error, trace)


def request_stop(number: signal.Signals) -> bool:
    """Send this process a signal, unless it has already received one: a second signal would end it without saving.
    Returns whether the signal was sent."""
    listening = StopSignals._listening
    if listening is not None and listening.number:
        return False
    os.kill(os.getpid(), number)
    return True


class SignalForwarder(SignalHandlers):
    """The handlers of a launcher. ranks: the processes started so far."""

    def __init__(self, ranks: Callable[[], Sequence[psutil.Process]]) -> None:
        super().__init__()
        self._ranks = ranks

    def first(self, number: int) -> None:
        started = self._ranks()
        for rank in started:
            with suppress(psutil.Error):
                rank.send_signal(number)
        if not started:
            self._end(number)

    def repeated(self, number: int) -> None:
        for rank in self._ranks():
            with suppress(psutil.Error):
                rank.kill()
        self._end(number)

    def _end(self, number: int) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        raise SignalException(f"stopped by signal {number}", signal.Signals(number))

    def say(self) -> int:
        """Print that the ranks have ended after the signal. Returns the exit status."""
        say(f"stopped by {signal.Signals(self.number).name}", error=True)
        return 128 + self.number
