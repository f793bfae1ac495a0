"""The report of a failed `weft rl` run: evidence, the state of the run, and how to resume."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from weft.errors import ActorError, StorageError
from weft.launch.failures import describe_remaining_files, last_whole_checkpoint
from weft.launch.ray_actors import ActorGroup
from weft.launch.status import STATUS, failure_kind
from weft.launch.watchdog import periodically
from weft.terminal import say

_TICK = 0.5
_SHOWN_CALLS = 4


@contextmanager
def report_failures(folder: Path, groups: Mapping[str, ActorGroup], command: str) -> Iterator[None]:
    """Inside, after an actor's failure, the evidence of all actors is written to RUN, and the error gets a note with
    the command that resumes. A file that cannot be written becomes a StorageError.

    groups: actor groups by the subfolder of RUN for their evidence. command: the command that resumes.
    """
    try:
        yield
    except ActorError as error:
        for name, group in groups.items():
            group.save_evidence(folder / name)
        if error.kind != "user":
            error.add_note(describe_remaining_files(str(folder)).strip() + f"\nResume with: {command}")
        raise
    except OSError as error:
        if failure_kind(error, str(folder)) != "storage":
            raise
        raise StorageError(storage_message(error, folder, command)) from error


def storage_message(error: OSError, folder: Path, command: str) -> str:
    file = f"{error.filename}: " if error.filename else ""
    failed = (
        f"could not write {file}{error.strerror or error}. The storage is full, read-only or gone: look at `df -h` "
        "and at the folder."
    )
    return " ".join(filter(None, (failed, last_whole_checkpoint(folder), f"Then resume with: {command}")))


@contextmanager
def watching_controller(timeout: float, folder: Path, command: str) -> Iterator[None]:
    """Inside, if a function blocks the controller's event loop for `timeout` seconds, the process ends and prints its
    stack.

    The actors' watchdog acts only while the controller waits for actors. This watchdog is for functions that run in the
    controller, such as the user's rl.advantage and on_step. command: the command that resumes.
    """
    loop, main = asyncio.get_running_loop(), threading.get_ident()
    answered, then_frozen = time.monotonic(), 0.0

    def answer(frozen: float) -> None:
        nonlocal answered, then_frozen
        answered, then_frozen = time.monotonic(), frozen

    def look(frozen: float) -> None:
        loop.call_soon_threadsafe(answer, frozen)
        seconds = time.monotonic() - answered - (frozen - then_frozen)
        if seconds > timeout:
            say(hang_message(seconds, sys._current_frames().get(main), folder, command), error=True)
            sys.stderr.flush()
            os._exit(STATUS["hang"])

    with periodically(look, _TICK, "weft controller watchdog"):
        yield


def hang_message(seconds: float, frame: FrameType | None, folder: Path, command: str) -> str:
    """The message for a controller whose event loop is blocked."""
    calls = "".join(traceback.format_stack(frame)[-_SHOWN_CALLS:]) if frame is not None else ""
    hang = (
        f"error: the controller has been in one call for {seconds:.0f} seconds (train.timeout). A function that runs "
        "in it, such as rl.advantage or on_step, hangs or takes longer:\n"
        f"{calls.rstrip()}"
    )
    goes_on = filter(None, (last_whole_checkpoint(folder), f"Resume with: {command}"))
    return f"{hang}\n{' '.join(goes_on)}"
