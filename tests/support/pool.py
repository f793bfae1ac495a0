"""Real ranks for tests: processes that outlive a test, forked from a server that has imported torch once.

`run(world, function, *args)` calls a module-level `function(*args)` in `world` processes joined by gloo, each on one
thread, and returns the results by rank. A case that hangs is killed and named, and the next one gets new processes.
Of ranks that died or hung, the error has what they printed, their stacks, and what the same processes had run before.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

FEWEST_RANKS = 4  # that are started; more where a case asks for them
MOST_THREADS = 100
MOST_PRINTED = 200_000  # characters


class _Worker(NamedTuple):
    """A rank's process. errors: a file, its standard error."""

    process: Any
    pipe: Connection
    errors: Path


_context = multiprocessing.get_context("forkserver")
_workers: list[_Worker] = []
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
_crashed: list[str] = []  # what was said of the crash that new processes were the answer to
_modules = [0]  # that a rank had imported after an earlier case
_ran = deque[str](maxlen=12)  # what the processes were last given, the last one last


class CrashError(AssertionError):
    """A rank died in native code."""


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, retry: bool = True) -> list[Any]:
    """Results of `function(*args)` on ranks 0..world-1. The first rank's error is raised with its traceback.

    again: whether a crash in native code is answered by new processes. About one suite in fifteen has one, in another
    place each time, whose cause is not known: what is known of it is a warning, and a second one is an error.
    """
    try:
        return _run(world, function, args, timeout)
    except CrashError as error:
        if not retry or _crashed:
            raise
        _crashed.append(str(error))
        warnings.warn(f"a rank crashed, and {function.__name__} ran again:\n{error}", stacklevel=2)
    return _run(world, function, args, timeout)


def _run(world: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    workers = _start(world)[:world]
    _ran.append(f"{function.__module__}.{function.__name__} on {world}")
    with tempfile.TemporaryDirectory() as folder:
        for rank, worker in enumerate(workers):
            worker.pipe.send((rank, world, os.path.join(folder, "store"), function, args, timeout))
        return _collect(workers, function.__name__, timeout)


def _collect(workers: list[_Worker], name: str, timeout: float) -> list[Any]:
    deadline, results = time.monotonic() + timeout, {}
    ranks = {end: rank for rank, worker in enumerate(workers) for end in (worker.pipe, worker.process.sentinel)}
    while len(results) < len(workers):
        waited_for = [end for end, rank in ranks.items() if rank not in results]
        for rank in {ranks[end] for end in wait(waited_for, max(0.0, deadline - time.monotonic()))}:
            process, pipe, _ = workers[rank]
            if not pipe.poll():
                _give_up(f"{name}, rank {rank} of {len(workers)}: it is gone")
            try:
                ok, value = pipe.recv()
            except EOFError:
                process.join(5)
                ok, value = False, "it is gone"
            if not ok:
                sentinels = [worker.process.sentinel for worker in workers if worker.process.is_alive()]
                wait(sentinels, timeout=0.2)  # this one's error may be that another has died
                _give_up(f"{name}, rank {rank} of {len(workers)}:\n{value}")
            results[rank] = value
        if time.monotonic() > deadline:
            waiting = [rank for rank in range(len(workers)) if rank not in results]
            for rank in waiting:
                os.kill(workers[rank].process.pid, signal.SIGABRT)  # they print where they hang
            for rank in waiting:
                workers[rank].process.join(5)
            _give_up(f"{name}: ranks {waiting} of {len(workers)} did not finish within {timeout:.0f} s", AssertionError)
    return [results[rank] for rank in range(len(workers))]


def _give_up(problem: str, kind: type[AssertionError] | None = None) -> NoReturn:
    """Kill all ranks, and raise what happened, with what is known of those that had died. kind: CrashError, where one
    died in native code, unless it is said."""
    lines = [problem]
    if kind is None:
        crashed = any(worker.process.exitcode in _CRASHES for worker in _workers)
        kind = CrashError if crashed else AssertionError
    for rank, worker in enumerate(_workers):
        code = worker.process.exitcode
        if code is not None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            printed = worker.errors.read_text(errors="replace")[:MOST_PRINTED]
            lines.append(f"rank {rank} died by {how}, and had printed:\n{printed}")
    if len(lines) > 1:
        lines.append(f"These processes had run: {', '.join(_ran)}")
    _stop()
    raise kind("\n".join(lines))


def _start(world: int = 1) -> list[_Worker]:
    if any(not worker.process.is_alive() for worker in _workers):
        _give_up("after its last case:")
    if any(_threads(worker.process.pid) > MOST_THREADS for worker in _workers):
        _stop()
    if len(_workers) < max(FEWEST_RANKS, world):
        os.environ["OMP_NUM_THREADS"] = "1"
        _context.set_forkserver_preload(["tests.support.preload"])
        for _ in range(len(_workers), max(FEWEST_RANKS, world)):
            parent_end, child_end = _context.Pipe()
            descriptor, errors = tempfile.mkstemp(prefix="weft-rank-")
            os.close(descriptor)
            process = _context.Process(target=_serve, args=(child_end, errors), daemon=True)
            process.start()
            _workers.append(_Worker(process, parent_end, Path(errors)))
    return _workers


def _threads(pid: int) -> int:
    """A cache of torch that `_in_group` does not clear would keep meshes, and gloo's threads with them, which poll."""
    return len(os.listdir(f"/proc/{pid}/task"))


def _stop() -> None:
    for process, pipe, errors in _workers:
        process.kill()
        process.join()
        pipe.close()
        errors.unlink(missing_ok=True)
    _workers.clear()
    _ran.clear()


atexit.register(_stop)


def _serve(pipe: Connection, errors: str) -> None:
    with open(errors, "a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    for module in ("torch", "weft"):  # as pyproject.toml has it
        warnings.filterwarnings("error", category=UserWarning, module=module)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    import torch

    torch.set_num_threads(1)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of C++, of all threads
    gc.freeze()  # what is imported need not be looked through after every case
    gc.set_threshold(20_000, 10, 10)  # each case ends with a collection; those within it look through all of autograd
    while True:
        try:
            rank, world, store, function, args, timeout = pipe.recv()
        except EOFError:
            return
        os.ftruncate(sys.stderr.fileno(), 0)
        faulthandler.enable(sys.stderr)  # again for each case: some have it write elsewhere
        try:
            pipe.send((True, _in_group(rank, world, store, function, args, timeout)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _in_group(rank: int, world: int, path: str, function: Callable[..., Any], args: Any, timeout: float) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from tests.support.shared_results import share_checks

    share_checks()  # the case before may have dropped its results
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, world), rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    try:
        dist.barrier()  # all are connected: one that leaves before would be an error of those that are not yet
        return function(*args)
    finally:
        dist.destroy_process_group()
        # DTensor remembers meshes by their shape, and with them process groups that are now others: wrong names, and
        # three threads of gloo for each, which poll, until there are MOST_THREADS. Engines are cycles.
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        _gen_transform_infos.cache_clear()
        gc.collect()
        if len(sys.modules) > _modules[0]:  # what a case imported stays, and need not be looked through again
            _modules[0] = len(sys.modules)
            gc.freeze()
