"""The exceptions that users are meant to see."""

from __future__ import annotations

import shlex
from typing import Any


class StoppedError(Exception):
    """A signal ended the run, which has saved and has steps left to do. number: the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


class UserError(ValueError):
    """An error that the user can fix: the message says what is wrong, where, and what to set instead. The command line
    prints it without a traceback and exits with status 2."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without its full stop, as a part of a sentence. If it ends in a colon,
    the second line follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".:")


def runs_own_code(path: str, error: BaseException, key: str = "model.path") -> UserError | None:
    """The UserError for an error that reports that transformers would have to run code from `path`; None for other
    errors. key: the config key of `path`."""
    if "trust_remote_code" not in str(error):
        return None
    return UserError(
        f"{key}: {path} needs code that comes with it (auto_map in one of its JSON files), which weft never runs. "
        "Use an architecture and a tokenizer that transformers ships: a newer version may have them."
    )


def how_to_install(package: str, extra: str) -> str:
    """How to install a missing package, as the end of a sentence: the package alone, or one of weft's extras. On the
    index the name `weft` belongs to another project, so extras can be installed only from a clone."""
    return f"pip install {shlex.quote(package)}, or the whole extra in weft's clone: pip install '.[{extra}]'"


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library (tokenizers, safetensors) has panicked. Such errors are not subclasses of `Exception`."""
    return type(error).__name__ == "PanicException"


class BadRowError(UserError):
    """An invalid row of data, which data.bad_rows=drop skips."""


class StorageError(UserError):
    """Files of the run could not be written or read; the storage must be fixed, not the config. Exit status 13."""


class RanksDisagreeError(RuntimeError):
    """Ranks that must be equal differ: in config, data, code or plan. Every rank raises the same message."""


class ActorError(RuntimeError):
    """An actor, or a process that works for this one, failed or died. kind: as in weft/launch/status.py. report: the
    RankReport of the process, if it left one."""

    def __init__(self, message: str, kind: str, report: Any = None) -> None:
        super().__init__(message)
        self.kind, self.report = kind, report
