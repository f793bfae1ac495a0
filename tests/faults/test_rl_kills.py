"""A real Ray: actors that are killed or stopped, and a controller that is asked to end (`make test-soak`)."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from tests.rl.test_rl_run import WEFT, _is_rank, begun, cluster, command, lines_of, still_there, task, weft, weights
from tests.support.local_rl import write_teacher
from tests.support.machine import business
from weft.inference.records import FOLDER, read_rollouts, rollout_files

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


LONG = ["train.steps=24", "rl.minibatches=1", "checkpoint.every=4", ALONE]
EXACT = ["rollout.engine=hf", "rl.on_policy=exact", "rollout.restarts=50", "rollout.timeout=60", *LONG]


def run_struck(
    words: list[str], run: Path, targets: Mapping[str, Callable[[psutil.Process], bool]], kills: int, pause: float = 6.0
) -> tuple[str, Counter[str]]:
    """Run a command line, of whose processes some are killed at random moments, up to `pause` seconds apart; returns
    what it prints, and the kills of each target."""
    chance, since, struck = random.Random(0), time.monotonic(), Counter[str]()
    with tempfile.TemporaryFile("w+") as file:
        with subprocess.Popen(words, text=True, stdout=file, stderr=subprocess.STDOUT) as process:
            while struck.total() < kills and process.poll() is None and time.monotonic() - since < 900 * business():
                time.sleep(chance.uniform(0.5, pause))
                children = [] if not run.exists() else psutil.Process(process.pid).children(recursive=True)
                name = chance.choice([*targets])
                with suppress(psutil.NoSuchProcess):
                    if running := [child for child in children if targets[name](child)]:
                        chance.choice(running).kill()
                        struck[name] += 1
            process.wait(timeout=900 * business())
        file.seek(0)
        out = file.read()
    assert process.returncode == 0, out
    assert struck.total() == kills, f"{struck}\n{out}"
    return out, struck


def same(run: Path, unbroken: Path) -> None:
    """Both runs have the same metrics, weights and samples; each sample of a step is there once."""
    lines = [{k: v for k, v in line.items() if k != "rollout/engine_restarts"} for line in lines_of(run)]
    assert lines == [{k: v for k, v in line.items() if k != "rollout/engine_restarts"} for line in lines_of(unbroken)]
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(unbroken).items())
    for step, path in rollout_files(unbroken / FOLDER).items():
        actual, expected = (read_rollouts(p) for p in (rollout_files(run / FOLDER)[step], path))
        ids = [(group.prompt.id, sample.number) for group in actual for sample in group.samples]
        assert len(set(ids)) == len(ids) == 16
        assert ids == [(group.prompt.id, sample.number) for group in expected for sample in group.samples]


def test_engines_that_are_killed_at_random_change_nothing(task: Path) -> None:
    run, unbroken = task / "soak", task / "soak-unbroken"
    weft([*command(task, unbroken, *EXACT, "rollout.num_engines=2")])
    started = run / "opening.txt"
    words = command(task, run, *EXACT, "rollout.num_engines=2")
    out, _ = run_struck(words, run, {"engine": lambda p: started.exists() and _is_engine(p)}, 8)
    assert out.count("is replaced, restart") >= 8
    same(run, unbroken)


def test_random_parts_that_are_killed_change_nothing(task: Path) -> None:
    """Engines, the reference's rank, and reward processes, in one run: its metrics, weights and samples are those of
    the unbroken one. WEFT_SOAK_KILLS says how many; WEFT_SOAK_STEPS, how long the run is."""
    kills, steps = int(os.environ.get("WEFT_SOAK_KILLS", "12")), int(os.environ.get("WEFT_SOAK_STEPS", "60"))
    model, started = task / "written", task / "parts/opening.txt"
    if not model.exists():
        write_teacher(task / "adder", model)
    keys = [
        *EXACT, "model.init=pretrained", "rollout.num_engines=2", "reference.ranks=1", "rl.kl_coef=0.01",
        "rl.reward=[tests.support.reward_functions:slow_length, length]", f"train.steps={steps}",
        "rollout.restarts=1000", "cluster.frozen_restarts=1000", f"checkpoint.every={steps}", f"model.path={model}",
    ]  # fmt: skip
    run, unbroken = task / "parts", task / "parts-unbroken"
    weft([*command(task, unbroken, *keys)])

    def is_reference(process: psutil.Process) -> bool:
        ranks = [child for child in psutil.Process(process.ppid()).children() if _is_rank(child, "0")]
        oldest = min(ranks, key=lambda child: child.create_time(), default=None)  # the trainer
        return started.exists() and _is_rank(process, "0") and process != oldest

    def is_reward(process: psutil.Process) -> bool:
        return started.exists() and "weft.rl.rewards.worker" in process.cmdline() and not process.children()

    targets = {"engine": lambda p: started.exists() and _is_engine(p), "reference": is_reference, "reward": is_reward}
    out, struck = run_struck([*command(task, run, *keys)], run, targets, kills, pause=4.0)
    print(f"kills: {dict(struck)}, of {steps} steps")
    assert out.count("rollout engine") and min(struck[name] for name in targets) > 0
    assert "reference ranks are started again" in out
    same(run, unbroken)


def test_a_run_whose_trainer_is_killed_is_resumed_and_is_the_unbroken_one(task: Path) -> None:
    run, unbroken = task / "restarted", task / "restarted-unbroken"
    weft([*command(task, unbroken, *EXACT)])
    words = [*command(task, run, *EXACT), "--restarts", "3"]
    targets = {"trainer": lambda p: _is_rank(p, "0") and (run / "checkpoints/latest").exists()}
    out, _ = run_struck(words, run, targets, 1)
    assert "restart 1 of 3: the attempt failed" in out and "trainer rank 0 died" in out
    assert re.search(r"resumed  step \d+ of 24", out)
    same(run, unbroken)


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
