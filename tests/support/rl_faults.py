"""Real runs of `weft rl` with faults in them: of the controller, of its actors, or of the user's code (faults.py has
what they do)."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self

import psutil

from tests.support import forked
from tests.support.control_group import enter
from tests.support.fault_user_code import VARIABLE
from tests.support.faults import DO, Fault, prepare
from tests.support.local_rl import LocalGroup, local_actors
from tests.support.machine import business
from tests.support.ray_forks import start_server
from weft.errors import ActorError
from weft.launch import monitor, ray_actors
from weft.launch.failures import explain
from weft.launch.flight import FlightRecord
from weft.launch.ray_actors import _SerialActor
from weft.launch.reports import RankReport
from weft.launch.scratch import scratch_folder
from weft.launch.stopping import announce_ending_signal

ROOT = Path(__file__).parents[2]
CASE = "WEFT_TEST_CASE"  # a variable of all processes of a run
Who = Literal["controller", "trainer", "engine", "user", "reference_critic"]


@dataclass(frozen=True, kw_only=True)
class RlFault(Fault):
    """who: has it; reference_critic: the ranks of a reference, a critic or a reward model. phase: of a controller one
    of CONTROLLER; of the user's code `reward`, or `start` or `step` of an environment. prompt: that the user's code is
    asked about; empty: all."""

    who: Who = "trainer"
    prompt: str = ""


class RlRun(forked.Run):
    """`weft rl`, with a temporary directory of its own. on_ray: actors are processes of a Ray that it starts; else
    trainer and engines are objects of the controller's process. group: a control group that it lives in."""

    def __init__(
        self, words: Sequence[str], folder: Path, fault: RlFault | None = None, *, on_ray: bool = False,
        tmp: Path | None = None, group: Path | None = None, **variables: str,
    ) -> None:  # fmt: skip
        self.struck, self.case = folder / "struck-at", str(folder)
        self.tmp = tmp or Path(tempfile.mkdtemp(prefix="wf", dir="/tmp"))  # Ray's sockets want a short path
        variables |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.tmp), CASE: self.case}
        if fault is not None and fault.who == "user":
            variables[VARIABLE] = json.dumps(asdict(fault) | {"struck": str(self.struck)})
        super().__init__(["rl", *words], folder, partial(_settle, fault, folder, on_ray, group), **variables)

    def seconds(self) -> float:
        """From the fault to the end of the controller; 0 where it did not get so far."""
        return self.ended - float(self.struck.read_text()) if self.struck.exists() else 0.0

    def wait(self, timeout: float = 240.0) -> Self:
        """Until it has ended."""
        return super().wait(timeout * business())

    def left_processes(self) -> list[psutil.Process]:
        """What it has started and still runs after seconds. Ray's agents take up to a minute: they want to tell a store
        of it."""
        processes = [process for process in psutil.process_iter() if self._is_own(process)]
        _, alive = psutil.wait_procs(processes, timeout=20 * business())
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(CASE) == self.case and "agent" not in " ".join(process.cmdline()).lower()
        except psutil.Error:
            return False

    def left_folders(self) -> list[str]:
        """In its temporary directory."""
        return os.listdir(self.tmp)

    def forget(self) -> None:
        """Remove its temporary directory."""
        shutil.rmtree(self.tmp, ignore_errors=True)


# ---------------------------------------------------------------- where faults come in


def _settle(fault: RlFault | None, folder: Path, on_ray: bool, group: Path | None) -> None:
    """In the controller's process, before it begins."""
    from weft.recipes import rl
    from weft.rl import actors

    tempfile.tempdir = None  # what it was before the variables were set
    announce_ending_signal()
    enter(group)
    if on_ray:
        start_server(str(folder))
        monitor.process_of = ray_actors.process_of = process_of_fork
    else:
        rl.open_actors = partial(local_actors, kind=ReportingGroup)
    if fault is None or fault.who == "user":
        return
    if fault.do in PLANTS:
        PLANTS[fault.do]()
    elif fault.who == "controller":
        _strike_controller(fault, folder)
    elif not on_ray:
        prepare(fault, folder)
    else:
        make = f"_make_{fault.who}"
        setattr(actors, make, partial(made_struck, fault, str(folder), make))


def process_of_fork(record: FlightRecord, scratch: Path) -> psutil.Process | None:
    """As process_of, by the id alone: other processes cannot read the environment that a fork has set."""
    return psutil.Process(record.pid) if psutil.pid_exists(record.pid) else None


def made_struck(fault: RlFault, folder: str, make: str, *arguments: Any) -> Any:
    """In an actor's process: what weft.rl.actors makes there."""
    from weft.rl import actors

    prepare(fault, Path(folder))
    return getattr(actors, make)(*arguments)


class ReportingGroup(LocalGroup):
    """Actors in this process, whose exceptions become reports as those of others do."""

    def __init__(self, name: str, make: Sequence[Callable[[], Any]], hook: Any = None) -> None:
        self._opened = ExitStack()
        self._scratch = self._opened.enter_context(scratch_folder("local-"))
        hosts = [partial(_host, factory, number, self._scratch) for number, factory in enumerate(make)]
        super().__init__(name, hosts, hook)

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        answer = await super().call_one(number, "call", method, *args)
        if isinstance(answer, RankReport):
            raise ActorError(explain(answer, f"{self.name} {number} failed: ", debug=False), answer.kind, answer)
        return answer

    def end(self) -> None:
        super().end()
        self._opened.close()


def _host(make: Callable[[], Any], number: int, scratch: Path) -> _SerialActor:
    host = object.__new__(_SerialActor)
    host._number, host._scratch, host._make, host._object = number, scratch, lambda _: make(), None
    return host


def _strike_controller(fault: RlFault, folder: Path) -> None:
    """When it calls what CONTROLLER names for the nth time."""
    owner, name = CONTROLLER[fault.phase]()
    original, times, struck = getattr(owner, name), count(1), folder / "struck-at"

    def strike(*arguments: Any, **options: Any) -> Any:
        if next(times) == fault.nth:
            struck.write_text(str(time.monotonic()))
            DO[fault.do](SimpleNamespace(run=folder / "run"))
        return original(*arguments, **options)

    setattr(owner, name, strike)


def _loop(name: str) -> Callable[[], tuple[Any, str]]:
    def find() -> tuple[Any, str]:
        from weft.recipes import rl

        return rl, name

    return find


def _score() -> tuple[Any, str]:
    from weft.rl.rewards.base import Rewards

    return Rewards, "score"


def _turn() -> tuple[Any, str]:
    from weft.rl.colocation import DeviceSharing

    return DeviceSharing, "to_rollouts"


def _record() -> tuple[Any, str]:
    from weft.rl.recorder import RlRecorder

    return RlRecorder, "record"


CONTROLLER: dict[str, Callable[[], tuple[Any, str]]] = {
    "load": _loop("prepare"), "generate": _loop("rollout_group"), "reward": _score, "advantages": _loop("advantages"),
    "update": _loop("update"), "sync": _turn, "record": _record, "evaluate": _loop("evaluate"), "save": _loop("save"),
}  # fmt: skip


def _other_checksum() -> None:
    """An engine sums what it received otherwise than it was sent."""
    from weft.inference.weight_sync import protocol

    protocol.checksum = lambda data: 1


def _few_scores(times: float = float("inf")) -> None:
    """A reward model gives a score less than it was asked for, the first `times` times."""
    from weft.rl.reward_models import RewardModelRank

    original, calls = RewardModelRank.score, count(1)

    def spoilt(*arguments: Any) -> Any:
        return original(*arguments)[next(calls) <= times :]

    RewardModelRank.score = spoilt  # type: ignore[method-assign]


def _readings_of_nan() -> None:
    """What a teacher, a reference or a critic reads of the policy's samples is not a number."""
    from weft.rl import trainer

    original = trainer.readout

    def spoilt(*arguments: Any, **options: Any) -> Any:
        read = original(*arguments, **options)
        return {i: x * float("nan") for i, x in read.items()} if "routes" not in options else read

    trainer.readout = spoilt


def _spoilt_readings(change: Callable[[dict[int, Any]], dict[int, Any]], times: float = 1) -> Callable[[], None]:
    """What the separate ranks of a reference, a teacher or a critic have read is changed, the first `times` times."""

    def plant() -> None:
        from weft.rl import reference_critic

        original, calls = reference_critic.readout, count(1)

        def spoilt(*arguments: Any, **options: Any) -> Any:
            read = original(*arguments, **options)
            return change(read) if next(calls) <= times else read

        reference_critic.readout = spoilt

    return plant


def _to_nan(read: dict[int, Any]) -> dict[int, Any]:
    return {index: values * float("nan") for index, values in read.items()}


def _score_of_nan() -> None:
    """The first score that a reward model gives is not a number."""
    from weft.rl import reward_models

    original, times = reward_models.step_scores, count(1)

    def spoilt(*arguments: Any) -> dict[int, float]:
        scores = original(*arguments)
        return {**scores, 0: float("nan")} if next(times) == 1 else scores

    reward_models.step_scores = spoilt


def _port_in_use() -> None:
    """Where trainer ranks are to meet somebody listens already."""
    from weft.launch import ray_actors

    original = ray_actors._prepare

    def prepare(handles: Sequence[Any], rendezvous: bool) -> None:
        original(handles, rendezvous)
        listener = socket.create_server(("127.0.0.1", 0))
        _kept.append(listener)
        variables = {"MASTER_PORT": str(listener.getsockname()[1])}
        ray_actors.import_ray().get([handle.prepare.remote(variables, os.getcwd()) for handle in handles])

    ray_actors._prepare = prepare


def _nonsense_once() -> None:
    """The first completions of an engine have logprobs that are not numbers."""
    from weft.inference.standalone import Standalone

    original, times = Standalone.advance, count(1)

    def spoilt(self: Standalone, *arguments: Any) -> Any:
        finished, drawn = original(self, *arguments)
        if finished and next(times) == 1:
            nan = {k: [replace(c, logprobs=(float("nan"),) * len(c.tokens)) for c in v] for k, v in finished.items()}
            return nan, drawn
        return finished, drawn

    Standalone.advance = spoilt  # type: ignore[method-assign]


def _few_files() -> None:
    """Fewer files may be open than Ray needs."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))


_kept: list[Any] = []
PLANTS: dict[str, Callable[[], None]] = {
    "another checksum": _other_checksum, "port in use": _port_in_use, "few files": _few_files,
    "an engine answers nonsense": _nonsense_once, "few scores": _few_scores, "teacher gives NaN": _readings_of_nan,
    "reference gives NaN": _readings_of_nan, "critic gives NaN": _readings_of_nan,
    "reward model gives NaN": _score_of_nan,
    "few scores once": partial(_few_scores, 1),
    "NaN once": _spoilt_readings(_to_nan), "NaN each time": _spoilt_readings(_to_nan, float("inf")),
    "a sample less": _spoilt_readings(lambda read: dict(list(read.items())[1:])),
    "a token less": _spoilt_readings(lambda read: {index: values[1:] for index, values in read.items()}),
}  # fmt: skip
