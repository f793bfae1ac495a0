"""The exceptions that users are meant to see."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend: the message says what is wrong, where, and what to set instead.

    The command line prints it without a traceback and exits with status 2.
    """


class RanksDisagreeError(RuntimeError):
    """Ranks that should be alike are not: other config, data, code or plan. Every rank raises the same message."""
