"""What each rank leaves behind for the process that started it: one JSON file per rank.

Exit statuses alone would not say which rank failed first, nor why.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import UserError

# Names the folder for the reports of a run; only ranks that weft itself started have it.
FOLDER_VARIABLE = "WEFT_RANK_REPORTS"


@dataclass(frozen=True, slots=True)
class RankReport:
    """An exception of one rank, or a failed verdict. time: seconds since the epoch, when it was raised.

    is_verdict: no error; the rank ran to its end. status: the exit status that it asks for.
    """

    rank: int
    time: float
    message: str
    traceback: str = ""
    is_user_error: bool = False
    is_verdict: bool = False
    status: int = 1


def of_exception(rank: int, error: BaseException) -> RankReport:
    """The report of an exception that ended this rank."""
    is_user_error = isinstance(error, UserError)
    message = str(error) if is_user_error else f"{type(error).__name__}: {error}".rstrip(": ")
    message = "\n".join([message, *getattr(error, "__notes__", [])])  # where and why, added on the way up
    trace = "".join(traceback.format_exception(error))
    return RankReport(rank, time.time(), message, trace, is_user_error)


def of_verdict(rank: int) -> RankReport:
    """The report of a rank that ran to its end and did not pass."""
    return RankReport(rank, time.time(), "did not pass", is_verdict=True)


def of_stop(rank: int, status: int) -> RankReport:
    """The report of a rank that a signal has ended as it should."""
    return RankReport(rank, time.time(), "stopped", is_verdict=True, status=status)


def folder() -> Path | None:
    """Where this rank's report goes; None where weft did not start it."""
    value = os.environ.get(FOLDER_VARIABLE)
    return Path(value) if value else None


def write(report: RankReport, into: Path) -> None:
    """Write the report whole or not at all: the reader may look at any moment."""
    draft = into / f"rank-{report.rank}.draft"
    draft.write_text(json.dumps(asdict(report)), encoding="utf-8")
    draft.rename(into / f"rank-{report.rank}.json")


def read_all(from_folder: Path) -> list[RankReport]:
    """All reports, the earliest first."""
    texts = (path.read_text(encoding="utf-8") for path in from_folder.glob("rank-*.json"))
    return sorted((RankReport(**json.loads(text)) for text in texts), key=lambda report: report.time)
