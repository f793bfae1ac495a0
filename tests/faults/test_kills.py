"""kill -9 at any moment of a save, and signals that ask a run to end: the last whole checkpoint always loads."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.support import forked
from tests.support.cases import open_engine, saved_model
from tests.support.machine import business
from tests.support.resuming import inputs, lines, process
from weft.checkpoint.retention import complete_steps, step_folder, sweep
from weft.checkpoint.save import Saver
from weft.checkpoint.state import check_contents, find_state_shards, load_state, read_state
from weft.config.schema import CheckpointConfig

KEEP = 2
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


def saves_for_ever(folder: str, model: str, kill_at: int | None, pipe: Connection) -> None:
    """A process that does nothing but save: every weight of step s is s, every moment 10 s.

    kill_at: it kills itself right before this call (from 0) of those that change names in the run folder.
    """
    torch.set_num_threads(1)
    engine = open_engine(model, "1", step={"max_tokens_per_device": 64})
    assert engine.optimizer is not None
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.apply(1e-3)
    checkpoints = Path(folder) / "checkpoints"
    sweep(checkpoints)
    done = max(complete_steps(checkpoints), default=0)
    if done:
        load_state(engine, read_state(step_folder(checkpoints, done)))
        values = {
            float(part.local.view(-1)[0]) for name, part in find_state_shards(engine).items() if "weights" in name
        }
        assert values == {float(done)}, values
    config = CheckpointConfig(keep=KEEP, async_=True, trainer_state=random.Random(done).choice(["all", "last"]))
    with dying(kill_at), Saver(engine, Path(folder), config, {"config": {}}, last=done) as saver:
        pipe.send(done)
        for step in range(done + 1, done + 1000):
            for name, part in find_state_shards(engine).items():
                part.local.fill_(step if name.startswith("weights/") else 10 * step)
            saver.save(step, {})
            saver.wait()


@contextmanager
def dying(kill_at: int | None) -> Iterator[None]:
    """Count the calls that rename or remove, and die before one of them."""
    calls = [0]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if calls[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls[0] += 1
            return original(*arguments, **options)

        return call

    with (
        mock.patch.object(os, "rename", counted(os.rename)),
        mock.patch.object(os, "replace", counted(os.replace)),
        mock.patch.object(os, "rmdir", counted(os.rmdir)),
    ):
        yield


def check_whole(folder: Path, at_least: int) -> int:
    """Every whole name holds a whole checkpoint, `keep` of them; the newest step."""
    checkpoints = folder / "checkpoints"
    steps = complete_steps(checkpoints)
    for step in steps:
        step_path = step_folder(checkpoints, step)
        weights = load_file(step_path / "model.safetensors")
        assert all(bool((tensor == step).all()) for tensor in weights.values()), step
        json.loads((step_path / "config.json").read_text())
    if steps:
        state = read_state(step_folder(checkpoints, steps[-1]))
        check_contents(state, 0, 1)
        assert state.step == steps[-1]
    newest = max(steps, default=0)
    assert newest >= at_least
    assert len(steps) >= min(KEEP, newest)
    return newest


def one_process(folder: Path, kill_at: int | None = None, kill_after: float | None = None) -> None:
    """Start the saving process, and see it killed."""
    receiver, sender = _context.Pipe()
    child = _context.Process(
        target=_save_in_child, args=(str(folder), saved_model("llama"), kill_at, sender), daemon=True
    )
    child.start()
    sender.close()
    assert receiver.poll(60), "the saving process has not begun"
    receiver.recv()
    if kill_after is not None:
        time.sleep(kill_after)
        child.kill()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL, child.exitcode


def _save_in_child(folder: str, model: str, kill_at: int | None, pipe: Connection) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saves_for_ever(folder, model, kill_at, pipe)


@pytest.mark.slow
@pytest.mark.table  # the suite has a kill before each change of a name
def test_twenty_kills_at_seeded_moments(tmp_path: Path) -> None:
    """Each process goes on from what the one before has left."""
    moments, newest = random.Random(7), 0
    for _ in range(20):
        one_process(tmp_path, kill_after=moments.uniform(0.0, 0.4) * business())
        newest = check_whole(tmp_path, at_least=newest)
    assert newest > 5


@pytest.mark.slow
def test_a_kill_before_each_change_of_a_name(tmp_path: Path) -> None:
    """Two saves of a process, step by step through everything that they rename, and the folders that they remove."""
    newest = 0
    for call in range(14):
        one_process(tmp_path, kill_at=call)
        newest = check_whole(tmp_path, at_least=newest)
    assert newest > 5


# ---------------------------------------------------------------- a real run


def words_for(folder: Path, steps: int) -> list[str]:
    home = inputs()
    return [
        f"model.path={home}/model", f"data.path={home}/chats.jsonl", "step.documents=6",
        "step.max_tokens_per_device=64", "optimizer.lr=1e-2", "schedule.warmup_steps=3", "schedule.name=constant",
        f"train.steps={steps}", "train.seed=3", "train.log_every=1", "checkpoint.every=3", f"run.dir={folder}",
        "--device", "cpu",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.table), signal.SIGINT, signal.SIGUSR1]
)  # SIGTERM: the suite has it in test_faults.py and launch/test_batch_scripts.py
def test_a_signal_saves_and_ends_and_the_run_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    nproc = "1" if number == signal.SIGUSR1 else "2"  # on one rank there is no launcher between
    run_folder = tmp_path / "run"
    run = forked.Run(["sft", *words_for(run_folder, 5000), "--nproc", nproc], tmp_path)
    run.wait_for("^step 4/")
    os.kill(run.pid, number)
    run.wait(60)
    out, err = run.output(), run.errors()
    assert run.status == 128 + number, err
    advice = re.search(
        rf"^stopped  by {number.name} after step (\d+)\. Resume with: weft sft --resume (.+)$", out, re.M
    )
    assert advice is not None and advice[2] == str(run_folder)
    step = int(advice[1])
    assert complete_steps(run_folder / "checkpoints")[-1] == step == len(lines(run_folder))
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["stopped"] == number.name and summary["steps"] == step
    assert not (run_folder / "lock").exists()
    words = ["sft", "--resume", str(run_folder), f"train.steps={step + 2}", "--device", "cpu", "--nproc", nproc]
    done = forked.run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"resumed  step {step} of {step + 2}" in done.stdout
    assert [line["step"] for line in lines(run_folder)] == list(range(1, step + 3))


@pytest.mark.slow
def test_killed_and_resumed_in_new_processes_it_is_the_unbroken_run(tmp_path: Path) -> None:
    """Launcher and ranks killed with -9 at some step, and gone on with by processes that share nothing with them."""
    folder = tmp_path / "killed"
    sections = {"schedule": {"name": "constant"}, "checkpoint": {"every": 3, "async_": True}, "train": {"steps": 40}}
    process(tmp_path / "whole", "2", sections=sections)
    run = forked.Run(["sft", *words_for(folder, 40), "--nproc", "2"], tmp_path)
    run.wait_for("^step 10/")
    os.kill(run.pid, signal.SIGKILL)  # its ranks end with it
    deadline = time.monotonic() + 30
    while _is_locked(folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    done = forked.run(["sft", "--resume", str(folder), "--device", "cpu", "--nproc", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert lines(folder) == lines(tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills_leave_the_unbroken_run(tmp_path: Path) -> None:
    """Launcher and ranks killed with -9 some moments after they have begun, or gone on; then resumed, and so forth."""
    folder, steps, kills = tmp_path / "killed", 4000, 200
    moments, done, began = random.Random(11), 0, 0
    while done < kills:
        resumed = folder.exists()
        words = ["--resume", str(folder), "--device", "cpu"] if resumed else words_for(folder, steps)
        run = forked.Run(["sft", *words, "--nproc", "2"], tmp_path)
        if resumed or moments.random() < 0.5:
            run.wait_for(r"^step \d+/" if moments.random() < 0.8 else "^resumed|^step")
        time.sleep(moments.uniform(0.0, 0.3))
        if run.status is not None:
            raise AssertionError(f"the run ended after {done} kills: {run.errors()}")
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        done, began = done + 1, began + resumed
        deadline = time.monotonic() + 30
        while folder.exists() and _is_locked(folder):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    reached = complete_steps(folder / "checkpoints")[-1]
    last = forked.run(
        ["sft", "--resume", str(folder), f"train.steps={reached + 5}", "--device", "cpu", "--nproc", "2"], tmp_path
    )
    assert last.returncode == 0, last.stderr
    assert began > kills / 2 and reached > kills
    words = [*words_for(tmp_path / "whole", reached + 5), "--nproc", "2"]
    forked.Run(["sft", *words], tmp_path).wait(1800)
    assert lines(folder) == lines(tmp_path / "whole")


def _is_locked(folder: Path) -> bool:
    import fcntl

    with (folder / "lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
