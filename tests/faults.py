"""Real runs of the command line with faults in them: `Run(words, folder, fault)` forks a process that has torch loaded.

Everything of the product is real but the exec of ranks: the launcher's agent gets forks, for importing torch takes
longer than all the rest. A fault strikes one rank when it comes to a phase of a step (weft.observe.flight).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What `rank` does to itself when it comes to `phase` (of micro-batch `micro`, if given) of `step`; see DO.

    rank -1: all of them. once: a file; where it exists the fault is over, and it is made when the fault strikes.
    """

    do: str
    phase: str = "forward"
    step: int = 2
    micro: int | None = None
    rank: int = 0
    once: str = ""


class Run:
    """A command line that runs in a folder of its own, with its output in files."""

    def __init__(self, words: Sequence[str], folder: Path, fault: Fault | None = None, **variables: str) -> None:
        self.out, self.err = (folder / f"{os.urandom(4).hex()}.{name}" for name in ("out", "err"))
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment = {**kept, "OMP_NUM_THREADS": "1", **variables}
        _context.set_forkserver_preload(["tests.preload"])
        self.struck = folder / "struck-at"
        self.process = _context.Process(
            target=_main, args=(list(words), str(folder), environment, str(self.out), str(self.err), fault)
        )
        self.process.start()

    def wait_for(self, pattern: str, timeout: float = 60.0) -> None:
        """Until the console shows this."""
        end = time.monotonic() + timeout
        while not (self.out.exists() and re.search(pattern, self.out.read_text())):
            assert self.process.is_alive() and time.monotonic() < end, f"never showed {pattern}: {self.errors()}"
            time.sleep(0.02)

    def wait(self, timeout: float = 120.0) -> Run:
        """Until it has ended; one that hangs is killed, and that fails."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"still running after {timeout:.0f} s: {self.errors()}")
        self.ended = time.monotonic()
        return self

    def seconds(self) -> float:
        """From the fault to the end of everything; 0 where it did not get so far."""
        return self.ended - float(self.struck.read_text()) if self.struck.exists() else 0.0

    @property
    def status(self) -> int | None:
        return self.process.exitcode

    def errors(self) -> str:
        return self.err.read_text() if self.err.exists() else ""


def _main(
    words: list[str], folder: str, environment: Mapping[str, str], out: str, err: str, fault: Fault | None
) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    os.chdir(folder)
    subprocess_handler.Popen = _Fork
    if fault is not None:
        _prepare(fault)
    _command(words, environment)


def _command(words: list[str], environment: Mapping[str, str]) -> None:
    """`weft words` in this process, which ends with it."""
    from weft import cli

    os.environ.clear()
    os.environ.update(environment)
    status: Any = 70
    try:
        status = cli.main(words)
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


class _Fork(subprocess.Popen[bytes]):
    """What the agent starts for `python -m weft WORDS`: a fork of the launcher, as a session of its own."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:  # type: ignore[override]
        environment = next(value for value in rest if isinstance(value, dict))
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _command(list(args[args.index("weft") + 1 :]), environment)


# ---------------------------------------------------------------- what may go wrong


def _prepare(fault: Fault) -> None:
    """Let the fault strike where flight.at says that its moment has come."""
    from weft.observe import flight

    original, struck = flight.at, Path("struck-at").absolute()

    def at(phase: str, micro_batch: int = 0, documents: Sequence[str] | None = None) -> None:
        original(phase, micro_batch, documents)
        record = flight.own.record()
        here = (phase, record.step) == (fault.phase, fault.step) and fault.rank in (-1, record.rank)
        if here and fault.micro in (None, micro_batch) and not (fault.once and os.path.exists(fault.once)):
            if fault.once:
                Path(fault.once).touch()
            struck.write_text(str(time.monotonic()))
            DO[fault.do](record)

    def step(number: int, of: int, documents: Sequence[str] = ()) -> None:
        step_original(number, of, documents)
        at("plan", 0, documents)

    step_original = flight.step
    flight.at, flight.step = at, step
    if fault.do in BEFORE:
        BEFORE[fault.do](fault)


def _signal(number: signal.Signals) -> Callable[[Any], None]:
    return lambda record: os.kill(os.getpid(), number)


def _raise(error: Callable[[], BaseException]) -> Callable[[Any], None]:
    def do(record: Any) -> None:
        raise error()

    return do


def _out_of_cuda_memory() -> BaseException:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _allocate(record: Any) -> None:
    import torch

    torch.empty(1 << 50)


def _fill_metrics_disk(record: Any) -> None:
    """metrics.jsonl is from now on /dev/full."""
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").endswith("metrics.jsonl"):
            os.dup2(os.open("/dev/full", os.O_WRONLY), int(name))


def _limit_files(record: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def _set_clock_back(record: Any) -> None:
    now = time.time
    time.time = lambda: now() - 7200.0


def _jumping_clock(record: Any) -> None:
    """A clock that is set forward and back all the time; and then this rank fails."""
    _set_clock_back(record)
    raise RuntimeError("boom")


DO: dict[str, Callable[[Any], None]] = {
    "nothing": lambda record: None,
    "kill": _signal(signal.SIGKILL),
    "terminate": _signal(signal.SIGTERM),
    "stop": _signal(signal.SIGSTOP),
    "raise": _raise(lambda: RuntimeError("boom")),
    "exit": lambda record: os._exit(7),
    "sys.exit": _raise(lambda: SystemExit(7)),
    "crash": lambda record: ctypes.string_at(0) and None,
    "memory": _raise(MemoryError),
    "cuda memory": _raise(_out_of_cuda_memory),
    "allocate": _allocate,
    "sleep": lambda record: time.sleep(600),
    "sleep briefly": lambda record: time.sleep(4),
    "hold the lock": lambda record: ctypes.PyDLL(None).sleep(600) and None,
    "full metrics": _fill_metrics_disk,
    "small files": _limit_files,
    "vanish": lambda record: shutil.rmtree(record.run),
    "clock back": _set_clock_back,
    "clock back, raise": _jumping_clock,
}


def _not_a_number(fault: Fault) -> None:
    """From a step on, the loss of one rank is not a number."""
    from weft.objectives.cross_entropy import CrossEntropy
    from weft.observe import flight

    original = CrossEntropy.__call__

    def spoilt(self: CrossEntropy, batch: Any) -> Any:
        terms = original(self, batch)
        record = flight.own.record()
        if record.rank == fault.rank and record.step >= fault.step:
            terms.loss_sum.mul_(float("nan"))
        return terms

    CrossEntropy.__call__ = spoilt  # type: ignore[method-assign]


def _plan(change: Callable[[list[Any]], list[Any]]) -> Callable[[Fault], None]:
    """One rank plans another step than the others."""

    def prepare(fault: Fault) -> None:
        from weft.engine.engine import Engine
        from weft.observe import flight

        original = Engine.plan

        def spoilt(self: Engine, metadata: Sequence[Any], **rest: Any) -> Any:
            record = flight.own.record()
            other = record.rank == fault.rank and record.step == fault.step
            return original(self, change(list(metadata)) if other else metadata, **rest)

        Engine.plan = spoilt  # type: ignore[method-assign]

    return prepare


def _other_data(fault: Fault) -> None:
    """One rank trains a token less than the others."""
    from weft.data import table

    original = table.Chunk.of

    def spoilt(numbers: Any, records: Any, encoded: Any) -> Any:
        if os.environ.get("RANK") == str(fault.rank):
            last = encoded[-1]
            encoded = [*encoded[:-1], replace(last, trained=[*last.trained[:-1], 1 - last.trained[-1]])]
        return original(numbers, records, encoded)

    table.Chunk.of = spoilt  # type: ignore[method-assign]


def _other_code(fault: Fault) -> None:
    """One rank's checkout differs."""
    from weft.cluster import alike

    original = alike.code_digest
    alike.code_digest = lambda: "0" * 16 if os.environ.get("RANK") == str(fault.rank) else original()


BEFORE: dict[str, Callable[[Fault], None]] = {
    "not a number": _not_a_number,
    "other order": _plan(lambda metadata: metadata[::-1]),
    "other weight": _plan(lambda metadata: [replace(metadata[0], weight=metadata[0].weight + 1), *metadata[1:]]),
    "fewer documents": _plan(lambda metadata: metadata[:2]),
    "other data": _other_data,
    "other code": _other_code,
}
DO |= {name: lambda record: None for name in BEFORE}
