"""The exceptions that users are meant to see."""

from __future__ import annotations

from typing import Any


class StoppedError(Exception):
    """The run was asked to end by a signal, has saved, and has more steps to do. number: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


class UserError(ValueError):
    """Something the user can mend: the message says what is wrong, where, and what to set instead.

    The command line prints it without a traceback and exits with status 2.
    """


def first_line(error: BaseException) -> str:
    """What an exception of a library says, as a part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def runs_own_code(path: str, error: Exception, key: str = "model.path") -> UserError | None:
    """What to say where transformers would only read `path` by running code that lies in it; None for another error."""
    if "trust_remote_code" not in str(error):
        return None
    return UserError(
        f"{key}: {path} asks for code of its own to be run (auto_map in one of its JSON files), which weft never does. "
        "Use an architecture and a tokenizer that transformers ships: a newer version may have them."
    )


class BadRowError(UserError):
    """Of one row of the data, which data.bad_rows=drop leaves out."""


class StorageError(UserError):
    """Files of the run could not be written or read: what to mend is the storage, not the config. Exit status 13."""


class RanksDisagreeError(RuntimeError):
    """Ranks that should be alike are not: other config, data, code or plan. Every rank raises the same message."""


class ActorError(RuntimeError):
    """An actor of a cluster, or a process that works for this one, failed or died. kind: as in weft/cluster/status.py;
    report: its own, where it left one."""

    def __init__(self, message: str, kind: str, report: Any = None) -> None:
        super().__init__(message)
        self.kind, self.report = kind, report
