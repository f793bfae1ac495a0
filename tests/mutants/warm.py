"""A process that has imported what takes long, and forks for every run of pytest: half of a mutant's time is imports.

`python -m tests.mutants.warm` reads lines of JSON [folder, words of pytest, seconds], and answers each by a line
[status or null where it ran longer, what failed].
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_TURN = 0.05  # seconds between looks at whether pytest has ended
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


class Warm:
    """Such a process, from the side that asks it."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "tests.mutants.warm"]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, words: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """(pytest's status, None where it ran longer; the test that failed first) in a checkout."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([str(folder), list(words), seconds]), file=self._process.stdin, flush=True)
        status, failed = json.loads(self._process.stdout.readline())
        return status, failed

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Answer until standard input ends."""
    import pytest  # noqa: F401
    import torch.distributed.tensor  # noqa: F401
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401

    transformers.logging.set_verbosity_error()
    for line in sys.stdin:
        folder, words, seconds = json.loads(line)
        print(json.dumps(_answer(folder, words, seconds)), flush=True)


def _answer(folder: str, words: list[str], seconds: float) -> tuple[int | None, str]:
    output = Path(folder).with_name("output")
    child = os.fork()
    if child == 0:
        status: Any = 3
        try:
            status = _in_child(folder, words, output)
        finally:
            os._exit(int(status))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(_TURN)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # ranks that outlive their test, or all of it
    if not ended:
        os.waitpid(child, 0)
        return None, ""
    failed = _FAILED.search(output.read_text(errors="replace"))
    return os.waitstatus_to_exitcode(status), failed.group(1) if failed else ""


def _in_child(folder: str, words: list[str], output: Path) -> int:
    """pytest's status, in a checkout: nothing of the one that this module is from stays imported."""
    import pytest

    os.setsid()
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    inherited = os.environ["PYTHONPATH"]
    sys.path[:] = [folder, *(path for path in sys.path if path not in (inherited, "", os.getcwd()))]
    os.environ["PYTHONPATH"] = folder
    os.chdir(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "weft")]:
        del sys.modules[name]
    return int(pytest.main(words))


if __name__ == "__main__":
    main()
