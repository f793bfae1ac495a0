"""Starting ranks on this machine, and ending all of them as soon as one fails.

The ranks run under torch's elastic agent, without restarts (those are in restart.py). A rank that raises writes a
report (entrypoint.py, reports.py) at once. The agent sees it die and stops the others, and the rank that failed first
is shown (failures.py). Meanwhile watch.py observes the ranks that still run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.launch import reports
from weft.launch.entrypoint import Body, guarded, joined
from weft.launch.failures import Failure, diagnose, save_evidence
from weft.launch.machine import cpu_cores, variables_set
from weft.launch.scratch import scratch_folder
from weft.launch.status import SUCCESS
from weft.launch.stopping import SignalForwarder
from weft.launch.watch import STOP_SECONDS, watching
from weft.terminal import say
from weft.versions import launch_config


@dataclass(frozen=True)
class LaunchOutcome:
    """How the ranks ended. failure: None if they ended well, or if the launcher itself was told to stop."""

    status: int
    failure: Failure | None = None


def run(body: Body, command: Sequence[str], nproc: int, debug: bool = False) -> int:
    """Run `body` here if this is a rank or the only process, else `command` in `nproc` ranks. Returns the exit
    status."""
    if joined() or nproc == 1:
        return guarded(body, debug)
    return launch(command, nproc, debug)


def launch(command: Sequence[str], nproc: int, debug: bool = False) -> int:
    """Run `command` in `nproc` ranks of this machine and wait. Returns the exit status; failures are shown here."""
    return attempt(command, nproc, debug).status


def attempt(command: Sequence[str], nproc: int, debug: bool = False) -> LaunchOutcome:
    """Like `launch`, but returns the failure, too."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from weft.launch import rendezvous

    if not debug:
        _silence_agent()
    with (
        scratch_folder() as folder,
        variables_set(_rank_variables(scratch := str(folder), nproc)),
        _signal_handlers_kept(),
        watching(Path(scratch)) as watch,
        SignalForwarder(watch.processes) as forwarder,
    ):
        config = launch_config(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.register(),
            local_addr=rendezvous.LOOPBACK,
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
                return LaunchOutcome(forwarder.say())
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            rank_reports, evidence = reports.read_all(Path(scratch)), watch.evidence()
            failure = diagnose(rank_reports, exits, evidence, nproc, debug)
            if failure.kind != "user":
                save_evidence(rank_reports, exits, evidence)
            say(failure.message, error=True)
            return LaunchOutcome(failure.status, failure)
        except SignalException as error:
            say(f"stopped by {signal.Signals(error.sigval).name}", error=True)
            return LaunchOutcome(128 + int(error.sigval))
        notes = reports.read_all(Path(scratch))  # ranks that ended well leave nothing else
        return LaunchOutcome(max((note.status for note in notes), default=SUCCESS))


def _rank_variables(scratch: str, nproc: int) -> dict[str, str]:
    variables = {
        reports.FOLDER_VARIABLE: scratch,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_cores() // nproc))),
    }
    # The ranks need no other machine; and gloo would ask the name service for its address otherwise, which may hang.
    if sys.platform == "linux":
        variables |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return variables


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the signal handlers at the end: the agent installs its own and leaves them behind."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in handled}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _silence_agent() -> None:
    """Hide the agent's log, which repeats what is shown here."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
