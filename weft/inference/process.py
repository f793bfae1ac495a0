"""The process of a rollout engine: starting it, observing it, and ending it with all its children."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from weft.errors import ActorError

_SUPERVISOR = Path(__file__).parent / "supervisor.py"
_LINES, _WIDTH = 15, 400  # of the end of the log in messages: lines, and characters of a line
# An error at the start of a line or after a logger's prefix, with or without its module.
_ERROR = re.compile(r"(?:^|\] )(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception): .+)")
_NOISE = re.compile(r"nanobind|^ - (leaked|\.\.\.) |resource_tracker")  # what vLLM's processes print at every exit
_CLOSING = 15.0  # seconds for a process to end before it is killed
_LOOK = 0.05  # seconds between two looks at its status


# Variables of weft's processes that an engine must not get. The allocator's: vLLM's sleep mode does not work with
# expandable segments. PYTHONHOME: it is of weft's Python, not of the engine's.
_NOT_INHERITED = ("PYTHONHOME", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def inherited() -> dict[str, str]:
    """This process's environment variables for an engine's process, without variables for weft's ranks. NCCL's
    interface is removed too, if weft has set it to loopback for ranks of one host."""
    variables = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    if variables.get("NCCL_SOCKET_IFNAME") == "lo":
        del variables["NCCL_SOCKET_IFNAME"]
    return variables


class EngineDiedError(ActorError):
    """A rollout engine has exited, hangs, or is broken. The message has its name, its current call, and the end of its
    log."""

    def __init__(self, message: str, kind: Literal["killed", "hang"] = "killed") -> None:
        super().__init__(message, kind)


class EngineProcess:
    """A command that runs until `close`, or until this process ends. Its output goes to a log file."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> None:
        """Start the process. name: for messages. environment: all its environment variables. folder: removed after the
        process has ended."""
        self.name, self.log, self._folder = name, log, folder
        log.parent.mkdir(parents=True, exist_ok=True)
        self._start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(folder or ""), *command], env=dict(environment),
                start_new_session=True, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def tail(self) -> str:
        """The first error in the process's output, the last lines, and the path of the log."""
        with self.log.open("rb") as file:
            file.seek(self._start)
            lines = [line for line in file.read().decode(errors="replace").splitlines() if not _NOISE.search(line)]
        errors = (match.group(1) for line in lines if (match := _ERROR.search(line)))
        first = next((f"Its first error: {error[:_WIDTH]}\n" for error in errors), "")
        shown = "\n".join(f"  | {line[:_WIDTH]}" for line in lines[-_LINES:]) or "  | (it wrote nothing)"
        return f"{first}The end of {self.log}:\n{shown}"

    async def close(self) -> None:
        """End the process and all its children; no error if it has already ended."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING):
                while self.status is None:
                    await asyncio.sleep(_LOOK)
        if self.status is None:
            self._process.kill()
            self._process.wait()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
