"""Runs of `weft rl` on a Ray of its own whose parts are struck at random moments: processes that are killed or
stopped, and engines that answer nonsense.

The processes of actors are forks, because a start takes longer than a step; controllers are started as `--restarts`
does it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from tests.support import forked
from tests.support.machine import business
from tests.support.ray_forks import start_server
from tests.support.rl_faults import process_of_fork
from weft.launch import launch, monitor, ray_actors
from weft.rl import actors

ROOT = Path(__file__).parents[2]
ACTORS = {"engine": "_make_engine", "trainer": "_make_trainer", "reference": "_make_reference_critic"}
_FOLDER = "WEFT_TEST_SOAK"  # a variable of all processes of a run: where they note what they are
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
_PROGRAM = "from tests.support.soak import main; main()"


@dataclass(frozen=True)
class StruckPart:
    """ways: how it is struck, in turns. which: whether a process is one of this part; None:
    a process that has noted the part's name. rest: seconds in which it is not struck again. ends: whether a strike ends
    an attempt of --restarts: then no such part is struck before the next attempt has done a step."""

    ways: Sequence[str] = ("kill",)
    which: Callable[[psutil.Process], bool] | None = None
    rest: float = 0.0
    ends: bool = False


def run_struck(
    words: Sequence[str], run: Path, parts: Mapping[str, StruckPart], strikes: int, *, seed: int = 0,
    pause: float = 6.0, limit: float = 900.0, after: str = "opening.txt",
) -> tuple[str, Counter[str]]:  # fmt: skip
    """Run `weft WORDS`, of whose processes some are struck at random moments, up to `pause` seconds apart, once
    RUN/`after` is there; returns what it prints, and the strikes of each part and way. limit: seconds on an idle
    machine, for the strikes and for the rest of the run. Nothing of the run is left when it has ended."""
    chance, since, struck = random.Random(seed), time.monotonic(), Counter[str]()
    rested = dict.fromkeys(parts, since)
    ended_at, metrics = 0.0, run / "metrics.jsonl"
    # Ray's sockets want a short path. Ray makes its workers nice, so that other programs would take all time from them.
    with tempfile.TemporaryDirectory(prefix="wf", dir="/tmp") as folder:
        orders, scratch = Path(folder, "orders"), Path(folder, "tmp")
        for name in ("orders", "tmp", "controller", *ACTORS):
            Path(folder, name).mkdir()
        variables = {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0", "TMPDIR": str(scratch), _FOLDER: folder}
        process = forked.Run(words, Path(folder), _settle, **variables)
        try:
            end = since + limit * business()
            while struck.total() < strikes and process.process.is_alive() and time.monotonic() < end:
                time.sleep(chance.uniform(0.3, pause))
                stepped = ended_at == 0 or (
                    metrics.exists() and metrics.stat().st_size and metrics.stat().st_mtime > ended_at
                )
                ready = [
                    name for name, part in parts.items()
                    if rested[name] <= time.monotonic() and (stepped or not part.ends)
                ]  # fmt: skip
                if not ready or not (run / after).exists():
                    continue
                name = chance.choice(ready)
                ways = parts[name].ways
                way = ways[sum(n for key, n in struck.items() if key.startswith(f"{name}: ")) % len(ways)]
                if way == "nonsense" and any(orders.iterdir()):
                    continue
                if way == "nonsense":
                    (orders / str(struck.total())).touch()
                else:
                    running = _running(process.pid, Path(folder, name), parts[name])
                    if not running:
                        continue
                    try:
                        chance.choice(running).send_signal(_SIGNALS[way])
                    except psutil.NoSuchProcess:
                        continue
                print(f"{time.monotonic() - since:.1f} s: {name}: {way}", flush=True)
                struck[f"{name}: {way}"] += 1
                rested[name] = time.monotonic() + parts[name].rest
                ended_at = time.time() if parts[name].ends else ended_at
            process.wait(limit * business())
        finally:
            process.process.kill()
        out = process.output() + process.errors()
        assert process.status == 0, out
        assert struck.total() == strikes and not any(orders.iterdir()), f"{struck}\n{out}"
        _, left = psutil.wait_procs(_left(folder), timeout=60 * business())
        assert [process.cmdline() for process in left] == [] and os.listdir(scratch) == []
    return out, struck


def _left(folder: str) -> list[psutil.Process]:
    """What still runs of a run that has ended, but for Ray's agents, which take up to a minute."""
    noted = [process for name in ("controller", *ACTORS) for process in _noted_in(Path(folder, name))]
    started = [p for p in psutil.process_iter() if _is(lambda p: p.environ().get(_FOLDER) == folder, p)]
    return noted + [p for p in started if _is(lambda p: "agent" not in " ".join(p.cmdline()).lower(), p)]


def _noted_in(folder: Path) -> list[psutil.Process]:
    """The processes that have noted in a folder that they are of its part, and still run."""
    noted = {path.name: path.read_text() for path in folder.iterdir()}
    return [p for p in psutil.process_iter() if _is(lambda p: noted.get(str(p.pid)) == str(p.create_time()), p)]


def _running(root: int, folder: Path, part: StruckPart) -> list[psutil.Process]:
    """The processes of a part that run. folder: where processes have noted their ids."""
    candidates = list[psutil.Process]()
    if part.which is None:
        candidates = _noted_in(folder)
    else:
        with suppress(psutil.NoSuchProcess):  # the run has ended meanwhile
            candidates = [child for child in psutil.Process(root).children(recursive=True) if _is(part.which, child)]
    states = (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    return [process for process in candidates if _is(lambda p: p.status() not in states, process)]


def _is(which: Callable[[psutil.Process], bool], process: psutil.Process) -> bool:
    try:
        return which(process)
    except psutil.Error:
        return False


# ---------------------------------------------------------------- in the run's processes


def main() -> None:
    """A controller that --restarts starts."""
    import tests.support.preload  # noqa: F401
    from weft import cli
    from weft.launch.entrypoint import program
    from weft.launch.launchers import join_launcher

    _settle()
    _note("controller")
    join_launcher()
    program(partial(cli.main, sys.argv[1:]))


def _settle() -> None:
    """In a process of `weft rl`, before it begins."""
    tempfile.tempdir = None  # what it was before the variables were set
    launch.subprocess = SimpleNamespace(Popen=_start)  # type: ignore[assignment]
    start_server(tempfile.mkdtemp(dir=os.environ[_FOLDER]))
    monitor.process_of = ray_actors.process_of = process_of_fork
    for part, make in ACTORS.items():
        setattr(actors, make, partial(_make, part))


def _note(part: str) -> None:
    """This process is of a part."""
    Path(os.environ[_FOLDER], part, str(os.getpid())).write_text(str(psutil.Process().create_time()))


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """The controller: `python -m weft WORDS`, by this program."""
    return subprocess.Popen([command[0], "-c", _PROGRAM, *command[3:]], **options)


def _make(part: str, *arguments: Any) -> Any:
    """In an actor's process, which has none of _settle's changes: what weft.rl.actors makes there."""
    from weft.inference.standalone import Standalone

    _note(part)
    if part == "engine":
        original = Standalone.advance

        def advance(self: Standalone, *arguments: Any) -> Any:
            return _spoilt(original(self, *arguments))

        Standalone.advance = advance  # type: ignore[method-assign]
    return getattr(actors, ACTORS[part])(*arguments)


def _spoilt(answer: tuple[Any, int]) -> Any:
    """The answer of an engine; nonsense once for each file among the orders."""
    finished, drawn = answer
    for path in Path(os.environ[_FOLDER], "orders").iterdir() if finished else ():
        with suppress(FileNotFoundError):
            path.unlink()
            return NONSENSE[int(path.name) % len(NONSENSE)](finished, drawn)
    return answer


def _completions(**fields: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    def spoil(finished: Any, drawn: int) -> Any:
        changed = {
            key: [replace(c, **{name: value(c) for name, value in fields.items()}) for c in completions]
            for key, completions in finished.items()
        }
        return changed, drawn

    return spoil


NONSENSE: tuple[Callable[[Any, int], Any], ...] = (
    _completions(logprobs=lambda c: (float("nan"),) * len(c.tokens)),
    _completions(tokens=lambda c: (10**6,) * len(c.tokens)),
    lambda finished, drawn: "hello",
    lambda finished, drawn: ({key: [] for key in finished}, drawn),
    lambda finished, drawn: (dict.fromkeys([-1], next(iter(finished.values()))), drawn),
)


# ---------------------------------------------------------------- parts that are no actors


def is_reward(process: psutil.Process) -> bool:
    """The process below a supervisor that runs reward functions."""
    return "weft.rl.rewards.worker" in process.cmdline() and not process.children()


def is_ray(process: psutil.Process) -> bool:
    """The GCS or the raylet of the run's Ray."""
    return process.name() in ("gcs_server", "raylet")


def is_reaper(process: psutil.Process) -> bool:
    """The cleanup process of a controller."""
    return "weft.launch.reaper" in process.cmdline()


def is_fork_server(process: psutil.Process) -> bool:
    """Of environments or agents."""
    return _depth(process) == 2


def is_conversation(process: psutil.Process) -> bool:
    """The process of an environment or an agent."""
    return _depth(process) == 3


def _depth(process: psutil.Process | None) -> int:
    """1 for the supervisor of environments or agents, more for what it has forked, 0 for others."""
    if process is None or "weft.rl.environments.worker" not in process.cmdline():
        return 0
    return 1 + _depth(process.parent())
