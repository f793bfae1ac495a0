"""Real runs of the command line with faults in them. A fault strikes one rank when it comes to a phase of a step
(weft.launch.flight)."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from tests.support import forked
from tests.support.control_group import enter


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What `rank` does to itself when it comes to `phase` (of micro-batch `micro`, if given) of `step`; see DO.

    rank -1: all of them. role: of a phase of another model than the trained one, how its name begins. nth: of the times
    that it comes there. after: a file that has to exist. once: a file; where it exists the fault is over, and it is
    made when the fault strikes.
    """

    do: str
    phase: str = "forward"
    step: int = 2
    micro: int | None = None
    rank: int = 0
    role: str = ""
    nth: int = 1
    after: str = ""
    once: str = ""


class FaultRun(forked.Run):
    """With a fault in it."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        fault: Fault | None = None,
        group: Path | None = None,
        nohup: bool = False,
        **variables: str,
    ) -> None:
        """group: a control group that it lives in. nohup: whether it begins as nohup lets programs begin."""
        self.struck = folder / "struck-at"
        super().__init__(words, folder, partial(_settle, fault, group, nohup), **variables)

    def seconds(self) -> float:
        """From the fault to the end of everything; 0 where it did not get so far."""
        return self.ended - float(self.struck.read_text()) if self.struck.exists() else 0.0


# ---------------------------------------------------------------- what may go wrong


def _settle(fault: Fault | None, group: Path | None, nohup: bool) -> None:
    enter(group)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # this program may run under nohup, too
    if fault is not None:
        prepare(fault)


def prepare(fault: Fault, folder: Path = Path()) -> None:
    """Let the fault strike where flight.enter says that its moment has come. folder: where the moment is noted."""
    from weft.launch import flight

    original, struck, times = flight.enter, (folder / "struck-at").absolute(), count(1)

    def act_at(phase: str, micro_batch: int = 0, *about: Any, **options: Any) -> None:
        original(phase, micro_batch, *about, **options)
        record = flight.recorder.record()
        matches = (phase, record.step) == (fault.phase, fault.step) and fault.rank in (-1, record.rank)
        matches = matches and record.role.startswith(fault.role)
        matches = matches and fault.micro in (None, micro_batch) and not (fault.once and os.path.exists(fault.once))
        if matches and (not fault.after or os.path.exists(fault.after)) and next(times) == fault.nth:
            if fault.once:
                Path(fault.once).touch()
            _wait_for_records(record)
            struck.write_text(str(time.monotonic()))
            DO[fault.do](record)

    def step(number: int, total: int, documents: Sequence[str] = (), document_count: int | None = None) -> None:
        step_original(number, total, documents, document_count)
        act_at("plan", 0, documents, document_count)

    step_original = flight.step
    flight.enter, flight.step = act_at, step
    if fault.do in BEFORE:
        BEFORE[fault.do](fault)


def _wait_for_records(record: Any) -> None:
    """Until every rank has written RUN into its flight record, where this one has: of a rank that ends before,
    no record is left."""
    from weft.launch import flight

    path, end = flight.recorder._path, time.monotonic() + 20
    while record.run and path is not None and time.monotonic() < end:
        if sum(bool(entry.run) for entry in flight.read_all(path.parent).values()) >= record.world:
            return
        time.sleep(0.01)


def _signal(number: signal.Signals) -> Callable[[Any], None]:
    return lambda record: os.kill(os.getpid(), number)


def _terminate_launcher(record: Any) -> None:
    """Until the launcher has passed the signal on to this rank: on a busy machine the run would end before."""
    from weft.launch.stopping import StopSignals

    os.kill(os.getppid(), signal.SIGTERM)
    end = time.monotonic() + 20
    while (listening := StopSignals._listening) is not None and not listening.number and time.monotonic() < end:
        time.sleep(0.01)


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


def _fill_rollouts_disk(record: Any) -> None:
    """The next file of rollouts is /dev/full."""
    folder = Path(record.run) / "rollouts"
    step = len(list(folder.glob("*.parquet"))) + 1
    (folder / f"step-{step:06d}.parquet.partial").symlink_to("/dev/full")


def _wake_later(record: Any) -> None:
    """Stopped, and let go on after some seconds."""
    if not os.fork():
        time.sleep(4)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _fill_memory(record: Any) -> None:
    """More than there is, piece by piece, until something ends it."""
    pieces = []
    while True:
        pieces.append(b"x" * (16 << 20))


def _limit_files(record: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def _set_clock_back(record: Any) -> None:
    now = time.time
    time.time = lambda: now() - 7200.0


def _jumping_clock(record: Any) -> None:
    """A clock that is set forward and back all the time; and then this rank fails."""
    _set_clock_back(record)
    raise RuntimeError("boom")


def _kill_ray(part: str) -> Callable[[Any], None]:
    """Kill a process of the Ray that this process has started."""

    def kill(record: Any) -> None:
        (process,) = [child for child in psutil.Process().children(recursive=True) if child.name() == part]
        process.kill()

    return kill


DO: dict[str, Callable[[Any], None]] = {
    "nothing": lambda record: None,
    "kill": _signal(signal.SIGKILL),
    "terminate": _signal(signal.SIGTERM),
    "interrupt": _signal(signal.SIGINT),
    "hang up": _signal(signal.SIGHUP),
    "hang up the launcher": lambda record: os.kill(os.getppid(), signal.SIGHUP),
    "terminate the launcher": _terminate_launcher,
    "stop": _signal(signal.SIGSTOP),
    "stop for a while": _wake_later,
    "raise": _raise(lambda: RuntimeError("boom")),
    "exit": lambda record: os._exit(7),
    "sys.exit": _raise(lambda: SystemExit(7)),
    "crash": lambda record: ctypes.string_at(0) and None,
    "memory": _raise(MemoryError),
    "fill memory": _fill_memory,
    "cuda memory": _raise(_out_of_cuda_memory),
    "allocate": _allocate,
    "sleep": lambda record: time.sleep(600),
    "sleep briefly": lambda record: time.sleep(4),
    "hold the lock": lambda record: ctypes.PyDLL(None).sleep(600) and None,
    "full metrics": _fill_metrics_disk,
    "full rollouts": _fill_rollouts_disk,
    "small files": _limit_files,
    "vanish": lambda record: shutil.rmtree(record.run),
    **{f"kill {part}": _kill_ray(part) for part in ("gcs_server", "raylet")},
    "clock back": _set_clock_back,
    "clock back, raise": _jumping_clock,
}


def _not_a_number(fault: Fault) -> None:
    """From a step on, the loss of one rank is not a number."""
    from weft.engine.losses.base import CrossEntropy
    from weft.launch import flight

    original = CrossEntropy.__call__

    def spoilt(self: CrossEntropy, batch: Any) -> Any:
        terms = original(self, batch)
        record = flight.recorder.record()
        if record.rank == fault.rank and record.step >= fault.step:
            terms.loss_sum.mul_(float("nan"))
        return terms

    CrossEntropy.__call__ = spoilt  # type: ignore[method-assign]


def _plan(change: Callable[[list[Any]], list[Any]]) -> Callable[[Fault], None]:
    """One rank plans another step than the others."""

    def prepare(fault: Fault) -> None:
        from weft.engine.engine import Engine
        from weft.launch import flight

        original, step = Engine.plan, count(1)  # a step is planned while the one before is taken

        def spoilt(self: Engine, metadata: Sequence[Any], **options: Any) -> Any:
            planted = next(step) == fault.step and flight.recorder.record().rank == fault.rank
            return original(self, change(list(metadata)) if planted else metadata, **options)

        Engine.plan = spoilt  # type: ignore[method-assign]

    return prepare


def _other_data(fault: Fault) -> None:
    """One rank trains a token less than the others."""
    from weft.data import table

    original = table.Chunk.from_records

    def spoilt(numbers: Any, records: Any, encoded: Any, bad: Any = ()) -> Any:
        if os.environ.get("RANK") == str(fault.rank):
            last = encoded[-1]
            encoded = [*encoded[:-1], replace(last, trained=[*last.trained[:-1], 1 - last.trained[-1]])]
        return original(numbers, records, encoded, bad)

    table.Chunk.from_records = spoilt  # type: ignore[method-assign]


def _other_code(fault: Fault) -> None:
    """One rank's checkout differs."""
    from weft.launch import consistency

    original = consistency.code_digest
    consistency.code_digest = lambda: "0" * 16 if os.environ.get("RANK") == str(fault.rank) else original()


def _slow_disk(fault: Fault) -> None:
    """Weights take some seconds to write: longer than a rank that fails alone waits."""
    from weft.checkpoint import snapshot

    original = snapshot.write_export

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(5)
        return original(*arguments, **options)

    snapshot.write_export = slow


def _tokenising(target: str, number: signal.Signals) -> Callable[[Fault], None]:
    """The data is tokenised by processes; this one, or the first of them that has answered, gets a signal."""

    def prepare(fault: Fault) -> None:
        from weft.data import sources, tokenise
        from weft.data.workers import WorkerPool

        tokenise.KEPT_BYTES = tokenise.CREW_BYTES = 0
        sources.BLOCK_BYTES = 300
        enter, receive, struck = WorkerPool.__enter__, WorkerPool._receive, Path("struck-at").absolute()
        places: list[Any] = []

        def entered(self: WorkerPool) -> WorkerPool:
            enter(self)
            places[:] = self._idle  # in the order of the processes
            return self

        def struck_once(self: WorkerPool, connection: Any) -> Any:
            if not struck.exists():
                struck.write_text(str(time.monotonic()))
                worker = self._processes[places.index(connection)].pid
                os.kill(worker if target == "worker" else os.getpid(), number)
            return receive(self, connection)

        WorkerPool.__enter__, WorkerPool._receive = entered, struck_once  # type: ignore[method-assign]

    return prepare


def _nonsense(target: str, change: Callable[[Any], Any]) -> Callable[[Fault], None]:
    """From a step on, what a function returns for another model than the trained one is changed. target: as of Bug."""

    def prepare(fault: Fault) -> None:
        from weft.launch import flight
        from weft.verify.plants import owner_of

        module, attribute = owner_of(target)
        original = getattr(module, attribute)

        def spoilt(*arguments: Any, **options: Any) -> Any:
            result, record = original(*arguments, **options), flight.recorder.record()
            if record.step < fault.step or fault.rank not in (-1, record.rank) or not record.role:
                return result
            Path("struck-at").write_text(str(time.monotonic()))
            return change(result)

        setattr(module, attribute, spoilt)

    return prepare


_HIDDEN = "weft.engine.engine:Engine.last_hidden"
BEFORE: dict[str, Callable[[Fault], None]] = {
    "reference gives NaN": _nonsense("weft.recipes.reference_sums:read_sums", lambda sums: sums * float("nan")),
    "teacher gives NaN": _nonsense(_HIDDEN, lambda hidden: {i: x * float("nan") for i, x in hidden.items()}),
    "teacher gives too few": _nonsense(_HIDDEN, lambda hidden: {i: x[:-1] for i, x in hidden.items()}),
    "not a number": _not_a_number,
    "other order": _plan(lambda metadata: metadata[::-1]),
    "other weight": _plan(lambda metadata: [replace(metadata[0], weight=metadata[0].weight + 1), *metadata[1:]]),
    "fewer documents": _plan(lambda metadata: metadata[:2]),
    "other data": _other_data,
    "other code": _other_code,
    "slow disk, raise": _slow_disk,
    "kill, tokenising": _tokenising("rank", signal.SIGKILL),
    "stop, tokenising": _tokenising("rank", signal.SIGSTOP),
    "kill a worker": _tokenising("worker", signal.SIGKILL),
    "stop a worker": _tokenising("worker", signal.SIGSTOP),
}
DO |= {name: lambda record: None for name in BEFORE} | {"slow disk, raise": _raise(lambda: RuntimeError("boom"))}
