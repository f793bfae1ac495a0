"""`weft rl` as a user runs it: a controller, trainer ranks and engines on a Ray of their own, on additions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.machine import business
from weft.rl.records import FOLDER, read_rollouts, rollout_files

ROOT = Path(__file__).parent.parent
KEYS = [
    "model.init=random", "rl.prompts=4", "rl.group_size=4", "rl.updates=2", "rollout.max_prompt_tokens=6",
    "rollout.max_new_tokens=4", "step.max_tokens_per_device=256", "optimizer.lr=1e-3", "schedule.name=constant",
    "schedule.warmup_steps=0", "rl.reward=[exact_match, length]", "data.columns={answer: completion}",
    "rl.reward_options={length.longest: 4}", "train.timeout=120",
]  # fmt: skip
# What differs from run to run, whatever is trained.
CLOCKS = ("seconds", "tokens_per_second", "memory_gib", "mfu", "sync/seconds", "sync/gb_per_second")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("additions")
    subprocess.run([sys.executable, ROOT / "examples/make_arithmetic_demo.py", folder], check=True)
    config = json.loads((folder / "adder/config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "hidden_size": 32, "intermediate_size": 64}
    (folder / "adder/config.json").write_text(json.dumps(config))
    for name, rows in (("additions", 40), ("held-out", 6)):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()[:rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def command(task: Path, run: Path, *more: str) -> list[str]:
    paths = [f"model.path={task}/adder", f"data.path={task}/additions.jsonl", f"run.dir={run}"]
    return [sys.executable, "-m", "weft", "rl", *paths, *KEYS, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def weft(words: Sequence[str], status: int = 0) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=240 * business())
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines_of(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCKS and "seconds" not in k} for line in found]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(run / "checkpoints/latest/model.safetensors"))


@pytest.fixture(scope="module")
def whole(task: Path) -> Path:
    """Three rollout steps of two optimizer steps each, with evaluations, on two ranks."""
    run = task / "whole"
    keys = ["train.steps=6", "checkpoint.every=2", f"eval.path={task}/held-out.jsonl", "eval.at_start=true"]
    (task / "whole.out").write_text(weft(command(task, run, *keys, "eval.every=2", "--nproc", "2")))
    return run


def test_a_run_and_what_it_leaves(whole: Path) -> None:
    lines = lines_of(whole)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 4, 6]
    assert all(line["documents"] == 8 for line in lines[1:])
    last = lines[-1]
    assert last["rollout"] == 3 and last["staleness/max"] == 0
    assert last["sampling/sampling_logp_difference/max"] < 1e-5  # the engine has the trainer's weights
    assert last["rewards/exact_match/mean"] + last["rewards/length/mean"] == pytest.approx(last["reward"])
    for step, path in rollout_files(whole / FOLDER).items():
        groups = read_rollouts(path)
        assert [len(group.samples) for group in groups] == [4] * 4
        versions = {int(v) for g in groups for s in g.samples for v in s.versions[s.sampled]}
        assert versions == {step - 1}
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["stopped"] is None
    printed = (whole.parent / "whole.out").read_text()
    assert "rl       grpo: 3 rollout steps of 4 prompts x 4 samples, 2 optimizer steps each" in printed


def test_a_resumed_run_is_the_unbroken_one(task: Path, whole: Path) -> None:
    """Ended after two rollout steps, and gone on with: the same prompts, rollouts, losses and weights, to the bit."""
    run = task / "broken"
    keys = ["checkpoint.every=2", f"eval.path={task}/held-out.jsonl", "eval.at_start=true", "eval.every=2"]
    weft(command(task, run, *keys, "train.steps=4", "--nproc", "2"))
    words = [sys.executable, "-m", "weft", "rl", "--resume", str(run), "train.steps=6", "--nproc", "2"]
    assert "resumed  step 4 of 6" in weft(words)
    assert lines_of(run) == lines_of(whole)
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(whole).items())


def test_rollouts_are_trained_from_again_to_the_same_weights(task: Path, whole: Path) -> None:
    """--replay needs no engine; another number of ranks changes rounding alone."""
    run = task / "replayed"
    weft(command(task, run, "train.steps=6", "--nproc", "2", "--replay", str(whole / FOLDER)))
    for ours, theirs in zip(lines_of(run), lines_of(whole)[1:], strict=True):
        assert ours["loss"] == theirs["loss"] and ours["grad_norm"] == theirs["grad_norm"]
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(whole).items())


def test_engines_of_their_own_run_ahead_of_training(task: Path) -> None:
    run = task / "ahead"
    weft(command(task, run, "train.steps=8", "rollout.engine=hf", "cluster.max_staleness=1"))
    lags = [line["staleness/max"] for line in lines_of(run) if "staleness/max" in line]
    assert len(lags) == 4 and lags[0] == 0 and max(lags) == 1
    # What was sampled is what the trainer says of it, at the weights of that version.
    first = next(line for line in lines_of(run) if line.get("rollout") == 1 and "staleness/max" in line)
    assert first["sampling/sampling_logp_difference/max"] < 1e-5


def test_rollouts_alone(task: Path) -> None:
    run = task / "only"
    weft(command(task, run, "train.steps=4", "--rollout-only"))
    assert sorted(rollout_files(run / FOLDER)) == [1, 2] and not (run / "checkpoints").exists()
    shown = weft([sys.executable, "-m", "weft", "rollouts", str(run), "--groups", "1"])
    assert "step 2: 4 prompts, 16 samples" in shown and "reward" in shown


def test_a_trainer_rank_that_is_killed_is_named_and_the_run_goes_on_from_its_checkpoint(task: Path) -> None:
    run = task / "killed"
    words = command(task, run, "train.steps=400", "checkpoint.every=2", "--nproc", "2")
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, text=True, env=environment(), **both) as process:  # type: ignore[call-overload]
        end = time.monotonic() + 120 * business()
        while not (run / "checkpoints/latest").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        actors = [child for child in psutil.Process(process.pid).children(recursive=True) if _is_rank(child, "1")]
        assert len(actors) == 1
        actors[0].send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=60 * business())
    assert process.returncode == 10, out
    assert "trainer rank 1 died" in out
    done = int(os.readlink(run / "checkpoints/latest").removeprefix("step-"))
    words = [sys.executable, "-m", "weft", "rl", "--resume", str(run), "--nproc", "2", f"train.steps={done + 2}"]
    assert f"resumed  step {done} of {done + 2}" in weft(words)
    assert [line["step"] for line in lines_of(run)] == list(range(1, done + 3))


def _is_rank(process: psutil.Process, rank: str) -> bool:
    try:
        return process.environ().get("RANK") == rank and "ray::" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_samples_may_be_trained_more_than_once(task: Path) -> None:
    """Two epochs over a rollout step: ratios leave 1 in the second."""
    run = task / "epochs"
    weft(command(task, run, "train.steps=4", "rl.epochs=2"))
    lines = lines_of(run)
    assert [line["epoch"] for line in lines] == [1, 1, 2, 2] and {line["rollout"] for line in lines} == {1}
    assert lines[0]["policy/kl_old"] == 0 and lines[3]["policy/kl_old"] > 0


def test_a_cluster_that_is_not_there_is_named(task: Path) -> None:
    out = weft(command(task, task / "nowhere", "train.steps=2", "cluster.address=127.0.0.1:1"), status=2)
    assert "cluster.address: no Ray cluster at 127.0.0.1:1" in out
    out = weft(command(task, task / "large", "train.steps=2", "cluster.trainer=2", "mesh.dp_shard=3"), status=2)
    assert "mesh.dp_shard" in out
