"""Real ranks for tests: processes that outlive a test, forked from a server that has imported torch once.

`run(world, function, *args)` calls a module-level `function(*args)` in `world` processes joined by gloo, each on one
thread, and returns the results by rank. A case that hangs is killed and named, and the next one gets new processes.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

MOST_RANKS = 4
MOST_THREADS = 100
_context = multiprocessing.get_context("forkserver")
_workers: list[tuple[Any, Connection]] = []


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Results of `function(*args)` on ranks 0..world-1. The first rank's error is raised with its traceback."""
    workers = _start()[:world]
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((rank, world, os.path.join(folder, "store"), function, args, timeout))
        return _collect(workers, function.__name__, timeout)


def _collect(workers: list[tuple[Any, Connection]], name: str, timeout: float) -> list[Any]:
    deadline, results = time.monotonic() + timeout, {}
    while len(results) < len(workers):
        for rank, (process, pipe) in enumerate(workers):
            if rank in results:
                continue
            if pipe.poll(0.01):
                ok, value = pipe.recv()
                if not ok:
                    _stop()
                    raise AssertionError(f"{name}, rank {rank} of {len(workers)}:\n{value}")
                results[rank] = value
            elif not process.is_alive():
                _stop()
                raise AssertionError(f"{name}: rank {rank} died with exit code {process.exitcode}")
        if time.monotonic() > deadline:
            waiting = [rank for rank in range(len(workers)) if rank not in results]
            _stop()
            raise AssertionError(f"{name}: ranks {waiting} of {len(workers)} did not finish within {timeout:.0f} s")
    return [results[rank] for rank in range(len(workers))]


def _start() -> list[tuple[Any, Connection]]:
    if any(not process.is_alive() or _threads(process.pid) > MOST_THREADS for process, _ in _workers):
        _stop()
    if not _workers:
        os.environ["OMP_NUM_THREADS"] = "1"
        _context.set_forkserver_preload(["tests.preload"])
        for _ in range(MOST_RANKS):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            _workers.append((process, ours))
    return _workers


def _threads(pid: int) -> int:
    """torch 2.11 keeps every mesh that a DTensor was made with, and gloo's threads with it, which poll."""
    return len(os.listdir(f"/proc/{pid}/task"))


def _stop() -> None:
    for process, pipe in _workers:
        process.kill()
        process.join()
        pipe.close()
    _workers.clear()


atexit.register(_stop)


def _serve(pipe: Connection) -> None:
    warnings.filterwarnings("error", message="FSDP2-wrapped module")  # as pyproject.toml has it
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what is imported need not be looked through after every case
    while True:
        try:
            rank, world, store, function, args, timeout = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _in_group(rank, world, store, function, args, timeout)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _in_group(rank: int, world: int, path: str, function: Callable[..., Any], args: Any, timeout: float) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.init_process_group(
        "gloo", store=dist.FileStore(path, world), rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
        # DTensor remembers meshes by their shape, and with them process groups that are now others: wrong names, and
        # three threads of gloo for each, which poll. Engines are cycles.
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        gc.collect()
