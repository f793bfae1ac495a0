"""The body of a rank, or of the only process. Every outcome becomes a report and an exit status."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil

from weft.errors import StoppedError
from weft.launch import flight, reports
from weft.launch.failures import rank_failure_text, save_current_record
from weft.launch.launchers import process_of_launcher
from weft.launch.machine import end_with_parent
from weft.launch.reports import RankReport
from weft.launch.scratch import is_running
from weft.launch.status import FAILURE, STATUS, SUCCESS
from weft.launch.stopping import request_stop
from weft.launch.watchdog import STACKS, in_collective, periodically, watch_for_ever, watched, write_stacks_to
from weft.terminal import say

# Seconds that a rank with bad input waits for the others to report the same; and seconds that a rank which waited in
# vain for another gives the launcher to examine the others.
LINGER_SECONDS = 1.0
_LAUNCHER_SECONDS = 0.5  # between two checks of the launcher

Body = Callable[[], bool | None]


def joined() -> bool:
    """Whether torchrun or weft started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


unsafe_destructors = False  # whether a Ray has died, whose native destructors then crash


def program(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit with the status that it returns.

    A rank that has finished and left its process group exits after Python's cleanup and before native destructors,
    because destructors of some libraries race with threads of others, and have crashed finished ranks. So does
    a controller whose Ray has died.
    """
    ended: list[int] = []

    def skip_destructors() -> None:
        if (ended == [SUCCESS] and joined()) or (ended and unsafe_destructors):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended[0])

    atexit.register(skip_destructors)  # the first registered function runs last
    ended.append(main())
    sys.exit(ended[0])


def guarded(body: Body, debug: bool = False) -> int:
    """Run `body` and return the exit status. `body` returns False for a failed verdict; exceptions become messages.

    If there are several ranks, a failure ends the process at once, because collectives and threads would keep it alive.
    """
    into = reports.folder()
    if into is not None:
        _prepare_rank(into)
    try:
        with watched(partial(_end_hung, debug=debug)), _ending_with_launcher() if into is None else nullcontext():
            passed = body()
    except KeyboardInterrupt:
        return _end_rank(128 + signal.SIGINT)
    except StoppedError as stop:
        status = 128 + stop.number
        return _end_rank(_leave_report(reports.of_stop(env_rank(), status), status))
    except SystemExit as error:
        if not joined():
            raise
        return _end_rank(_report_exit(error.code))
    except Exception as error:
        return _end_rank(_report(reports.of_exception(env_rank(), error), debug))
    finally:
        flight.recorder.close()
    if passed is False:
        return _leave_report(reports.of_verdict(env_rank()), FAILURE)
    return SUCCESS


def env_rank() -> int:
    """This process's rank; 0 in the only process."""
    return int(os.environ.get("RANK", 0))


def _prepare_rank(scratch: Path) -> None:
    """Let weft's launcher detect and explain the end of this rank."""
    end_with_parent()
    write_stacks_to(scratch / STACKS / str(env_rank()))
    flight.recorder.open(scratch / flight.FOLDER / flight.live_name(env_rank()))
    flight.begin(env_rank(), int(os.environ["WORLD_SIZE"]))


@contextmanager
def _ending_with_launcher() -> Iterator[None]:
    """Inside, a thread watches the launcher of this rank. If the launcher ends (killed, or by a signal that it does not
    forward, such as SIGUSR1 for torchrun), this rank gets SIGTERM, so that it saves and ends."""
    launcher = process_of_launcher() if joined() else None
    signals: list[int] = []

    def look(frozen: float) -> None:
        if launcher is None or signals or is_running(launcher):
            return
        signals.append(signal.SIGTERM)
        if request_stop(signal.SIGTERM) and os.environ.get("LOCAL_RANK", "0") == "0":
            say(f"the launcher of these ranks (process {launcher.pid}) has ended, so they end", error=True)

    with nullcontext() if launcher is None else periodically(look, _LAUNCHER_SECONDS, "weft-launcher"):
        yield


def set_up_actor(number: int) -> Path:
    """Set up an actor's process, so that the controller can read its flight record and a hang ends it with a report.
    Returns the folder for reports."""
    into = reports.folder()
    assert into is not None
    write_stacks_to(into / STACKS / str(number))
    flight.recorder.open(into / flight.FOLDER / flight.live_name(number))
    flight.begin(number, int(os.environ.get("WORLD_SIZE", 1)))
    end_with_parent(signal.SIGKILL)
    watch_for_ever(partial(_end_hung, debug=False))
    return into


def _report(report: RankReport, debug: bool) -> int:
    """Report this process's failure to its launcher, or to the user if there is none. Returns the exit status."""
    into = reports.folder()
    if into is not None:
        if report.kind == "peer":
            report = replace(report, ended_ranks=_find_ended_ranks(into))
        try:
            reports.write(report, into)
        except OSError:  # the scratch folder's disk is full
            say(rank_failure_text(report, joined(), debug), error=True)
        if report.plain or report.kind == "hang":
            _linger(into)
        return report.status
    if reports.RUN_NOTE in os.environ:
        with suppress(OSError):
            reports.write(report, Path(os.environ[reports.RUN_NOTE]).parent)
    is_saved = report.kind == "user" or save_current_record(report)
    say(rank_failure_text(report, joined(), debug), error=True)
    flight.recorder.close(remove=is_saved)
    return report.status


def _end_hung(message: str, stack: str, debug: bool) -> None:
    """In the watchdog's thread, report that the main thread is stuck, and end the process."""
    calls = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    report = RankReport(
        env_rank(), time.monotonic(), f"{message} ({flight.recorder.key})", stack, "hang", flight.activity(),
        waited=in_collective(calls[::-1]), collectives=flight.last_collectives(),
    )  # fmt: skip
    _report(report, debug)
    sys.stderr.flush()
    os._exit(STATUS["hang"])


def end_with_report(error: Exception) -> NoReturn:
    """In a thread, report an error and end the process, because its main thread is in native code."""
    status = _report(reports.of_exception(env_rank(), error), debug=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _report_exit(code: object) -> int:
    """Report sys.exit in a rank. Without a report, a rank that only lost its peer would seem to have failed first.
    Returns the exit status."""
    status = code if isinstance(code, int) else SUCCESS if code is None else FAILURE  # the same rule as in Python
    into = reports.folder()
    message = f"exit status {status}" if isinstance(code, int) else str(code)
    if into is None and not isinstance(code, int | None):
        say(message, error=True)
    if into is not None and status != SUCCESS:
        reports.write(
            RankReport(env_rank(), time.monotonic(), message, activity=flight.activity()),
            into,
        )
    return status


def _leave_report(report: RankReport, status: int) -> int:
    """Write a report of a failed verdict, or of a stop by a signal. Neither is a crash. Returns the exit status: a rank
    that weft started ends with success, and the launcher reads the report."""
    into = reports.folder()
    if into is None:
        return status
    reports.write(report, into)
    return SUCCESS


def _linger(folder: Path) -> None:
    """Wait until all ranks have reported, at most LINGER_SECONDS.

    Bad input fails all ranks in the same way, and the launcher then prints one error. After a hang, the wait gives the
    launcher time to examine the other ranks.
    """
    end = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < end and len(reports.read_all(folder)) < int(os.environ.get("WORLD_SIZE", 1)):
        time.sleep(0.02)


def _find_ended_ranks(scratch: Path) -> list[int]:
    """The ranks that had ended when this one lost a connection. The agent stops the other ranks only later."""
    end = time.monotonic() + LINGER_SECONDS
    while True:  # a process closes its connections shortly before it ends
        ended_ranks = []
        for rank, record in flight.read_all(scratch / flight.FOLDER).items():
            try:
                ended = psutil.Process(record.pid).status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                ended = True
            ended_ranks += [rank] if ended else []
        if ended_ranks or time.monotonic() > end:
            return ended_ranks
        time.sleep(0.02)


def _end_rank(status: int) -> int:
    """End one of several ranks at once, without destructors that wait for the others. If there is only one rank, return
    `status`."""
    if not joined():
        return status
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
