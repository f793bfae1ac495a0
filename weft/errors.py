"""The exceptions that users are meant to see."""

from __future__ import annotations


class StoppedError(Exception):
    """The run was asked to end by a signal, has saved, and has more steps to do. number: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


class UserError(ValueError):
    """Something the user can mend: the message says what is wrong, where, and what to set instead.

    The command line prints it without a traceback and exits with status 2.
    """


class RanksDisagreeError(RuntimeError):
    """Ranks that should be alike are not: other config, data, code or plan. Every rank raises the same message."""
