"""Ends a rank that makes no progress outside of collectives, where nothing else would detect it.

A thread of each rank reads the rank's flight record. Collectives have a separate timeout, which expires first: ranks
that wait in a collective can name the rank that did not come.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.launch import flight

STACKS = "stacks"  # of ranks, in the launcher's scratch folder
# Seconds, and share of the limit, that the watchdogs of several ranks wait longer than the timeout of collectives.
BEHIND_SECONDS, BEHIND_SHARE = 2.0, 0.1
_TICK = 0.5


class SuspensionClock:
    """Measures the time in which this process did not run, because it was stopped or its machine was suspended. That
    time does not count as a hang."""

    def __init__(self, tick: float) -> None:
        self._tick, self._last = tick, time.monotonic()
        self.seconds = 0.0

    def tick(self) -> float:
        """Call this every `tick` seconds; returns the frozen time so far."""
        now = time.monotonic()
        late = now - self._last - self._tick
        self.seconds += late if late > 4 * self._tick else 0.0
        self._last = now
        return self.seconds


@contextmanager
def periodically(look: Callable[[float], None], interval: float, name: str) -> Iterator[None]:
    """Run a thread that calls look(frozen seconds so far) every `interval` seconds."""
    over, frozen = threading.Event(), SuspensionClock(interval)

    def loop() -> None:
        while not over.wait(interval):
            look(frozen.tick())

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


OnHang = Callable[[str, str], None]


@contextmanager
def watched(on_hang: OnHang) -> Iterator[None]:
    """In a thread, call on_hang(message, stack of the main thread) if this rank makes no progress for too long."""
    over = threading.Event()
    _start(on_hang, over)
    try:
        yield
    finally:
        over.set()


def watch_for_ever(on_hang: OnHang) -> None:
    """Like `watched`, until the process ends."""
    _start(on_hang, threading.Event())


def _start(on_hang: OnHang, over: threading.Event) -> None:
    threading.Thread(target=_watch, args=(on_hang, over), name="weft watchdog", daemon=True).start()


def _watch(on_hang: OnHang, over: threading.Event) -> None:
    frozen, main = SuspensionClock(_TICK), threading.main_thread().ident
    excused, changes = 0.0, -1
    while not over.wait(_TICK):
        seconds = frozen.tick()
        if flight.recorder.changes != changes:
            excused, changes = seconds, flight.recorder.changes
        silence, limit = flight.recorder.silence(), flight.recorder.limit
        if silence is None or limit is None:
            continue
        is_distributed = flight.recorder.record().world > 1
        late = BEHIND_SECONDS + BEHIND_SHARE * limit if is_distributed else 0.0
        if silence > late + seconds - excused and not over.is_set():
            frame = sys._current_frames().get(main or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            on_hang(f"no progress for {limit + silence:.0f} seconds", stack)
            return


def write_stacks_to(path: Path) -> None:
    """Write the stacks of all threads to `path` on SIGUSR2, and when the process crashes in native code.

    faulthandler does not need the interpreter's lock, so this works wherever a rank hangs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")  # stays open until the process ends
    faulthandler.enable(file)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR2, file)


def main_stack(text: str) -> list[str]:
    """The main thread's calls in a file of write_stacks_to, innermost first. The last dump counts."""
    threads = [block.strip().splitlines() for block in text.replace("\nThread", "\n\nThread").split("\n\n")]
    mains = [lines for lines in threads if lines and lines[-1].rstrip().endswith("in <module>")]
    return [line.strip() for line in mains[-1] if line.strip().startswith("File ")] if mains else []


# Files in which a rank waits for others. On CUDA, the host detects a hanging collective at the next point where it
# waits for the device: for numbers, an event, or all queued work.
_WAITING = ("/torch/distributed/", "/weft/launch/simulated.py", "/torch/cuda/__init__.py", "/torch/cuda/streams.py")


def in_collective(stack: list[str]) -> bool:
    """Whether a stack, innermost call first, is inside a collective, or waits for the device that runs one."""
    return bool(stack) and any(file in stack[0] for file in _WAITING)
