"""Starting ranks on this machine, and ending all of them as soon as one fails.

The ranks run under torch's elastic agent, without restarts. A rank that raises writes a report (reports.py) at once;
the agent sees it die, stops the others, and the report of the rank that failed first is shown.
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
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from weft.cluster import reports
from weft.cluster.machine import cpu_cores
from weft.cluster.reports import RankReport
from weft.cluster.stopping import Forwarder
from weft.errors import StoppedError

SUCCESS, FAILURE, USER_ERROR = 0, 1, 2
STOP_SECONDS = 5  # from a rank's failure to SIGKILL for the ranks that do not end
LINGER_SECONDS = 1.0  # how long a rank with a user error waits for the others to report the same

Body = Callable[[], bool | None]


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
    if reports.folder() is not None:
        _end_with_parent()
    try:
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
        return _end_rank(_report(error, debug))
    if passed is False:
        return _report_verdict()
    return SUCCESS


def launch(command: Sequence[str], nproc: int, debug: bool = False) -> int:
    """Run `command` in `nproc` ranks of this machine and wait. Returns the exit status; failures are shown here."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not debug:
        _silence_agent()
    with (
        tempfile.TemporaryDirectory(prefix="weft-") as scratch,
        _environment(_rank_variables(scratch, nproc)),
        _signal_handlers_kept(),
        _leftovers_killed(Path(scratch)),
        Forwarder(lambda: _ranks(scratch)) as forwarder,
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
                return forwarder.say()
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _show_failure(reports.read_all(Path(scratch)), exits, nproc, debug)
        except SignalException as error:
            print(f"stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
            return 128 + int(error.sigval)
        notes = reports.read_all(Path(scratch))  # ranks that ended well leave nothing else
        return max((note.status for note in notes), default=SUCCESS)


@contextmanager
def _leftovers_killed(scratch: Path) -> Iterator[None]:
    """Kill ranks that outlive a failed one by STOP_SECONDS; the agent gives half a minute to one that is stopped.

    scratch: the folder of the reports, which every rank has in its environment.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            errors = [report for report in reports.read_all(scratch) if not report.is_verdict]
            if errors and time.time() - errors[0].time > STOP_SECONDS:
                _kill_ranks(scratch)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _kill_ranks(scratch: Path) -> None:
    for rank in _ranks(str(scratch)):
        with suppress(psutil.Error):
            rank.kill()


def _ranks(scratch: str) -> list[psutil.Process]:
    """The processes that this launch has started."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.environ().get(reports.FOLDER_VARIABLE) == scratch:
                found.append(child)
    return found


def describe_failure(found: Sequence[RankReport], exits: Mapping[int, int], nproc: int, debug: bool) -> str:
    """What to show of a failed run: the rank that failed first, and how many others were stopped.

    found: reports, the earliest first. exits: rank -> exit status (negative: the signal) of the ranks that did not end
    well, in the order in which they were seen.
    """
    errors = [report for report in found if not report.is_verdict]
    silent = _silent_rank(errors, exits)
    if silent is not None:
        return _silent_message(silent, exits[silent]) + _stopped(nproc - 1)
    assert errors, "a rank failed, left no report and was not stopped"
    first = errors[0]
    same = len(errors) == nproc and all(report.message == first.message for report in errors)
    title = f"error: {first.message}" if same and first.is_user_error else f"rank {first.rank} failed: {first.message}"
    trace = "" if first.is_user_error and not debug else "\n" + first.traceback
    return (title + trace).rstrip() + ("" if same else _stopped(nproc - 1))


def _show_failure(found: Sequence[RankReport], exits: Mapping[int, int], nproc: int, debug: bool) -> int:
    print(describe_failure(found, exits, nproc, debug), file=sys.stderr, flush=True)
    errors = [report for report in found if not report.is_verdict]
    if errors and errors[0].is_user_error and _silent_rank(errors, exits) is None:
        return USER_ERROR
    return FAILURE


def _silent_rank(errors: Sequence[RankReport], exits: Mapping[int, int]) -> int | None:
    """The rank that ended without a report, killed or by os._exit: others may since have reported that it is gone.

    The agent's own signals are told apart: SIGTERM to all that are left, SIGKILL to those that outlive STOP_SECONDS.
    """
    reported = {report.rank for report in errors}
    stopping = {-signal.SIGTERM, 128 + signal.SIGTERM}
    if errors and time.time() - errors[0].time >= STOP_SECONDS:
        stopping.add(-signal.SIGKILL)
    for position, (rank, status) in enumerate(exits.items()):
        first_seen = position == 0 and not errors
        if rank not in reported and (first_seen or status not in stopping):
            return rank
    return None


def _silent_message(rank: int, status: int) -> str:
    if status >= 0:
        return f"rank {rank} ended with exit status {status} and no message"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = {
        "SIGKILL": " (often the kernel, short of memory: lower step.max_tokens_per_device or use fewer ranks)",
        "SIGSEGV": " (a crash in native code)",
        "SIGBUS": " (often a full /dev/shm)",
    }.get(name, "")
    return f"rank {rank} was killed by {name}{hint}"


def _stopped(others: int) -> str:
    return f"\n{others} other rank{'s were' if others != 1 else ' was'} stopped." if others else ""


def _report(error: Exception, debug: bool) -> int:
    """Report an exception of this process to whoever watches it. Returns the exit status."""
    rank = int(os.environ.get("RANK", 0))
    report = reports.of_exception(rank, error)
    into = reports.folder()
    if into is not None:
        reports.write(report, into)
        if report.is_user_error:
            _linger(into)
    else:
        title = f"rank {rank} failed: " if joined() else "error: "
        trace = "" if report.is_user_error and not debug else report.traceback
        print(f"{trace}{title}{report.message}", file=sys.stderr, flush=True)
    return USER_ERROR if report.is_user_error else FAILURE


def _report_exit(code: object) -> int:
    """sys.exit in a rank: without a report, a rank that merely lost its peer would seem to have failed first."""
    status = code if isinstance(code, int) else FAILURE if code else SUCCESS
    into = reports.folder()
    if into is not None and status != SUCCESS:
        message = f"exit status {status}" if isinstance(code, int) else str(code)
        reports.write(RankReport(int(os.environ["RANK"]), time.time(), message), into)
    return status


def _report_verdict() -> int:
    """A failed verdict is no crash: a rank that weft started ends well and leaves a note."""
    into = reports.folder()
    if into is None:
        return FAILURE
    reports.write(reports.of_verdict(int(os.environ["RANK"])), into)
    return SUCCESS


def _report_stop(status: int) -> int:
    """A run that a signal ended as it should is no crash either: the note carries the exit status."""
    into = reports.folder()
    if into is None:
        return status
    reports.write(reports.of_stop(int(os.environ["RANK"]), status), into)
    return SUCCESS


def _linger(folder: Path) -> None:
    """Bad input fails every rank alike: give the others time to say so, that it is shown once, as one error."""
    end = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < end and len(reports.read_all(folder)) < int(os.environ.get("WORLD_SIZE", 1)):
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
