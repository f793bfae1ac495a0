"""`weft ...` as a process of its own that has torch loaded: a fork, because a start takes longer than all the rest.

Everything of the product is real but the exec: the launcher's agent gets forks as ranks, too.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.support.machine import business

_context = multiprocessing.get_context("forkserver")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # the suite itself may run under a launcher
Prepare = Callable[[], None]
Target = Sequence[str] | Callable[[], int]


def environment(**variables: str) -> dict[str, str]:
    """Ours without a launcher's variables, each process on one thread."""
    inherited = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    return {**inherited, "OMP_NUM_THREADS": "1", **variables}


class Run:
    """A command that runs in a folder of its own, with its output in files.

    what: the words of `weft`, or a function that returns an exit status. prepare: called in the process before it
    begins. variables: of the environment, beside the suite's.
    """

    def __init__(self, target: Target, folder: Path, prepare: Prepare | None = None, **variables: str) -> None:
        self.out, self.err = (folder / f"{os.urandom(4).hex()}.{name}" for name in ("out", "err"))
        _context.set_forkserver_preload(["tests.support.preload"])
        self.process = _context.Process(
            target=_main, args=(target, str(folder), environment(**variables), str(self.out), str(self.err), prepare)
        )
        self.process.start()

    def wait_for(self, pattern: str, timeout: float = 60.0) -> None:
        """Until the console shows this."""
        end = time.monotonic() + timeout
        while not (self.out.exists() and re.search(pattern, self.output(), re.MULTILINE)):
            if not self.process.is_alive() or time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"never showed {pattern}: {self.errors()}")
            time.sleep(0.02)

    def wait(self, timeout: float = 120.0) -> Self:
        """Until it has ended; one that hangs is killed, and that fails."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"still running after {timeout:.0f} s: {self.errors()}")
        self.ended = time.monotonic()
        return self

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def status(self) -> int | None:
        return self.process.exitcode

    def output(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def errors(self) -> str:
        return self.err.read_text() if self.err.exists() else ""


def run(
    target: Target, folder: Path, prepare: Prepare | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """One to its end, as subprocess.run gives it."""
    run = Run(target, folder, prepare, **variables).wait(240.0 * business())
    assert run.status is not None
    done = subprocess.CompletedProcess(target, run.status, run.output(), run.errors())
    run.out.unlink()
    run.err.unlink()
    return done


def _main(
    target: Target, folder: str, environment: Mapping[str, str], out: str, err: str, prepare: Prepare | None
) -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    os.chdir(folder)
    # As a new interpreter would.
    sys.path[1:1] = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    torch.set_num_threads(1)
    subprocess_handler.Popen = _Fork
    os.environ.clear()
    os.environ.update(environment)
    if prepare is not None:
        prepare()
    end_with(target if callable(target) else partial(_weft, target), dict(os.environ))


def _weft(words: Sequence[str]) -> int:
    from weft import cli
    from weft.launch.launchers import join_launcher

    join_launcher()
    return cli.main(words)


def script(words: Sequence[str]) -> int:
    """`python words`, in this process."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    sys.argv = list(words)
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")
    return 0


def end_with(body: Callable[[], object], environment: Mapping[str, str]) -> None:
    """Call `body` in this environment; this process ends with it, as a program would."""
    os.environ.clear()
    os.environ.update(environment)
    status: Any = 70
    try:
        status = body()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


class _Fork(subprocess.Popen[bytes]):
    """What the agent starts for `python -m weft WORDS`, `python -m MODULE WORDS` or `python SCRIPT`: a fork of the
    launcher, with a session of its own."""

    def _execute_child(self, args: Sequence[str], *arguments: Any) -> None:  # type: ignore[override]
        environment = next(value for value in arguments if isinstance(value, dict))
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            import torch

            torch.set_num_threads(1)  # makes the pool anew, once after a fork: threads of backward would race for it
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            words = [word for word in args[1:] if word != "-u"]  # which torchrun adds
            body = partial(_weft, words[2:]) if words[:2] == ["-m", "weft"] else partial(script, words)
            end_with(body, environment)
