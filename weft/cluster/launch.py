"""Starting ranks on this machine, and ending all of them as soon as one fails.

The ranks run under torch's elastic agent, without restarts (those are in restart.py). A rank that raises writes a
report (reports.py) at once; the agent sees it die, stops the others, and the rank that failed first is shown
(failures.py). Meanwhile watch.py looks after ranks that stay.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from weft.cluster import reports
from weft.cluster.failures import Failure, diagnose, keep_evidence, keep_own, of_this_rank
from weft.cluster.machine import cpu_cores, oom_kills
from weft.cluster.reports import RankReport
from weft.cluster.status import FAILURE, STATUS, SUCCESS, USER_ERROR
from weft.cluster.stopping import Forwarder
from weft.cluster.watch import STOP_SECONDS, watching
from weft.cluster.watchdog import STACKS, waits, watched, write_stacks_to
from weft.errors import StoppedError
from weft.observe import collectives, flight

__all__ = ["FAILURE", "SUCCESS", "USER_ERROR", "Body", "Outcome", "attempt", "guarded", "joined", "launch", "run"]

LINGER_SECONDS = 1.0  # how long a rank with bad input waits for the others to report the same, or one that waited in
# vain for the launcher to look what the others are doing

Body = Callable[[], bool | None]


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended. failure: None where they ended well, or the launcher was told to stop."""

    status: int
    failure: Failure | None = None


def joined() -> bool:
    """Whether this process is one rank of several that something (torchrun, weft) has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(body: Body, command: Sequence[str], nproc: int, debug: bool = False) -> int:
    """Run `body` here if this is a rank or the only one, else `command` in `nproc` ranks. Returns the exit status."""
    if joined() or nproc == 1:
        return guarded(body, debug)
    return launch(command, nproc, debug)


def guarded(body: Body, debug: bool = False) -> int:
    """Run `body`, which may return False for a failed verdict; turn exceptions into messages and an exit status.

    In a rank of several this ends the process on failure: what it holds (collectives, threads) must not keep it alive.
    """
    into = reports.folder()
    if into is not None:
        _settle_in(into)
    try:
        with watched(partial(_end_hung, debug=debug)):
            passed = body()
    except KeyboardInterrupt:
        return _end_rank(128 + signal.SIGINT)
    except StoppedError as stop:
        return _end_rank(_report_stop(128 + stop.number))
    except SystemExit as error:
        if not joined():
            raise
        return _end_rank(_report_exit(error.code))
    except Exception as error:
        return _end_rank(_report(reports.of_exception(_rank(), error), debug))
    finally:
        flight.own.close()
    if passed is False:
        return _report_verdict()
    return SUCCESS


def launch(command: Sequence[str], nproc: int, debug: bool = False) -> int:
    """Run `command` in `nproc` ranks of this machine and wait. Returns the exit status; failures are shown here."""
    return attempt(command, nproc, debug).status


def attempt(command: Sequence[str], nproc: int, debug: bool = False) -> Outcome:
    """As `launch`, and says what failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not debug:
        _silence_agent()
    kills = oom_kills() or 0
    with (
        tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True) as scratch,
        _environment(_rank_variables(scratch, nproc)),
        _signal_handlers_kept(),
        watching(Path(scratch)) as watch,
        Forwarder(watch.processes) as forwarder,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # port 0: the store picks a free one, so that no other program can take it
            local_addr="127.0.0.1",
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are the forwarder's
            max_restarts=0,
            monitor_interval=0.1,
            shutdown_timeout=STOP_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=os.path.join(scratch, "agent")),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            if forwarder.number and not any(not report.is_verdict for report in reports.read_all(Path(scratch))):
                return Outcome(forwarder.say())
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            found, seen = reports.read_all(Path(scratch)), watch.evidence((oom_kills() or 0) - kills)
            failure = diagnose(found, exits, seen, nproc, debug)
            if failure.kind != "user":
                keep_evidence(found, exits, seen)
            print(failure.message, file=sys.stderr, flush=True)
            return Outcome(failure.status, failure)
        except SignalException as error:
            print(f"stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
            return Outcome(128 + int(error.sigval))
        notes = reports.read_all(Path(scratch))  # ranks that ended well leave nothing else
        return Outcome(max((note.status for note in notes), default=SUCCESS))


# ---------------------------------------------------------------- in a rank


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _settle_in(scratch: Path) -> None:
    """What a rank of weft's launcher does first, so that its end is noticed and explained."""
    _end_with_parent()
    write_stacks_to(scratch / STACKS / str(_rank()))
    flight.own.open(scratch / flight.FOLDER / flight.live_name(_rank()))
    flight.begin(_rank(), int(os.environ["WORLD_SIZE"]))


def _report(report: RankReport, debug: bool) -> int:
    """Report the failure of this process to whoever watches it. Returns the exit status."""
    into = reports.folder()
    if into is not None:
        if report.kind == "peer":
            report = replace(report, gone=_gone(into))
        try:
            reports.write(report, into)
        except OSError:  # the scratch folder's disk is full
            print(of_this_rank(report, joined(), debug), file=sys.stderr, flush=True)
        if report.plain or report.kind == "hang":
            _linger(into)
        return report.status
    if report.kind != "user":
        keep_own(report)
    print(of_this_rank(report, joined(), debug), file=sys.stderr, flush=True)
    flight.own.close()
    return report.status


def _end_hung(what: str, stack: str, debug: bool) -> None:
    """From the watchdog's thread: report for the main one, which is stuck, and end the process."""
    calls = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    report = RankReport(
        _rank(), time.monotonic(), f"{what} (train.timeout)", stack, "hang", flight.own.record().where(),
        waited=waits(calls[::-1]), collectives=collectives.last(),
    )  # fmt: skip
    _report(report, debug)
    sys.stderr.flush()
    os._exit(STATUS["hang"])


def _report_exit(code: object) -> int:
    """sys.exit in a rank: without a report, a rank that merely lost its peer would seem to have failed first."""
    status = code if isinstance(code, int) else FAILURE if code else SUCCESS
    into = reports.folder()
    if into is not None and status != SUCCESS:
        message = f"exit status {status}" if isinstance(code, int) else str(code)
        reports.write(RankReport(_rank(), time.monotonic(), message, where=flight.own.record().where()), into)
    return status


def _report_verdict() -> int:
    """A failed verdict is no crash: a rank that weft started ends well and leaves a note."""
    into = reports.folder()
    if into is None:
        return FAILURE
    reports.write(reports.of_verdict(_rank()), into)
    return SUCCESS


def _report_stop(status: int) -> int:
    """A run that a signal ended as it should is no crash either: the note carries the exit status."""
    into = reports.folder()
    if into is None:
        return status
    reports.write(reports.of_stop(int(os.environ["RANK"]), status), into)
    return SUCCESS


def _linger(folder: Path) -> None:
    """Bad input fails every rank alike: give the others time to say so, that it is shown once, as one error.

    And a rank that waited in vain gives the launcher time to see what the others are doing.
    """
    end = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < end and len(reports.read_all(folder)) < int(os.environ.get("WORLD_SIZE", 1)):
        time.sleep(0.02)


def _gone(scratch: Path) -> list[int]:
    """The ranks that have ended: this one lost its connection to one of them. The agent stops others only later."""
    end = time.monotonic() + LINGER_SECONDS
    while True:  # connections are closed a moment before a process has ended
        found = []
        for rank, record in flight.read_all(scratch / flight.FOLDER).items():
            try:
                ended = psutil.Process(record.pid).status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                ended = True
            found += [rank] if ended else []
        if found or time.monotonic() > end:
            return found
        time.sleep(0.02)


def _end_rank(status: int) -> int:
    """End a rank of several at once, without destructors that wait for the other ranks; else return `status`."""
    if not joined():
        return status
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent() -> None:
    """Ask Linux to end this rank when the launcher dies, even by SIGKILL: no orphans on the accelerators."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _rank_variables(scratch: str, nproc: int) -> dict[str, str]:
    variables = {
        reports.FOLDER_VARIABLE: scratch,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_cores() // nproc))),
    }
    if sys.platform == "linux":  # gloo asks the name service for this host's address otherwise, which may hang
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """The agent installs its own handlers and leaves them behind."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in handled}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _silence_agent() -> None:
    """The agent's log repeats what is shown here, in its own words."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
