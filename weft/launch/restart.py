"""`--restarts N`: run the command again after a failure that the user cannot prevent.

Each attempt has a new launcher and new ranks, so that nothing of a failed attempt is left in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from weft.launch import flight
from weft.launch.failures import Failure
from weft.launch.launch import LaunchOutcome, attempt
from weft.terminal import say

# Kinds of failure that a restart would repeat, and why.
_FINAL = {
    "user": "what it says has to be mended first",
    "disagree": "ranks that disagree would do so again",
    "nonfinite": "training that is not finite would be so again",
}

ResumeCommand = Callable[[Path], Sequence[str]]  # RUN -> the command line that goes on from its newest checkpoint
Attempt = Callable[[Sequence[str], int, bool], LaunchOutcome]


def run_with_restarts(
    command: Sequence[str],
    resume_command: ResumeCommand,
    nproc: int,
    restarts: int,
    debug: bool = False,
    attempt: Attempt = attempt,
) -> int:
    """Run `command` in `nproc` ranks, and again after failures, up to `restarts` times. Returns the exit status.

    Later attempts run `resume_command`: they resume from the newest complete checkpoint of the run's folder, or start
    at step 1. Two failures in a row at the same step end the run, because the third would be at that step, too.
    """
    before: Failure | None = None
    for number in range(restarts + 1):
        outcome = attempt(command, nproc, debug)
        failure = outcome.failure
        if failure is None:
            return outcome.status
        final = _FINAL.get(failure.kind, "")
        if before is not None and before.step == failure.step and not final:
            final = f"it has failed twice in a row {_step_text(failure)}"
        if final or number == restarts:
            _say(f"not restarted: {final}" if final else f"not restarted: {restarts} restarts are used up")
            return outcome.status
        if failure.run:
            _put_aside(Path(failure.run), number + 1)
            command = resume_command(Path(failure.run))
        _say(f"restart {number + 1} of {restarts}: the attempt failed {_step_text(failure)} ({failure.kind})")
        before = failure
    raise AssertionError("an attempt is always the last")


def _put_aside(run: Path, number: int) -> None:
    """Keep a failed attempt's flight records from being overwritten, in RUN/flight/attempt-N."""
    aside = run / flight.FOLDER / f"attempt-{number}"
    with suppress(OSError):
        aside.mkdir(parents=True, exist_ok=True)
        for path in (run / flight.FOLDER).glob("rank-*.json"):
            path.rename(aside / path.name)


def _step_text(failure: Failure) -> str:
    return f"at step {failure.step}" if failure.step else "before the first step"


def _say(text: str) -> None:
    say(text, error=True)
