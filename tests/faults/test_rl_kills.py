"""A real Ray: actors that are killed or stopped, and a controller that is asked to end (`make test-soak`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.rl.test_rl_run import WEFT, _is_rank, begun, cluster, command, lines_of, still_there, task, weft
from tests.support.machine import business

__all__ = ["cluster", "task"]
pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(1800)]
ALONE = "cluster.address=null"
AHEAD = ("rollout.engine=hf", "cluster.max_staleness=1")


def _is_engine(process: psutil.Process) -> bool:
    try:
        environment = process.environ()
        return "WEFT_RANK_REPORTS" in environment and "RANK" not in environment
    except psutil.Error:
        return False


@dataclass(frozen=True)
class KillCase:
    """What is done to one of the processes, and what is seen of it."""

    keys: tuple[str, ...]
    which: Callable[[psutil.Process], bool]
    number: signal.Signals
    status: int
    says: str


CASES = {
    "an engine is killed": KillCase(
        (*AHEAD, "rollout.restarts=0"), _is_engine, signal.SIGKILL, 10, r"rollout engine 0 died"
    ),
    "an engine is stopped": KillCase(
        (*AHEAD, "rollout.timeout=4", "rollout.restarts=0"), _is_engine, signal.SIGSTOP, 11,
        r"rollout engine 0 (failed: no progress for \d+ seconds \(rollout\.timeout\); it )?is stopped \(SIGSTOP\)",
    ),
    "the only trainer rank is stopped": KillCase(
        ("train.timeout=30",), lambda p: _is_rank(p, "0"), signal.SIGSTOP, 11,
        r"trainer rank 0 failed: no progress for \d+ seconds \(train\.timeout\); it is stopped \(SIGSTOP\)",
    ),
    "one trainer rank of two is stopped": KillCase(
        ("train.timeout=30", "--nproc", "2"), lambda p: _is_rank(p, "1"), signal.SIGSTOP, 11,
        r"trainer rank 1 (is stuck: .*|failed: no progress for .*); it is stopped \(SIGSTOP\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_actor_that_is_struck_is_named(name: str, task: Path) -> None:
    case, run = CASES[name], task / re.sub(r"\W", "-", name)
    words = command(task, run, "train.steps=4000", "checkpoint.every=2", ALONE, *case.keys)
    with begun(words, run) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        (struck,) = [child for child in children if case.which(child)]
        struck.send_signal(case.number)
        out, _ = process.communicate(timeout=300 * business())
        assert process.returncode == case.status, out
        assert re.search(case.says, out), out
        assert f"The last complete checkpoint is {run}/checkpoints/step-" in out
        assert still_there(children) == []
    done = int(os.readlink(run / "checkpoints/latest").removeprefix("step-"))
    words = [*WEFT, "rl", "--resume", str(run), f"train.steps={done + 2}"]
    assert f"resumed  step {done} of {done + 2}" in weft([*words, *[w for w in case.keys if w in ("--nproc", "2")]])
    assert [line["step"] for line in lines_of(run)] == list(range(1, done + 3))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_and_other_clusters_stay(number: signal.Signals, task: Path) -> None:
    """Ctrl-C reaches every process of the terminal's group; SIGTERM, the controller."""
    run = task / f"signal-{number}"
    program = "import ray, sys; ray.init(address='local', num_cpus=1, include_dashboard=False)\n"
    program += "print('there', flush=True); sys.stdin.read(); print(ray.get(ray.remote(lambda: 7).remote()))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as neighbour:  # type: ignore[call-overload]
        assert "there" in neighbour.stdout.readline()
        with begun(command(task, run, "train.steps=4000", "checkpoint.every=2", ALONE, *AHEAD), run) as process:
            children = psutil.Process(process.pid).children(recursive=True)
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            out, _ = process.communicate(timeout=120 * business())
            assert process.returncode == 128 + number, out
            assert still_there(children) == []
        match = re.search(rf"stopped  by {number.name} after step (\d+)", out)
        assert match is not None and os.readlink(run / "checkpoints/latest") == f"step-{int(match[1]):06d}"
        out, _ = neighbour.communicate(timeout=60 * business())
        assert out.strip() == "7"


def test_a_signal_before_training_ends_it_at_once(task: Path) -> None:
    run = task / "early"
    words = command(task, run, "train.steps=4000", ALONE)
    with subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        end = time.monotonic() + 120 * business()
        while not any(_is_rank(child, "0") for child in psutil.Process(process.pid).children(recursive=True)):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert still_there(children) == []
        assert process.wait(60 * business()) == 128 + signal.SIGTERM
