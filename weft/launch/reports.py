"""The report of each rank to the process that started it: one JSON file per rank.

Exit statuses do not show which rank failed first, or why.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.errors import ActorError, RanksDisagreeError, UserError
from weft.launch import flight
from weft.launch.status import STATUS, Kind, failure_kind
from weft.version import PACKAGE

# The variable with the folder for the reports of a run. Only ranks that weft started have it.
FOLDER_VARIABLE = "WEFT_RANK_REPORTS"
# The variable with the file to which a restartable process writes the path of RUN. Its report is in the same folder.
RUN_NOTE = "WEFT_RUN_NOTE"


@dataclass(frozen=True, slots=True)
class RankReport:
    """An exception of one rank, a failed verdict, or a hang.

    time: monotonic clock, when it was detected. activity: step, phase and documents. plain: whether the message
    contains the advice. collectives: the rank's last collectives, oldest first. waited: whether another rank did not
    come to a collective in time. within: that time, in words. gone: ranks that had ended before this one. is_verdict:
    whether the rank ran to its end, without an error. exit_status: replaces the status of the kind.
    """

    rank: int
    time: float
    message: str
    traceback: str = ""
    kind: Kind = "failed"
    activity: str = ""
    is_verdict: bool = False
    plain: bool = False
    waited: bool = False
    collectives: Sequence[dict[str, Any]] = ()
    ended_ranks: Sequence[int] = ()
    exit_status: int | None = None
    within: str = "train.timeout"

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's failure is the probable cause."""
        return self.kind == "peer" or self.waited

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The order of reports: the probable cause, then ranks that waited in vain, then ranks that lost a connection.
        A connection closes when a rank that waited in vain ends."""
        return self.is_consequence, self.kind == "peer", self.time

    @property
    def status(self) -> int:
        """The exit status of a rank that ends with this report."""
        return STATUS[self.kind] if self.exit_status is None else self.exit_status


def of_exception(rank: int, error: BaseException) -> RankReport:
    """The report of an exception that ended this rank."""
    record = flight.recorder.record()
    kind = failure_kind(error, record.run)
    plain = isinstance(error, UserError | RanksDisagreeError | FloatingPointError | ActorError)
    message = str(error) if plain else f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):
        calls = traceback.extract_tb(error.__traceback__)
        own_calls = [call for call in calls if Path(call.filename).is_relative_to(PACKAGE)] or calls
        location = (
            f" ({own_calls[-1].name}, {Path(own_calls[-1].filename).name}:{own_calls[-1].lineno})" if own_calls else ""
        )
        plain, message = True, f"an input is nested too deeply{location}: flatten it. --debug prints the position."
    if kind == "user" and isinstance(error, OSError):
        plain, message = True, f"{error.filename}: {error.strerror}. Name another file or folder."
    message = "\n".join([message.rstrip(": "), *getattr(error, "__notes__", [])])  # notes contain position and reason
    activity = record.activity()
    if plain:
        activity = f"in step {record.step} of {record.steps}" if record.step else ""
    trace = "".join(traceback.format_exception(error))
    last = [] if kind == "user" else flight.last_collectives()
    return RankReport(
        rank, time.monotonic(), message, trace, kind, activity, plain=plain, waited=kind == "hang", collectives=last,
        within=flight.recorder.patience,
    )  # fmt: skip


def of_verdict(rank: int) -> RankReport:
    """The report of a rank that ran to its end and did not pass."""
    return RankReport(rank, time.monotonic(), "did not pass", is_verdict=True)


def of_stop(rank: int, status: int) -> RankReport:
    """The report of a rank that stopped after a signal."""
    return RankReport(rank, time.monotonic(), "stopped", is_verdict=True, exit_status=status)


def folder() -> Path | None:
    """The folder of this rank's report; None if weft did not start the rank."""
    value = os.environ.get(FOLDER_VARIABLE)
    return Path(value) if value else None


def write(report: RankReport, into: Path) -> None:
    """Write the report completely or not at all, because it may be read at any moment."""
    draft = into / f"rank-{report.rank}.draft"
    draft.write_text(json.dumps(asdict(report)), encoding="utf-8")
    draft.rename(path_of(report.rank, into))


def path_of(rank: int, folder: Path) -> Path:
    """The file of a rank's report."""
    return folder / f"rank-{rank}.json"


def read_all(from_folder: Path) -> list[RankReport]:
    """All reports, the earliest first."""
    texts = (path.read_text(encoding="utf-8") for path in from_folder.glob("rank-*.json"))
    return sorted((RankReport(**json.loads(text)) for text in texts), key=lambda report: report.time)
