"""Runs of `weft rl` that are cut short and gone on with; files that cannot be written; actors and rewards that fail.

Without Ray: tests/support/local_rl.py. With it: tests/rl/test_rl_run.py.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from tests.support import forked
from tests.support.cases import open_engine, saved_model
from tests.support.faults import _fill_metrics_disk
from tests.support.local_rl import lines_of, make_task, rollouts_of, same_run, start, weights_of
from tests.support.pool import run as run_on_ranks
from weft.checkpoint import save, snapshot
from weft.checkpoint.retention import complete_steps
from weft.checkpoint.save import Saver
from weft.config.rl_schema import RlAlgorithm
from weft.config.schema import CheckpointConfig, ScheduleConfig
from weft.errors import ActorError, StoppedError, StorageError, UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.types import SampleGroup, samples_of
from weft.inference.weight_sync.protocol import SyncError
from weft.launch import flight, monitor, reports
from weft.launch.monitor import ActorWatchdog
from weft.launch.options import RolloutsOptions
from weft.launch.ray_actors import _SerialActor, gather_calls
from weft.launch.reports import RankReport
from weft.launch.status import failure_kind
from weft.observe import rollouts
from weft.recipes import rl
from weft.rl.actors import Actors
from weft.rl.advantages import advantages
from weft.rl.batch_pool import BatchPool
from weft.rl.rewards.base import Rewards
from weft.rl.stop_conditions import CutSamples, EmptySteps, FlatSteps
from weft.rl.trainer import TrainerRank, UpdateResult


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("additions"))


@pytest.fixture(scope="module")
def complete_run(task: Path) -> Path:
    """Three rollout steps of one optimizer step each, evaluated after each, a checkpoint after each."""
    start(task, task / "whole", *whole_keys(task))
    return task / "whole"


def whole_keys(task: Path) -> list[str]:
    return ["train.steps=3", f"eval.path={task}/held-out.jsonl", "eval.every=1"]


# ---------------------------------------------------------------- going on


CASES = {
    "updates and epochs": ["rl.minibatches=2", "rl.epochs=2", "train.steps=12", "schedule.name=linear"],
    "dynamic sampling": ["rl.dynamic_sampling=2", "rl.group_size=2", "train.steps=3"],
    "a critic": ["rl.algorithm=ppo", "critic.lr=1e-2", "train.steps=3"],
    # Replies come when they come, so what is generated together differs, and with it the last bits of anything inexact.
    "an environment": [
        "rl.environment=tests.support.environments:Again",
        "rollout.max_new_tokens=8",
        "train.steps=3",
        "rl.on_policy=exact",
        "rl.reward=[tests.support.reward_functions:variety]",
        "rl.reward_workers=1",
    ],
}


def back_to(run: Path, step: int) -> None:
    """As if the run had been killed before it saved anything later; what it has written besides is there."""
    for later in complete_steps(run / "checkpoints"):
        if later > step:
            shutil.rmtree(run / "checkpoints" / f"step-{later:06d}")
    (run / "lock").write_text("{}")  # of a process that is gone


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_unbroken_one(case: str, task: Path, tmp_path: Path) -> None:
    """The same prompts, samples, losses and weights, to the last bit."""
    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    start(task, run, *CASES[case])
    shutil.copytree(run, unbroken, symlinks=True)
    steps = complete_steps(run / "checkpoints")
    assert len(steps) == 3
    back_to(run, steps[0])
    start(task, run, resume=True)
    same_run(run, unbroken)
    assert len(list((run / "rollouts/dropped").iterdir())) == 2


def test_a_damaged_checkpoint_is_not_resumed_from(
    complete_run: Path, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(complete_run, tmp_path / "run", symlinks=True)
    back_to(run, 2)
    file = run / "checkpoints/step-000002/trainer_state/rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"rl.group_size: 3 -> 4: it changes the training"):
        start(task, run, "rl.group_size=4", resume=True)
    start(task, run, "rl.reward_timeout=9", resume=True)
    out = capsys.readouterr().out
    assert "changed  rl.reward_timeout: 30.0 -> 9.0" in out
    assert (
        "step-000002: rank-00000.safetensors was changed after it was written" in out and "resumed  step 1 of 3" in out
    )
    same_run(run, complete_run)


def test_of_samples_that_run_ahead_none_is_lost_or_counted_twice(task: Path, tmp_path: Path) -> None:
    """Weights are sent while requests wait; prompts whose samples were not trained yet are drawn again."""
    run = tmp_path / "run"
    keys = ["rollout.engine=hf", "cluster.max_staleness=1", "train.steps=4"]
    config = start(task, run, *keys)
    unbroken = rollouts_of(run)
    counted(unbroken, config.rl)
    for step, rows in unbroken.items():
        versions = {v for row in rows for v, s in zip(row["versions"], row["sampled"], strict=True) if s}
        assert versions <= {step - 2, step - 1} - {-1}
    back_to(run, 2)
    start(task, run, resume=True)
    resumed = rollouts_of(run)
    counted(resumed, config.rl)
    assert {step: names(rows) for step, rows in resumed.items()} == {
        step: names(rows) for step, rows in unbroken.items()
    }
    assert [line["step"] for line in lines_of(run)] == [1, 2, 3, 4]


def names(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["prompt_index"], row["visit"], row["number"]) for row in rows]


def counted(steps: dict[int, list[dict[str, Any]]], config: RlAlgorithm) -> None:
    """Each step has its samples, and no sample is in two of them; each prompt comes once in an epoch of nine."""
    sample_names = [name for rows in steps.values() for name in names(rows)]
    assert len(sample_names) == len(set(sample_names)) == len(steps) * config.prompts_per_step * config.group_size
    assert {visit for _, visit, _ in sample_names} == {0}


def test_a_replay_goes_on_as_a_replay(complete_run: Path, task: Path, tmp_path: Path) -> None:
    run, files = tmp_path / "run", str(complete_run / "rollouts")
    start(task, run, "train.steps=3", replay=files)
    shutil.copytree(run, tmp_path / "unbroken", symlinks=True)
    back_to(run, 1)
    with pytest.raises(UserError, match=r"name their folder again \(--replay\)"):
        start(task, run, resume=True)
    start(task, run, resume=True, replay=files)
    same_run(run, tmp_path / "unbroken")
    assert all((weights_of(run)[name] == value).all() for name, value in weights_of(complete_run).items())
    second = shutil.copytree(complete_run, tmp_path / "other", symlinks=True)
    back_to(second, 1)
    with pytest.raises(UserError, match="the run sampled its rollouts so far: remove --replay"):
        start(task, second, resume=True, replay=files)
    with pytest.raises(UserError, match="--rollout-only makes rollouts, and --replay trains"):
        start(task, tmp_path / "both", "train.steps=3", replay=files, rollout_only=True)


def test_rollouts_alone_go_on_behind_the_last(
    complete_run: Path, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    start(task, unbroken, "train.steps=4", rollout_only=True)

    def strike(method: str, before: int) -> None:
        if (method, before) == ("generate", 1):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        start(task, run, "train.steps=4", "track.report_to=[tensorboard]", rollout_only=True, hook=strike)
    assert f"after step 2. Resume with: weft rl --resume {run} --rollout-only" in capsys.readouterr().out
    start(task, run, resume=True, rollout_only=True)
    assert "resumed  after rollout step 2" in capsys.readouterr().out
    assert lines_of(run) == lines_of(unbroken) and rollouts_of(run) == rollouts_of(unbroken)
    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    name = next(name for name in read.Tags()["scalars"] if name.endswith("reward"))
    assert [event.step for event in read.Scalars(name)] == [1, 2, 3, 4]
    with pytest.raises(UserError, match="this run has trained. For rollouts of its weights start another run: weft rl"):
        start(task, complete_run, resume=True, rollout_only=True)


def test_training_from_rollouts_goes_on_from_the_same_ones(
    complete_run: Path, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rollouts_there = tmp_path / "run", str(complete_run / "rollouts")

    def strike(method: str, before: int) -> None:
        if (method, before) == ("update", 1):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        start(task, run, *whole_keys(task), replay=rollouts_there, hook=strike)
    printed = capsys.readouterr().out
    assert f"Resume with: weft rl --resume {run} --replay {rollouts_there}" in printed
    start(task, run, resume=True, replay=rollouts_there)
    assert "resumed  step 2" in capsys.readouterr().out


def test_rollouts_that_are_damaged_are_skipped_by_name(
    complete_run: Path, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest, by weft rollouts, and by a run of rollouts alone that goes on; a step that is asked for is named."""
    run = shutil.copytree(complete_run, tmp_path / "run", symlinks=True)
    os.truncate(run / "rollouts/step-000003.parquet", 100)
    (run / "rollouts/step-000002.parquet").write_bytes(b"")
    rollouts.run(RolloutsOptions(run=str(run)))
    printed = capsys.readouterr().out
    assert "skipped" in printed and "step-000003.parquet: contains no rollouts of weft: " in " ".join(printed.split())
    assert "step 1: 2 prompts, 6 samples" in printed
    with pytest.raises(UserError, match=r"step-000002.parquet: contains no rollouts of weft: .*0 bytes"):
        rollouts.run(RolloutsOptions(run=str(run), step=2))
    (run / "rollouts/step-000001.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="step-000003.parquet: contains no rollouts of weft"):
        rollouts.run(RolloutsOptions(run=str(run)))

    with pytest.raises(UserError, match="step-000001.parquet: contains no rollouts of weft"):
        start(task, tmp_path / "replayed", "train.steps=3", replay=str(run / "rollouts"))

    only, unbroken = tmp_path / "only", tmp_path / "unbroken"
    start(task, only, "train.steps=3", rollout_only=True)
    shutil.copytree(only, unbroken)
    os.truncate(only / "rollouts/step-000003.parquet", 100)
    capsys.readouterr()
    start(task, only, "train.steps=3", resume=True, rollout_only=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "skipped" in printed and "resumed after rollout step 2" in printed
    assert lines_of(only) == lines_of(unbroken) and rollouts_of(only) == rollouts_of(unbroken)
    assert (only / "rollouts/dropped/step-000003.parquet").exists()


@pytest.mark.parametrize(("method", "before"), [("generate", 2), ("update", 1), ("save", 0)])
def test_a_signal_ends_and_saves_the_step(
    method: str, before: int, complete_run: Path, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def strike(called: str, times: int) -> None:
        if (called, times) == (method, before):
            os.kill(os.getpid(), signal.SIGTERM)

    run = tmp_path / "run"
    with pytest.raises(StoppedError) as stopped:
        start(task, run, *whole_keys(task), hook=strike)
    assert stopped.value.number == signal.SIGTERM
    assert "stopped  by SIGTERM after step 2. Resume with: weft rl --resume" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["stopped"] == "SIGTERM"
    start(task, run, resume=True)
    same_run(run, complete_run)


# ---------------------------------------------------------------- what cannot be written


def full(path: Path) -> None:
    """The next thing that is written there finds a full disk."""
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/full")


@pytest.mark.parametrize("part", ["rollouts", "evaluations", "metrics", "a checkpoint", "the run's folder"])
def test_a_full_disk(
    part: str, complete_run: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step; the first one's checkpoint stands, and the run goes on from it when there is room."""
    run = tmp_path / "run"

    def strike(method: str, before: int) -> None:
        if (method, before) != ("update", 1):
            return
        if part in ("rollouts", "evaluations"):
            full(run / part / "step-000002.parquet.partial")
        elif part == "metrics":
            _fill_metrics_disk(None)
        elif part == "a checkpoint":
            monkeypatch.setattr(snapshot, "write_rank_file", no_room)
        else:
            run.rename(tmp_path / "gone")

    with pytest.raises(StorageError) as error:
        start(task, run, *whole_keys(task), hook=strike)
    assert failure_kind(error.value) == "storage"
    message = str(error.value)
    if part == "the run's folder":
        assert f"could not write {run}" in message and "No such file" in message
        (tmp_path / "gone").rename(run)
    else:
        assert "No space left on device" in message
    full_path = {"metrics": "metrics.jsonl", "a checkpoint": "checkpoints/step-000002.partial"}.get(part, part)
    assert full_path.removeprefix("the run's folder") in message
    assert f"weft rl --resume {run}" in message and "weft sft" not in message
    assert complete_steps(run / "checkpoints") == [1]
    monkeypatch.undo()
    start(task, run, resume=True)
    same_run(run, complete_run)


def no_room(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---------------------------------------------------------------- a checkpoint that is being written when a run fails


def test_a_failing_controller_lets_the_trainers_finish_the_checkpoint(
    complete_run: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk takes three seconds for the weights; the controller fails meanwhile, in the second step."""
    run, write = tmp_path / "run", snapshot.write_export

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(3)
        return write(*arguments, **options)

    def strike(method: str, before: int) -> None:
        if (method, before) == ("update", 1):
            raise RuntimeError("boom")

    monkeypatch.setattr(snapshot, "write_export", slow)
    with pytest.raises(RuntimeError, match="boom"):
        start(task, run, *whole_keys(task), "checkpoint.async=true", hook=strike)
    assert complete_steps(run / "checkpoints") == [1]
    printed = capsys.readouterr().err
    assert "ending   boom: weft first finishes a checkpoint, within 600 s (train.timeout)" in printed
    assert f"saved    {run}/checkpoints/step-000001" in printed
    monkeypatch.undo()
    start(task, run, "checkpoint.async=false", resume=True)
    same_run(run, complete_run)


class Fails:
    def __init__(self) -> None:
        self.told: list[str] = []

    def update(self) -> None:
        raise RuntimeError("boom")

    def ending(self, error: BaseException) -> None:
        self.told.append(str(error))


def test_what_fails_in_an_actor_is_told_before_it_answers(tmp_path: Path) -> None:
    host, fails = object.__new__(_SerialActor), Fails()
    host._number, host._scratch, host._make, host._object = 0, tmp_path, None, fails
    report = host.call("update")
    assert "boom" in report.message and fails.told == ["boom"]


def rank_that_ends(path: str, folder: str, fails_alone: bool) -> tuple[float, list[int]]:
    """A trainer's rank whose call fails while a checkpoint is written, of which rank 0 writes for two seconds; the
    seconds that its end takes, and what is whole then."""
    rank, write = dist.get_rank(), snapshot.write_export

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(2.0 * (rank == 0))
        return write(*arguments, **options)

    trainer = object.__new__(TrainerRank)
    saver = trainer.saver = Saver(open_engine(path, "2"), Path(folder), CheckpointConfig(), {"config": {}})
    with mock.patch.object(snapshot, "write_export", slow), mock.patch.object(save, "_GRACE_SECONDS", 0.5):
        saver.save(1, {})
        if not fails_alone or rank == 1:
            began = time.monotonic()
            trainer.ending(RuntimeError("boom"))
            return time.monotonic() - began, complete_steps(Path(folder) / "checkpoints")
        assert saver._thread is not None
        saver._thread.join()
        return 0.0, complete_steps(Path(folder) / "checkpoints")


def test_ranks_that_fail_alike_finish_the_checkpoint_and_one_that_fails_alone_does_not_wait(tmp_path: Path) -> None:
    path = saved_model("llama")
    for fails_alone in (False, True):
        (tmp_path / str(fails_alone)).mkdir()
        results = run_on_ranks(2, rank_that_ends, path, str(tmp_path / str(fails_alone)), fails_alone)
        seconds, steps = results[1]
        if fails_alone:
            assert seconds < 1.5 and steps == [] and results[0][1] == []
        else:
            assert seconds > 1.5 and [steps for _, steps in results] == [[1], [1]]


# ---------------------------------------------------------------- actors that fail


def test_a_failed_actor_ends_the_run_and_what_stands_is_said(task: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def strike(method: str, before: int) -> None:
        if (method, before) == ("advance", 1):
            raise ActorError("rollout engine 0 died", "killed")

    keys = ["rollout.engine=hf", "cluster.max_staleness=1", "train.steps=4"]
    with pytest.raises(ActorError, match="rollout engine 0 died") as error:
        start(task, run, *keys, hook=strike)
    report = reports.of_exception(0, error.value)
    assert report.kind == "killed" and f"The last activity of each rank is in {run}/flight" in report.message
    assert not (run / "lock").exists()


class Engines:
    """A group of two engines, whose answers come when they are let go. version: of their weights."""

    def __init__(self) -> None:
        self.version, self.asked, self.go = 0, 0, asyncio.Event()

    def __len__(self) -> int:
        return 2

    async def call_one(self, number: int, method: str, asked: dict[int, Request], seconds: float) -> Any:
        version, turn = self.version, self.asked
        self.asked += 1
        await self.go.wait()
        if turn == 3:
            raise ActorError(f"rollout engine {number} died", "killed")
        completions = {
            key: [Completion((s,), (0.0,), "end", ((version, 1),)) for s in r.seeds] for key, r in asked.items()
        }
        return completions, len(completions)


def test_an_update_waits_for_what_has_begun_and_holds_what_has_not() -> None:
    """Two requests run while weights change: they end under the old ones, and what waited comes under the new."""

    async def play() -> list[Any]:
        engines = Engines()
        pool: Any = BatchPool(engines)  # type: ignore[arg-type]
        first = [asyncio.ensure_future(pool.generate(request(seed))) for seed in (1, 2)]
        await asyncio.sleep(0.01)
        later = [asyncio.ensure_future(pool.generate(request(seed))) for seed in (3, 4)]
        paused = asyncio.ensure_future(pool.pause())
        await asyncio.sleep(0.01)
        assert engines.asked == 2 and not paused.done()
        engines.go.set()
        await paused
        engines.version = 1
        assert engines.asked == 2
        await pool.resume()
        return await asyncio.gather(*first, *later, return_exceptions=True)

    results = asyncio.run(play())
    died = [result for result in results if isinstance(result, ActorError)]
    answered = [result[0] for result in results if not isinstance(result, ActorError)]
    assert len(died) == 1  # the fourth one's engine, and nobody waits for ever
    assert [(c.tokens, c.versions) for c in answered] == [((1,), ((0, 1),)), ((2,), ((0, 1),)), ((3,), ((1, 1),))]


def request(seed: int) -> Request:
    return Request(f"prompt {seed}", (5,), (seed,), SamplingParams(1))


def test_of_several_failures_the_cause_is_raised() -> None:
    async def fail(after: float, error: ActorError) -> None:
        await asyncio.sleep(after)
        raise error

    waited = ActorError("nothing came", "hang", RankReport(0, 0.0, "", kind="hang", waited=True))
    closed = ActorError("its connection was closed", "failed", RankReport(0, 0.0, ""))
    died = ActorError("rollout engine 0 died", "killed")

    async def play(*errors: ActorError) -> None:
        await gather_calls([fail(0.02 * number, error) for number, error in enumerate(errors)])

    for errors, cause in (((waited, closed), closed), ((closed, died), died), ((waited, closed, died), died)):
        with pytest.raises(ActorError) as raised:
            asyncio.run(play(*errors))
        assert raised.value is cause


def test_a_sync_that_is_waited_for_in_vain_is_a_hang() -> None:
    class Silent:
        def send(self, version: int, names: Any, attempt: Any) -> None:
            raise SyncError("hf-0 did not connect for version 3 within 8 s", late=True, engine="hf-0")

    trainer: Any = object.__new__(TrainerRank)
    trainer.sender, trainer.engine = Silent(), mock.Mock(asleep={})
    failure = trainer.send(3)
    assert failure.engine == "hf-0" and "hf-0 did not connect" in str(failure.error())
    assert reports.of_exception(0, failure.error()).status == 11


ACTOR = """
import os, sys, time
from pathlib import Path
from weft.launch import flight
from weft.observe import rollouts
flight.recorder.open(Path(sys.argv[1]) / flight.FOLDER / flight.live_name(0))
flight.begin(0, 1)
if sys.argv[2] != "idle":
    flight.watch(0.2)
flight.enter(sys.argv[2])
print("there", flush=True)
while True:
    time.sleep(0.02)
    flight.beat()
"""


@pytest.mark.parametrize("phase", ["generate", "idle"])
def test_an_actor_that_is_stopped_is_ended_and_named(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own watchdog is stopped, too. Where it waits for a call, it is one that the call does not wake."""
    monkeypatch.setattr(monitor.SilenceClock, "patience", staticmethod(lambda limit: 3 * limit))
    words = [sys.executable, "-c", ACTOR, str(tmp_path), phase]
    variables = {**os.environ, reports.FOLDER_VARIABLE: str(tmp_path)}
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None and actor.stdout.readline() == "there\n"
        looking = ActorWatchdog(tmp_path, 0.2, "rollout.timeout")
        with looking.waiting_for(0):
            actor.send_signal(signal.SIGSTOP)
            end = time.monotonic() + 20
            while actor.poll() is None and time.monotonic() < end:
                looking.look(0.0)
                time.sleep(0.05)
    assert actor.returncode == -signal.SIGKILL
    (report,) = reports.read_all(tmp_path)
    assert report.kind == "hang" and "(rollout.timeout); it is stopped (SIGSTOP)" in report.message
    assert report.activity == {"generate": "generating", "idle": "waiting for the controller"}[phase]


def test_an_actor_that_nobody_waits_for_may_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor.SilenceClock, "patience", staticmethod(lambda limit: 0.0))
    record = flight.FlightRecorder()
    record.open(tmp_path / flight.FOLDER / flight.live_name(0))
    record.watch(1.0)
    record.enter("generate")
    looking = ActorWatchdog(tmp_path, 1.0, "train.timeout")
    looking.look(0.0)
    time.sleep(0.01)
    looking.look(0.0)
    assert reports.read_all(tmp_path) == []


# ---------------------------------------------------------------- rewards


def hold_for_ever() -> None:
    """A controller whose reward function never ends."""
    from tests.rl.test_rewards import sample_of
    from weft.inference.types import Prompt

    async def run() -> None:
        rewards = Rewards(RlAlgorithm(reward=("tests.support.reward_functions:hold_the_lock",), reward_workers=1))
        sample = sample_of(Prompt(0, 0, (1,), "?"), 0, "a")
        await rewards.start()
        await rewards.score([sample], ["a"])

    asyncio.run(run())


def test_rewards_end_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    """Even a function that holds Python's lock, and what it has started."""
    root = str(Path(__file__).parents[2])
    controller = forked.Run(hold_for_ever, tmp_path, STARTED=str(tmp_path / "started"), PYTHONPATH=root)
    end = time.monotonic() + 100
    while not (tmp_path / "started").exists():
        assert controller.process.is_alive() and time.monotonic() < end
        time.sleep(0.05)
    children = psutil.Process(controller.pid).children(recursive=True)
    assert len(children) == 3  # the function's process, the one that looks after it, and what it has started
    controller.process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_group_without_rewards_is_not_trained_and_is_counted(task: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = ["train.steps=1", "rl.reward=[tests.support.reward_functions:of_some]", "rl.reward_workers=1"]
    start(task, run, *keys)
    (line,) = lines_of(run)
    assert line["documents"] == 3 and line["rollout/untrained"] == 3
    (rows,) = rollouts_of(run).values()
    assert len(rows) == 6 and sum(row["reward"] is None for row in rows) == 3


def test_a_run_without_rewards_ends(task: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (
        r"2 rollout steps in a row had no sample to train \(train.max_nonfinite\). Of the last step's 6 samples, "
        "6 have no "
    )
    keys = ["train.steps=9", "train.max_nonfinite=2", "rl.reward=[tests.support.reward_functions:of_none]"]
    with pytest.raises(UserError, match=words + "reward"):
        start(task, run, *keys)
    lines = lines_of(run)
    assert [(line["step"], line["documents"], line["skipped"]) for line in lines] == [(1, 0, True), (2, 0, True)]


NO_BASELINE = "tests.faults.test_rl_faults:no_baseline"


def no_baseline(groups: Sequence[SampleGroup], config: RlAlgorithm) -> list[list[float]]:
    """REINFORCE as it was in 1992: a reward is its own advantage."""
    return [[sample.reward or 0.0 for sample in group.samples] for group in groups]


def test_a_run_that_cannot_learn_says_so_and_ends(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Constant rewards, compared with each other: a warning with samples at the third step, status 2 at the end, after
    the last checkpoint; and no word of it from an algorithm that compares them with nothing."""
    constant = ["rl.reward=[tests.support.reward_functions:of_one]", "rl.reward_workers=1", "checkpoint.every=0"]
    run = tmp_path / "run"
    words = r"the run had no training signal: in all 4 rollout steps .*(\nsample .* reward 1 for .*){2}"
    with pytest.raises(UserError, match=words):
        start(task, run, "train.steps=4", *constant)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("warning 3 rollout steps in a row had no training signal") == 1
    assert len(re.findall(r"sample \d\.0/\d of \S+additions.jsonl:\d: reward 1 for ", printed)) == 2
    assert (run / "checkpoints/latest").exists() and (run / "summary.json").exists()
    start(task, tmp_path / "other", "train.steps=3", *constant, f"rl.advantage={NO_BASELINE}")
    assert "no training signal" not in capsys.readouterr().out


def test_flat_steps_are_those_whose_advantages_are_all_zero() -> None:
    from tests.support.rl_samples import algorithm, group, rl_config

    for name, rewards, expected in (
        ("grpo", [(1.0, 1.0), (0.0, 0.0)], 1),
        ("grpo", [(0.1, 0.1), (0.0, 1e-3)], 0),
        ("grpo", [(0.1, None), (0.1 + 0.2, 0.3)], 1),
        ("grpo", [(None, None), (None, None)], 5),  # neither
        ("rloo", [(7.0, 7.0), (7.0, 7.0)], 1),
        (NO_BASELINE, [(1.0, 1.0), (1.0, 1.0)], 0),
        (NO_BASELINE, [(0.0, 0.0), (0.0, 0.0)], 1),
    ):
        config, groups = rl_config(algorithm(advantage=name)), [group(pair, index=i) for i, pair in enumerate(rewards)]
        advantages(groups, config.rl)
        flat = FlatSteps(5 if expected != 1 else 0)
        flat.count(samples_of(groups), config)
        assert flat.in_a_row == expected, (name, rewards)


def test_samples_that_are_nearly_all_cut_are_warned_of_once() -> None:
    from tests.support.rl_samples import group

    samples = group(tuple([0.0] * 10)).samples
    cut = CutSamples(longest=16)
    for number, sample in enumerate(samples):
        sample.finish = "length" if number < 8 else "end"
    assert cut.count(samples) == []
    samples[8].finish = "length"
    (line,) = cut.count(samples)
    assert line.startswith("warning  9 of 10 samples were truncated at rollout.max_new_tokens=16")
    assert "rollout.max_new_tokens=32" in line and "rl.chat=true" in line and cut.count(samples) == []


def test_one_token_that_is_too_old_is_enough() -> None:
    """The oldest counts, and not the mean."""
    from tests.support.rl_samples import group

    samples = group((0.0, 1.0), lengths=(4, 4)).samples
    for sample in samples:
        sample.versions[sample.sampled] = 5
    samples[0].versions[samples[0].sampled.argmax()] = 3
    assert rl.staleness(samples, 5, 2) == {"staleness/mean": 0.25, "staleness/max": 2.0}
    with pytest.raises(RuntimeError, match="a sample is 2 versions older than the trained weights: more than 1"):
        rl.staleness(samples, 5, 1)


def test_empty_steps_count_in_a_row() -> None:
    from tests.support.rl_samples import algorithm, group, rl_config

    config, empty = rl_config(algorithm()), EmptySteps(2)
    for rewards in ((None, None), (0.0, None), (None, None)):
        empty.count(group(rewards).samples, config)
    assert empty.in_a_row == 1


def test_a_step_that_was_skipped_does_not_advance_the_rate() -> None:
    """As in weft sft."""
    from tests.support.rl_samples import algorithm, group, rl_config

    rates = list[float]()

    class Trainers:
        async def call_all(
            self, method: str, samples: Any, number: int, steps: int, epoch: int, lr: float
        ) -> list[Any]:
            rates.append(lr)
            return [UpdateResult({"step": number} | ({"skipped": True} if number == 2 else {}), {})]

    config = rl_config(algorithm(minibatches=4))
    object.__setattr__(config, "schedule", ScheduleConfig(name="linear", warmup_steps=0, min_lr_ratio=0.0))
    trainers: Any = Trainers()
    unused: Any = None
    run = rl.RlRun(config, unused, unused, Actors(trainers, {}, None), rl.RlPlan(1, 4), rl.FRESH)
    step = rl.RolloutStep(1, [group((0.0, 1.0), index=index) for index in range(4)])
    lines = asyncio.run(rl.update(run, step))
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and run.updates == 3
    assert rates == pytest.approx([config.optimizer.lr * share for share in (0.75, 0.5, 0.5, 0.25)])
