"""RUN/starts.jsonl: each start of a run (time, host, command, hardware) and its end. Imports no torch."""

from __future__ import annotations

import json
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from weft.errors import StoppedError, first_line
from weft.launch.summary import versions

STARTS = "starts.jsonl"
_LONGEST_ERROR = 500


def note_start(folder: Path, step: int, *, device: str, ranks: int, mesh: Mapping[str, int], engines: str = "") -> None:
    """Appends the line of a start. folder: RUN. step: the last step of an earlier start, 0 if none. mesh: axis -> size.
    engines: of `weft rl`, such as "2 vllm"."""
    _append(
        folder,
        {
            "started": _now(),
            "step": step,
            "command": command(),
            "host": socket.gethostname(),
            "device": device,
            "ranks": ranks,
            "mesh": dict(mesh),
            "engines": engines,
            "commit": commit_of(Path.cwd()),
            "versions": {**versions(), "python": platform.python_version()},
        },
    )


def note_end(folder: Path, error: BaseException | None) -> None:
    """Appends how the last start ended. A killed process appends nothing."""
    stopped = error is None or isinstance(error, StoppedError)
    text = "" if error is None or stopped else f"{type(error).__name__}: {first_line(error)}"
    _append(folder, {"ended": _now(), "error": text[:_LONGEST_ERROR]})


def command() -> str:
    """The command line of this process, for a shell: `weft sft ...`, or that of a program that calls weft."""
    program, words = sys.argv[0], sys.argv[1:]
    is_weft = Path(program).name == "weft" or Path(program).parts[-2:] == ("weft", "__main__.py")
    return shlex.join(["weft", *words] if is_weft else ["python", program, *words])


def commit_of(folder: Path) -> str:
    """The git commit that is checked out in a folder; "" if it is not in a repository. Reads files, because `git` may
    run programs that the repository's config names."""
    for parent in (folder, *folder.parents):
        mark = parent / ".git"
        with suppress(OSError, ValueError):
            if mark.is_file():  # of a worktree or a submodule: `gitdir: PATH`
                mark = parent / mark.read_text().partition("gitdir:")[2].strip()
            if mark.is_dir():
                return _head(mark)
    return ""


def _head(git: Path) -> str:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return _hash(head)
    name, common = head.partition(":")[2].strip(), git / "commondir"
    for base in (git, git / common.read_text().strip() if common.is_file() else git):
        if (base / name).is_file():
            return _hash((base / name).read_text().strip())
        packed = base / "packed-refs"
        for line in packed.read_text().splitlines() if packed.is_file() else []:
            if line.endswith(f" {name}"):
                return _hash(line.split()[0])
    return ""


def _hash(text: str) -> str:
    return text if len(text) in (40, 64) and set(text) <= set("0123456789abcdef") else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _append(folder: Path, line: Mapping[str, object]) -> None:
    with suppress(OSError), (folder / STARTS).open("a", encoding="utf-8", errors="backslashreplace") as stream:
        # A full disk must end a run only if weights or metrics are lost.
        stream.write(json.dumps(line) + "\n")
