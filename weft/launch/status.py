"""Kinds of failure of a command and their exit statuses (docs/reference/failures.md). Imports no torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

from weft.errors import ActorError, RanksDisagreeError, StorageError, UserError

# peer: another rank ended; hang: another rank did not join a collective, or this rank made no progress.
Kind = Literal["failed", "user", "killed", "peer", "hang", "memory", "storage", "nonfinite", "disagree"]

SUCCESS, FAILURE, USER_ERROR = 0, 1, 2
STATUS: dict[Kind, int] = {
    "failed": FAILURE,
    "user": USER_ERROR,
    "killed": 10,
    "peer": 10,
    "hang": 11,
    "memory": 12,
    "storage": 13,
    "nonfinite": 14,
    "disagree": 15,
}

# Errors of a storage that is full, read-only, broken or gone, for any file.
STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG}

_OF_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES}

# Words in errors without a separate type: of gloo, c10d's store, torch's allocators, safetensors and DCP.
_WORDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("memory", ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")),
    ("storage", ("no space left on device", "disk quota exceeded", "file too large", "read-only file system",
                 "input/output error", "stale file handle")),
    ("hang", ("timed out waiting", "timed out after", "wait timeout", "application timeout", "operation timeout")),
    ("peer", ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe",
              "failed to recv", "socket closed", "remote process exited")),
)  # fmt: skip


def failure_kind(error: BaseException, run: str = "") -> Kind:
    """The kind of an exception, or of the exceptions that caused it. run: the run's folder, or ""."""
    if isinstance(error, UserError):
        return "storage" if isinstance(error, StorageError) else "user"
    if isinstance(error, ActorError):
        return cast(Kind, error.kind)
    if is_file_name_error(error) and not _lost_in_run(error, run):
        return "user"
    if isinstance(error, RecursionError):
        return "user"  # weft recurses only as deep as its input is nested
    for link in _causes(error):
        kind = _kind_of_one(link, run)
        if kind is not None:
            return kind
    return "failed"


def is_file_name_error(error: BaseException) -> bool:
    """Whether the error depends only on a file's name: the name is invalid, or this user may not open the file."""
    return isinstance(error, OSError) and error.errno in _OF_NAMES and isinstance(error.filename, str)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _kind_of_one(error: BaseException, run: str) -> Kind | None:
    if isinstance(error, RanksDisagreeError):
        return "disagree"
    if isinstance(error, FloatingPointError):
        return "nonfinite"
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names or _errno(error) == errno.ENOMEM:
        return "memory"
    if _errno(error) in STORAGE or _lost_in_run(error, run):
        return "storage"
    # The last resort: words in the message, but never in exceptions that Python raises for mistakes in code.
    if isinstance(error, RuntimeError) or names & {"SafetensorError", "CheckpointException"}:
        text = str(error).lower()
        for kind, words in _WORDS:
            if any(word in text for word in words):
                return kind
    return None


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _lost_in_run(error: BaseException, run: str) -> bool:
    """Whether a file of the run can no longer be opened: its folder was removed, or its permissions changed."""
    path = error.filename if isinstance(error, OSError) else None
    return bool(run) and isinstance(path, str) and Path(path).is_relative_to(run)
