"""What a path names, asked before it is opened: what is no regular file may never end, or never begin. No torch."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

from weft.errors import UserError

_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def regular_file(path: Path, what: str) -> Path:
    """The path, where it is a regular file or a link to one. what: such as "a config file". Raises UserError for
    anything else by what it is, and OSError where there is nothing."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path}: is a link that leads back to itself: name {what} itself.") from None
        raise
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise UserError(f"{path}: is {kind}, where {what} is expected: name {what}, or copy it into one.")
    return path
