"""Starts ranks on this machine, and ends all of them as soon as one fails.

The ranks run under torch's elastic agent. A rank that raises writes a report at once (entrypoint.py, reports.py). The
agent detects its end and stops the others, and weft prints the failure of the rank that failed first (failures.py). The
launcher observes the running ranks (monitor.py).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from weft.launch import flight, reports
from weft.launch.entrypoint import Body, guarded, joined
from weft.launch.failures import Failure, diagnose, is_external, save_evidence
from weft.launch.machine import cpu_cores, end_with_parent, variables_set
from weft.launch.monitor import STOP_SECONDS, StoppedClock, watching
from weft.launch.scratch import scratch_folder
from weft.launch.status import STATUS, SUCCESS
from weft.launch.stopping import SignalForwarder, SignalHandlers
from weft.launch.watchdog import periodically
from weft.terminal import say
from weft.versions import launch_config

# Kinds of failure that a restart would repeat -> the reason.
_FINAL = {
    "user": "the error has to be fixed first",
    "disagree": "the ranks would disagree again",
    "nonfinite": "the training would be non-finite again",
}
_TICK = 0.5  # seconds between two looks at a process
_LONGEST_PAUSE = 60.0  # seconds between two attempts
_LISTED = 20  # attempts whose failure the last message names


@dataclass(frozen=True)
class LaunchOutcome:
    """How the ranks ended. failure: None if they ended well, or if a signal stopped the launcher."""

    status: int
    failure: Failure | None = None


def run(body: Body, command: Sequence[str], nproc: int, debug: bool = False) -> int:
    """Run `body` here if this process is a rank or the only process; otherwise run `command` in `nproc` ranks. Returns
    the exit status."""
    if joined() or nproc == 1:
        return guarded(body, debug)
    return launch(command, nproc, debug)


def launch(command: Sequence[str], nproc: int, debug: bool = False) -> int:
    """Run `command` in `nproc` ranks of this machine and wait. Prints failures. Returns the exit status."""
    return attempt(command, nproc, debug).status


def attempt(command: Sequence[str], nproc: int, debug: bool = False) -> LaunchOutcome:
    """Like `launch`, but returns the failure, too."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from weft.launch import rendezvous

    if not debug:  # the agent's log repeats the output of this function
        for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
            logger = logging.getLogger(name)
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_cores() // nproc)))}
    if sys.platform == "linux":
        # The ranks need no other machine. Without this, gloo resolves its address by a name server, which may hang.
        variables |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    with (
        scratch_folder() as scratch,
        variables_set({reports.FOLDER_VARIABLE: str(scratch), **variables}),
        _signal_handlers_restored(),
        watching(scratch) as monitor,
        SignalForwarder(monitor.processes) as forwarder,
    ):
        config = launch_config(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.register(),
            local_addr=rendezvous.LOOPBACK,
            signals_to_handle="SIGQUIT",  # SignalForwarder handles the others
            max_restarts=0,
            monitor_interval=0.1,
            shutdown_timeout=STOP_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "agent")),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            rank_reports = reports.read_all(scratch)
            if forwarder.number and all(report.is_verdict for report in rank_reports):
                return LaunchOutcome(forwarder.say())
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            evidence = monitor.evidence()
            failure = diagnose(rank_reports, exits, evidence, nproc, debug)
            if failure.kind != "user":
                save_evidence(rank_reports, exits, evidence)
            say(failure.message, error=True)
            return LaunchOutcome(failure.status, failure)
        except SignalException as error:
            say(f"stopped by {signal.Signals(error.sigval).name}", error=True)
            return LaunchOutcome(128 + int(error.sigval))
        verdicts = reports.read_all(scratch)  # ranks that ended well write no other report
        return LaunchOutcome(max((report.status for report in verdicts), default=SUCCESS))


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers at the end, because the agent installs its handlers and does not remove them."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in handled}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


# ---------------------------------------------------------------- restarts

ResumeCommand = Callable[[Path], Sequence[str]]  # RUN -> the command line that resumes its newest checkpoint
Attempt = Callable[[Sequence[str], int, bool], LaunchOutcome]


def attempt_alone(
    command: Sequence[str], nproc: int, debug: bool = False, *, timeout: float = float("inf")
) -> LaunchOutcome:
    """Like `attempt`, for a command that is one process and prints its failures itself, such as the controller of
    `weft rl`. RUN/metrics.jsonl gives its last step. timeout: train.timeout; the process is killed if it is stopped for
    longer (StoppedClock.patience). If the process leaves no report, the cause is external: a signal
    killed it, or Ray's native code ended it after one of Ray's processes had died."""
    with scratch_folder() as scratch:
        note, processes = scratch / "run", list[psutil.Process]()
        clock, hangs = StoppedClock(), list[str]()

        def look(frozen_seconds: float) -> None:
            for stopped in processes:
                seconds = clock.seconds(stopped, frozen_seconds)
                if seconds > StoppedClock.patience(timeout) and not hangs:
                    hangs.append(f"no progress for {seconds:.0f} seconds (train.timeout): the controller is stopped")
                    stopped.kill()

        with SignalForwarder(lambda: processes) as forwarder, periodically(look, _TICK, "weft supervisor"):
            process = subprocess.Popen(command, env={**os.environ, reports.RUN_NOTE: str(note)})
            processes.append(psutil.Process(process.pid))
            status = process.wait()
        run = note.read_text(encoding="utf-8") if note.exists() else ""
        report = next(iter(reports.read_all(scratch)), None)
    message = report.message if report is not None else f"the controller ended with exit status {status}"
    if status < 0 and report is not None:  # it crashed, or was killed, after it had reported a failure
        status = report.status
    elif status < 0:
        message = next(iter(hangs), f"the controller was killed by {signal.Signals(-status).name}")
        say(message, error=True)
        status = STATUS["hang" if hangs else "killed"]
    kind = next((kind for kind, of_kind in STATUS.items() if of_kind == status), None)
    if status == SUCCESS or kind is None or forwarder.number:
        return LaunchOutcome(status)
    external, error = report is None or is_external(report.kind, message), "" if report is None else message
    step = _steps_done(run) + 1 if run else 0
    return LaunchOutcome(status, Failure(kind, message, step=step, run=run, error=error, external=external))


def note_run(folder: Path) -> None:
    """Send the path of RUN to the process that restarts this one, if there is one, and end together with it."""
    if reports.RUN_NOTE in os.environ:
        Path(os.environ[reports.RUN_NOTE]).write_text(str(folder.absolute()), encoding="utf-8")
        end_with_parent()


def _steps_done(run: str) -> int:
    """The last optimizer step in RUN/metrics.jsonl."""
    try:
        lines = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines[-2:] if line.endswith("\n")), default=0)


def run_with_restarts(
    command: Sequence[str],
    resume_command: ResumeCommand,
    nproc: int,
    restarts: int,
    debug: bool = False,
    attempt: Attempt = attempt,
) -> int:
    """Run `command` in `nproc` ranks, and again after failures, up to `restarts` times. Returns the exit status.

    Later attempts run `resume_command`: they resume from the newest complete checkpoint in the run's folder, or start
    at step 1. Only an error that a restart would repeat ends the run earlier: a kind in _FINAL, or an error of the
    program itself (an exception, a crash, too little memory) that occurs twice at the same step. Failures with an
    external cause (Failure.external), hangs and failures of the storage may repeat. The pause before an attempt doubles
    while attempts fail at the same step.
    """
    failures: list[Failure] = []
    before: Failure | None = None
    alike = 0  # attempts in a row that failed at the same step
    for number in range(1, restarts + 2):
        outcome = attempt(command, nproc, debug)
        failure = outcome.failure
        if failure is None:
            return outcome.status
        alike = alike + 1 if failures and failure.step == failures[-1].step else 0
        failures.append(failure)
        step, is_own = _at_step(failure), not failure.external and failure.kind not in ("hang", "storage")
        reason = _FINAL.get(failure.kind, "")
        if before is not None and failure.repeats(before) and is_own and not reason:
            reason = f"it has failed twice {step} with the same error"
        if number > restarts and not reason:
            reason = f"all {restarts} restarts are used. The attempts failed:\n{_list_failures(failures)}"
        if reason:
            say(f"not restarted: {reason}", error=True)
            return outcome.status
        if failure.run:
            records = Path(failure.run) / flight.FOLDER
            archive = records / f"attempt-{number}"
            with suppress(OSError):  # the next attempt would overwrite the records of this attempt
                archive.mkdir(parents=True, exist_ok=True)
                for path in records.glob("rank-*.json"):
                    path.rename(archive / path.name)
            command = resume_command(Path(failure.run))
        pause = min(2.0 ** (alike - 1), _LONGEST_PAUSE) if alike else 0.0
        waits = f"; the next attempt starts in {pause:g} s" if pause else ""
        say(f"restart {number} of {restarts}: the attempt failed {step} ({failure.kind}){waits}", error=True)
        if stopped := _pause(pause):
            say(f"stopped by {signal.Signals(stopped).name}", error=True)
            return 128 + stopped
        before = failure if is_own else before
    raise AssertionError("the loop ends in the last attempt")


def _at_step(failure: Failure) -> str:
    return f"at step {failure.step}" if failure.step else "before the first step"


def _list_failures(failures: Sequence[Failure]) -> str:
    """One line per attempt: its step, and what failed. The middle of a long list is omitted."""
    lines = [
        f"  {number}  {_at_step(failure)} ({failure.kind}): {failure.message.strip().partition(chr(10))[0]}"
        for number, failure in enumerate(failures, 1)
    ]
    omitted = len(lines) - _LISTED
    if omitted > 1:
        lines[_LISTED // 2 : -_LISTED // 2] = [f"  ... {omitted} more"]
    return "\n".join(lines)


def _pause(seconds: float) -> int:
    """Wait. Returns the number of a signal that ended the wait, or 0."""
    with SignalHandlers() as signals:
        end = time.monotonic() + seconds
        while not signals.number and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
    number: int = signals.number
    return number
