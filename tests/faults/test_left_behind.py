"""Whatever a run has started ends with it: a Ray of its own, the processes of rewards and environments, and all of them
where the controller is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from weft.errors import ActorError, StorageError, UserError
from weft.launch import ray_actors, ray_watchdog, scratch
from weft.launch.ray_watchdog import RayWatchdog
from weft.launch.reaper import reaping
from weft.launch.scratch import PREFIX, PROCESSES, note_of, remove_abandoned, scratch_folder
from weft.rl.rewards.calls import RewardBatch, RewardOutcome, RewardSpec
from weft.rl.rewards.pool import RewardPool
from weft.rl.user_process import receive, send
from weft.rl.workers import _ending, _joined

ROOT = Path(__file__).parents[2]
SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER)
    yield process
    process.kill()
    process.wait()


def ended(*numbers: int, seconds: float = 20.0) -> bool:
    """Whether these processes have ended within that time; one that nobody waits for has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(runs(number) for number in numbers):
            return True
        time.sleep(0.02)
    return False


def runs(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def numbers_in(path: Path, count: int, seconds: float = 60.0) -> list[int]:
    """Process ids that others write into a file, once there are so many."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        complete_lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if len(complete_lines) >= count:
            return [int(number) for number in complete_lines]
        time.sleep(0.02)
    raise AssertionError(f"{path} does not name {count} processes")


# ---------------------------------------------------------------- a controller that is killed

CONTROLLER = """
import os, subprocess, sys, time
from pathlib import Path
from weft.launch.reaper import reaping
from weft.launch.scratch import scratch_folder

# Leaves its session and its parent, as a daemon does; the root starts it.
ROOT = '''
import os, sys, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "a").write(f"{os.getpid()}\\\\n")
time.sleep(600)
'''
with reaping() as reaper, scratch_folder("of-the-run-"):
    root = subprocess.Popen([sys.executable, "-S", "-c", ROOT, sys.argv[1]], env={**os.environ, **reaper.mark})
    reaper.add(root.pid)
    own = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])  # the user's, not the run's
    with open(sys.argv[1], "a") as file:
        file.write(f"{root.pid}\\n")
    print(own.pid, reaper._process.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int], int, int]]:
    """A controller with a reaper: its process, the processes of its run, one of the user's, and the reaper."""
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", CONTROLLER, str(tmp_path / "started")]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        users, reapers = map(int, process.stdout.readline().split())
        yield process, numbers_in(tmp_path / "started", 2), users, reapers
        process.kill()
        for number in (users, reapers, *numbers_in(tmp_path / "started", 2)):
            if runs(number):
                os.kill(number, signal.SIGKILL)


def test_a_killed_controller_leaves_nothing(
    controller: tuple[subprocess.Popen[str], list[int], int, int], tmp_path: Path
) -> None:
    """The reaper ends what the run has started, in sessions of its own too, and nothing else."""
    process, of_the_run, users, reapers = controller
    process.kill()
    assert ended(*of_the_run, reapers)
    assert runs(users)
    assert os.listdir(tmp_path / "tmp") == []


def test_the_next_start_ends_what_a_killed_reaper_left(
    controller: tuple[subprocess.Popen[str], list[int], int, int], tmp_path: Path
) -> None:
    process, of_the_run, users, reapers = controller
    (folder,) = (tmp_path / "tmp").glob(f"{PREFIX}run-*")
    end = time.monotonic() + 30
    while len(scratch.processes_of(folder)) < 2:  # the reaper has begun to note
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(reapers, signal.SIGKILL)
    process.kill()
    process.wait()
    assert all(map(runs, of_the_run))
    remove_abandoned(str(tmp_path / "tmp"))
    assert ended(*of_the_run, seconds=1.0) and runs(users)
    assert os.listdir(tmp_path / "tmp") == []


def test_another_process_with_a_noted_id_stays(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Ids are given again: the start time tells the processes apart."""
    note = note_of(psutil.Process(sleeper.pid))
    number, started = note.split()
    with scratch_folder(base=str(tmp_path)) as folder:
        (folder / PROCESSES).write_text(f"{number} {float(started) - 60}\nnothing\n{number} x\n")
        assert scratch.processes_of(folder) == []
        (folder / PROCESSES).write_text(note)
        assert [process.pid for process in scratch.processes_of(folder)] == [sleeper.pid]


def test_a_run_that_ends_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with reaping() as reaper:
        sleeper_process = subprocess.Popen(SLEEPER)
        reaper.add(sleeper_process.pid)
        assert runs(sleeper_process.pid)
    assert sleeper_process.wait(0.5) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    assert reaper.mark  # as it was inside


# ---------------------------------------------------------------- parts of Ray


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may be stopped for a moment only."""
    monkeypatch.setattr(ray_watchdog, "STOPPED_SECONDS", 0.2)


def looking(watchdog: RayWatchdog, seconds: float = 20.0) -> ActorError:
    end = time.monotonic() + seconds
    while watchdog.failure is None:
        assert time.monotonic() < end
        watchdog.look(0.0)
        time.sleep(0.02)
    return watchdog.failure


@pytest.mark.parametrize(
    ("kind", "number", "message", "of_kind"),
    [
        ("gcs_server", signal.SIGSTOP, r"Ray's GCS \(gcs_server\), process \d+, has been stopped \(SIGSTOP\)", "hang"),
        ("raylet", signal.SIGKILL, r"Ray's raylet, process \d+, has died \(killed by SIGKILL\)", "killed"),
    ],
)
def test_a_part_of_ray_is_named(
    kind: str, number: signal.Signals, message: str, of_kind: str, sleeper: subprocess.Popen[bytes], quick: None
) -> None:
    watchdog = RayWatchdog()
    watchdog.add({kind: sleeper, "log_monitor": sleeper})
    watchdog.look(0.0)
    assert watchdog.failure is None
    sleeper.send_signal(number)
    failure = looking(watchdog)
    assert failure.kind == of_kind
    with pytest.raises(ActorError, match=message):
        raise failure
    assert sleeper.wait(5) == -signal.SIGKILL  # what waits for a stopped one goes on


def test_an_agent_of_the_raylet_is_the_cause_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raylet ends by itself after either of its agents."""
    raylet = subprocess.Popen(
        [sys.executable, "-S", "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]) and 1)",
         *SLEEPER, "ray::DashboardAgent"],
    )  # fmt: skip
    watchdog = RayWatchdog()
    watchdog.add({"raylet": raylet})
    end = time.monotonic() + 20
    while not (agents := [child for child in psutil.Process(raylet.pid).children() if "-S" in child.cmdline()]):
        assert time.monotonic() < end
    watchdog.look(0.0)
    agents[0].kill()
    assert raylet.wait(20) == 1
    assert str(looking(watchdog)).startswith("Ray's dashboard agent, process")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_part_that_dies_while_ray_starts_ends_the_start(number: signal.Signals, tmp_path: Path, quick: None) -> None:
    """Ray would wait for it for a minute, and then end the process without a message."""
    shutil.copy(shutil.which("sleep") or "", tmp_path / "gcs_server")
    failures, failed = list[ActorError](), threading.Event()

    def end(failure: ActorError) -> None:
        failures.append(failure)
        failed.set()

    with subprocess.Popen([tmp_path / "gcs_server", "600"]) as part:
        with ray_watchdog.watching_ray(RayWatchdog(starting=True), end):
            time.sleep(0.7)  # it has been seen
            part.send_signal(number)
            assert failed.wait(20)
        part.kill()
    stopped = number == signal.SIGSTOP
    assert failures[0].kind == ("hang" if stopped else "killed")
    assert f"Ray's GCS (gcs_server), process {part.pid}, has {'been stopped' if stopped else 'died'}" in str(
        failures[0]
    )


@pytest.mark.parametrize(
    ("error", "kind"), [(UserError("the cluster has 0 CPUs"), "killed"), (StorageError("the disk is full"), None)]
)
def test_the_death_of_a_part_of_ray_is_the_cause_of_other_errors(
    error: Exception, kind: str | None, sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A cluster whose raylet is dead seems to have no resources, which would be a mistake of the user's."""
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=sleeper)]})
    worker = SimpleNamespace(worker=SimpleNamespace(_global_node=node))
    ray = SimpleNamespace(init=lambda **_: None, shutdown=lambda: None, _private=worker)

    def run() -> None:
        with ray_actors._session(None, [], tmp_path):
            sleeper.kill()
            sleeper.wait()
            raise error

    with (
        mock.patch.object(ray_actors, "import_ray", return_value=ray),
        pytest.raises(ActorError if kind else StorageError) as raised,
    ):
        run()
    assert getattr(raised.value, "kind", None) == kind
    assert ("Ray's raylet, process" in str(raised.value)) == bool(kind)


def test_what_waits_for_ray_ends_with_the_failure_of_a_part(sleeper: subprocess.Popen[bytes]) -> None:
    watchdog, for_ever = RayWatchdog(), threading.Event()
    watchdog.add({"gcs_server": sleeper})

    async def wait_for_both() -> list[Any]:
        waiting = asyncio.ensure_future(watchdog.unless_failed(asyncio.sleep(600)))
        blocked = asyncio.to_thread(watchdog.call, for_ever.wait)
        assert await watchdog.unless_failed(asyncio.sleep(0, "an answer")) == "an answer"
        sleeper.kill()
        await asyncio.to_thread(looking, watchdog)
        return await asyncio.wait_for(asyncio.gather(waiting, blocked, return_exceptions=True), 20)

    try:
        assert all(isinstance(error, ActorError) for error in asyncio.run(wait_for_both()))
    finally:
        for_ever.set()


def test_time_in_which_the_controller_was_frozen_does_not_count(sleeper: subprocess.Popen[bytes], quick: None) -> None:
    watchdog = RayWatchdog()
    watchdog.add({"raylet": sleeper})
    sleeper.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    while time.monotonic() - start < 0.5:
        watchdog.look(time.monotonic() - start)
        time.sleep(0.02)
    assert watchdog.failure is None


@pytest.mark.parametrize("failed", [False, True])
def test_leaving_ray_ends_though_a_part_is_stopped(
    failed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's own shutdown waits for the part, which has a process below it; once it is killed, it comes back."""
    part = subprocess.Popen(
        [sys.executable, "-S", "-c", "import subprocess, sys; subprocess.call(sys.argv[1:])", *SLEEPER]
    )
    while not (below := psutil.Process(part.pid).children()):
        time.sleep(0.01)
    part.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(ray_actors, "_LEAVING_SECONDS", 0.3)
    watchdog = RayWatchdog()
    watchdog.add({"raylet": part})
    if failed:
        monkeypatch.setattr(ray_watchdog, "STOPPED_SECONDS", 0.0)
        looking(watchdog)
    monkeypatch.setattr(ray_actors, "_watchdog", watchdog)
    finished = list[bool]()

    def shutdown() -> None:
        part.wait()
        finished.append(True)

    ray_actors._end_session(SimpleNamespace(shutdown=shutdown), [psutil.Process(part.pid)])
    assert ended(part.pid, below[0].pid, seconds=1.0) and finished == [True]
    errors = capsys.readouterr().err
    assert ("Ray has not ended within 0.3 seconds: Ray's raylet" in errors) is not failed, errors


# ---------------------------------------------------------------- code of the user's


def ask(
    function: str, path: Path, monkeypatch: pytest.MonkeyPatch, calls: int = 1
) -> tuple[list[RewardOutcome], float]:
    """The outcomes of the last call, and the seconds that the end of all processes took."""
    monkeypatch.setenv("STARTED", str(path))

    async def run() -> tuple[list[RewardOutcome], float]:
        pool = RewardPool([RewardSpec(function, f"tests.support.left_rewards:{function}")], 1, 5.0)
        for number in range(1, calls + 1):
            outcomes = await pool.call(0, RewardBatch([None], ["a" * number], [[1]], {}))
        start = time.monotonic()
        await asyncio.wait_for(pool.close(), 60)
        return outcomes, time.monotonic() - start

    return asyncio.run(run())


@pytest.mark.parametrize("function", ["leaves_the_session", "is_a_daemon"])
def test_what_a_reward_starts_ends_with_it(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session of its own, without a parent, with the connection to the controller and standard output open."""
    outcomes, seconds = ask(function, tmp_path / "started", monkeypatch)
    assert outcomes == [RewardOutcome(1.0)] and seconds < 9.0
    assert not any(map(runs, numbers_in(tmp_path / "started", 1)))


def test_a_fork_that_returns_from_a_reward_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer would be taken for that to the next request."""
    outcomes, _ = ask("forks_and_returns_twice", tmp_path, monkeypatch, calls=3)
    assert outcomes == [RewardOutcome(3.0)]


def test_a_reward_whose_result_cannot_be_sent_costs_its_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (outcome,), _ = ask("gives_a_lock", tmp_path, monkeypatch)
    assert outcome.value is None and outcome.error is not None
    assert outcome.error.startswith("its result cannot be sent to the controller: cannot pickle '_thread.lock'")
    assert ask("gives_a_lock", tmp_path, monkeypatch, calls=2)[0][0].value == 1.0


FORKING_ENVIRONMENT = """
import os, socket, sys
from weft.rl.environments.worker import converse
class Forking:
    def start(self, number):
        os.fork()
    def close(self):
        pass
converse(Forking, socket.socket(fileno=int(sys.argv[1])))
"""


def test_a_fork_that_returns_from_an_environment_does_not_answer() -> None:
    here, there = socket.socketpair()
    with here, here.makefile("rwb") as stream:
        words = [sys.executable, "-c", FORKING_ENVIRONMENT, str(there.fileno())]
        with there, subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, pass_fds=[there.fileno()]):
            there.close()
            for number in range(3):
                send(stream, ("start", (number,), 5.0))
            here.shutdown(socket.SHUT_WR)
            answers = iter(lambda: receive(stream), None)
            assert list(answers) == [(None, None)] * 3


def test_a_reward_that_ends_its_parent_costs_its_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not end the controller, which is not its parent."""
    (outcome,), _ = ask("kills_its_parent", tmp_path / "started", monkeypatch)
    assert outcome.value is None
    assert outcome.error == (
        "the function's process ended with its parent process, which was killed or stopped: user code must not do that"
    )


@pytest.mark.parametrize("victim", ["os.getpid()", "os.getppid()"])
def test_a_kill_during_the_import_is_no_mistake_of_the_config(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--restarts N does not try again after errors of the user."""
    (tmp_path / "struck_rewards.py").write_text(f"import os, time\n\nos.kill({victim}, 9)\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ActorError, match="rl.reward: the process that imports struck_rewards:right .*ended") as caught:
        asyncio.run(RewardPool([RewardSpec("right", "struck_rewards:right")], 1, 5.0).describe())
    assert caught.value.kind == "killed"


def test_a_reward_that_is_killed_is_named_with_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor ends with 128 + the number."""
    (outcome,), _ = ask("kills_itself", tmp_path / "started", monkeypatch)
    assert outcome == RewardOutcome(None, "the function's process was ended by signal 9")


def test_import_folders_of_the_controller_come_behind_wefts() -> None:
    assert _joined("/weft", None) == _joined("/weft", "") == "/weft"
    assert _joined("/weft", "/user") == f"/weft{os.pathsep}/user"
    assert [_ending(status) for status in (-9, 0, 3)] == [
        "was ended by signal 9",
        "ended with status 0",
        "ended with status 3",
    ]


FORKING_PROGRAM = """
import os, time
from weft.rl.user_process import supervise
supervise(20)
for _ in range(150):
    if not os.fork():
        os.setsid()
        time.sleep(600)
time.sleep(600)
"""


def test_user_code_that_starts_processes_without_end_is_ended() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKING_PROGRAM], env=env, start_new_session=True, **pipes) as process:
        errors = process.stderr.read()  # it ends with the last of them
        assert process.wait(20) == 128 + signal.SIGKILL
    assert errors == "user code has started more than 20 processes; weft ends it\n"


def test_user_code_that_is_stopped_ends_when_the_controller_asks() -> None:
    """SIGTERM is for the supervisor, which kills what does not run."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    stopped = "import os, signal\nfrom weft.rl.user_process import supervise\nsupervise(20)\n"
    stopped += "print(os.getpid(), flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", stopped], env=env, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGKILL and not runs(number)
