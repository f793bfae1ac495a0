"""`weft rl` as a user runs it: a controller, trainer ranks and engines on Ray, on additions. Runs that are killed have
a Ray of their own, and one of them is a program; the others are forks, and share a Ray."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support import forked
from tests.support.local_rl import CLOCKS, lines_of, shrink
from tests.support.machine import business
from tests.support.ray_forks import start_server, use_server
from weft.inference.records import FOLDER, read_rollouts, rollout_files

ROOT = Path(__file__).parents[2]
WEFT = [sys.executable, "-m", "weft"]
# A Ray that a program starts asks others of the same user for the token that it keeps.
VARIABLES = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}
KEYS = [
    "model.init=random", "rl.prompts_per_step=4", "rl.group_size=4", "rl.minibatches=2", "rollout.max_prompt_tokens=6",
    "rollout.max_new_tokens=4", "step.max_tokens_per_device=256", "optimizer.lr=1e-3", "schedule.name=constant",
    "schedule.warmup_steps=0", "rl.reward=[exact_match, length]", "data.columns={answer: completion}",
    "rl.reward_options={length.longest: 4}", "train.timeout=120",
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@cache
def cluster() -> str:
    """The address of a Ray for all runs of these tests that do not ask for one of their own."""
    folder = tempfile.TemporaryDirectory()
    run = forked.Run(serve_cluster, Path(folder.name), **VARIABLES)
    run.wait_for("\\n", 60 * business())
    atexit.register(folder.cleanup)
    atexit.register(run.wait)
    atexit.register(run.process.terminate)
    return run.output().strip()


def serve_cluster() -> int:
    """In a process of its own: a Ray that lasts until SIGTERM. Prints its address."""
    start_server(os.getcwd())
    use_server()

    import ray  # not in the fork server: Ray reads variables of each worker when it is imported

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(ray.get_runtime_context().gcs_address, flush=True)
    with suppress(KeyboardInterrupt):
        signal.pause()
    ray.shutdown()
    return 0


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("additions")
    words = [str(ROOT / "examples/make_arithmetic_demo.py"), str(folder)]
    assert forked.run(partial(forked.script, words), folder).returncode == 0
    shrink(folder / "adder", 1)
    for name, rows in (("additions", 40), ("held-out", 6)):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()[:rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def command(task: Path, run: Path, *overrides: str) -> list[str]:
    paths = [f"model.path={task}/adder", f"data.path={task}/additions.jsonl", f"run.dir={run}"]
    return [*WEFT, "rl", *paths, *KEYS, *overrides]


def weft(words: Sequence[str], status: int = 0) -> str:
    """What is printed by `python -m weft ...`, which is a fork and, unless it says otherwise, joins the tests' Ray."""
    words = list(words[len(WEFT) :])
    if words[0] == "rl" and not any(word.startswith("cluster.address=") for word in words):
        words.append(f"cluster.address={cluster()}")
    with tempfile.TemporaryDirectory() as folder:
        done = forked.run(words, Path(folder), **VARIABLES)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(run / "checkpoints/latest/model.safetensors"))


@pytest.fixture(scope="module")
def complete_run(task: Path) -> Path:
    """Three rollout steps of two optimizer steps each, with evaluations, on two ranks."""
    run = task / "whole"
    keys = ["train.steps=6", "checkpoint.every=2", f"eval.path={task}/held-out.jsonl", "eval.at_start=true"]
    (task / "whole.out").write_text(weft(command(task, run, *keys, "eval.every=2", "--nproc", "2")))
    return run


@pytest.mark.covers("rl.prompts_per_step", "rl.group_size", "rl.minibatches")
def test_a_run_and_what_it_leaves(complete_run: Path) -> None:
    lines = lines_of(complete_run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 4, 6]
    assert all(line["documents"] == 8 for line in lines[1:])
    last = lines[-1]
    assert last["rollout"] == 3 and last["staleness/max"] == 0
    for line in map(json.loads, (complete_run / "metrics.jsonl").read_text().splitlines()[1:]):
        assert 0 < line["time/forward"] < line["seconds"] and line["time/communication"] > 0  # two ranks
    assert last["sampling/sampling_logp_difference/max"] < 1e-5  # the engine has the trainer's weights
    assert last["rewards/exact_match/mean"] + last["rewards/length/mean"] == pytest.approx(last["reward"])
    for step, path in rollout_files(complete_run / FOLDER).items():
        groups = read_rollouts(path)
        assert [len(group.samples) for group in groups] == [4] * 4
        versions = {int(v) for g in groups for s in g.samples for v in s.versions[s.sampled]}
        assert versions == {step - 1}
    start, end = (json.loads(line) for line in (complete_run / "starts.jsonl").read_text().splitlines())
    assert start["step"] == 0 and start["device"].endswith("(CPU)") and end["error"] == ""
    assert start["ranks"] == start["mesh"]["dp_shard"] and start["engines"] == ""
    sample = json.loads((complete_run / "system.jsonl").read_text().splitlines()[-1])
    assert sample["step"] == 6 and 0 <= sample["system/cpu"] <= 1
    summary = json.loads((complete_run / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["stopped"] is None
    printed = (complete_run.parent / "whole.out").read_text()
    assert "rl       grpo: 3 rollout steps of 4 prompts x 4 samples, 2 optimizer steps each" in printed


def test_weft_eval_finds_what_the_run_has_found(task: Path, complete_run: Path) -> None:
    words = [*WEFT, "eval", str(complete_run), f"{task}/held-out.jsonl", "--json", f"cluster.address={cluster()}"]
    printed = json.loads(weft(words).strip().split("\n")[-1])
    last = lines_of(complete_run)[-1]
    assert printed["prompts"] == 6
    assert {key: printed[key] for key in last if key.startswith("eval/") and key != "eval/seconds"} == {
        key: value for key, value in last.items() if key.startswith("eval/") and key != "eval/seconds"
    }


def test_a_run_whose_controller_is_killed_goes_on_as_the_unbroken_one(task: Path, complete_run: Path) -> None:
    """All that it has started ends with it; then the same prompts, rollouts, losses and weights, to the bit."""
    run = task / "broken"
    keys = ["checkpoint.every=2", f"eval.path={task}/held-out.jsonl", "eval.at_start=true", "eval.every=2"]
    words = command(task, run, *keys, "train.steps=6", "--nproc", "2")
    with tempfile.TemporaryDirectory() as folder:
        controller = forked.Run(words[len(WEFT) :], Path(folder), partial(start_server, folder), **VARIABLES)
        try:
            until_checkpoint(run, controller.process.is_alive)
            children = psutil.Process(controller.pid).children(recursive=True)
        finally:
            controller.process.kill()
        assert still_there(children) == []
    words = [*WEFT, "rl", "--resume", str(run), "--nproc", "2"]
    assert "the learning rate of update 1 was 0.001" in weft([*words, "schedule.name=linear"], status=2)
    assert re.search("resumed  step [24] of 6", weft(words))
    assert lines_of(run) == lines_of(complete_run)
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(complete_run).items())


@pytest.mark.table  # in threads in place of Ray's actors, the suite has replays: tests/faults/test_rl_faults.py
def test_rollouts_are_trained_from_again_to_the_same_weights(task: Path, complete_run: Path) -> None:
    """--replay needs no engine; another number of ranks changes rounding alone."""
    run = task / "replayed"
    weft(command(task, run, "train.steps=6", "--nproc", "2", "--replay", str(complete_run / FOLDER)))
    for replayed, original in zip(lines_of(run), lines_of(complete_run)[1:], strict=True):
        assert replayed["loss"] == original["loss"] and replayed["grad_norm"] == original["grad_norm"]
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(complete_run).items())


@pytest.mark.table  # tests/parity/test_rl_parity.py has updates on tp; the next test, a run whose engines take turns
def test_a_run_whose_ranks_divide_each_layer(task: Path) -> None:
    """Both ranks generate and have the same documents; the weights are those of one rank on the same rollouts."""
    assert compare_with_one_rank(task, "divided", ["mesh.tp=2"]) > 0


def test_a_run_in_stages_of_layers(task: Path) -> None:
    """The same; trainers sleep while both generate, an evaluation and all checkpoints included."""
    shutil.copytree(task / "adder", task / "adder-2")
    shrink(task / "adder-2", 2)
    keys = [f"eval.path={task}/held-out.jsonl", "eval.every=2", "checkpoint.every=2"]
    staged = ["mesh.pp=2", "cluster.offload_during_rollout=[parameters, optimizer, gradients]"]
    compare_with_one_rank(task, "stages", staged, [f"model.path={task}/adder-2", *keys])
    assert all("bubble" in line for line in lines_of(task / "stages")[1:])


def compare_with_one_rank(task: Path, name: str, mesh: list[str], keys: Sequence[str] = ()) -> float:
    """Returns the largest difference of a token's logprob between engine and trainer."""
    run, keys = task / name, [*keys, "train.steps=6", "rl.kl_coef=0.01", "optimizer.eps=1e-5"]
    weft(command(task, run, *keys, "--nproc", "2", "mesh.dp_shard=1", *mesh))
    lines = [line for line in lines_of(run) if line["step"]]
    assert all(line["documents"] == 8 for line in lines)
    differences = [line.get("sampling/sampling_logp_difference/max", 0.0) for line in lines]
    assert max(differences) < 1e-5
    groups = [group for path in rollout_files(run / FOLDER).values() for group in read_rollouts(path)]
    assert len({tuple(sample.tokens.tolist()) for group in groups for sample in group.samples}) > len(groups)
    one_rank = task / f"{name}-on-one-rank"
    weft(command(task, one_rank, *keys, "--nproc", "1", "--replay", str(run / FOLDER)))
    actual, expected = weights(run), weights(one_rank)
    for parameter, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[parameter], rtol=0, atol=2e-5)  # each step moves them by up to 1e-3
    return float(max(differences))


@pytest.mark.covers("rollout.engine", "cluster.max_staleness")
def test_engines_of_their_own_run_ahead_of_training(task: Path) -> None:
    run = task / "ahead"
    clock = ["checkpoint.every=0", "checkpoint.every_minutes=1e-5", "checkpoint.keep=10"]
    weft(command(task, run, "train.steps=8", "rollout.engine=hf", "cluster.max_staleness=1", *clock))
    assert [step for step in range(1, 9) if (run / f"checkpoints/step-{step:06}").exists()] == [2, 4, 6, 8]
    lags = [line["staleness/max"] for line in lines_of(run) if "staleness/max" in line]
    assert len(lags) == 4 and lags[0] == 0 and max(lags) == 1
    # What was sampled is what the trainer says of it, at the weights of that version.
    first = next(line for line in lines_of(run) if line.get("rollout") == 1 and "staleness/max" in line)
    assert first["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.mark.table  # in threads: tests/faults/test_rl_faults.py
def test_rollouts_alone(task: Path) -> None:
    run = task / "only"
    weft(command(task, run, "train.steps=4", "--rollout-only"))
    assert sorted(rollout_files(run / FOLDER)) == [1, 2] and not (run / "checkpoints").exists()
    shown = weft([*WEFT, "rollouts", str(run), "--groups", "1"])
    assert "step 2: 4 prompts, 16 samples" in shown and "reward" in shown


def test_a_trainer_rank_that_is_killed_is_named(task: Path) -> None:
    run = task / "killed"
    words = command(task, run, "train.steps=400", "checkpoint.every=2", "--nproc", "2")
    with begun(words, run) as process:
        actors = [child for child in psutil.Process(process.pid).children(recursive=True) if _is_rank(child, "1")]
        assert len(actors) == 1
        actors[0].send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=60 * business())
    assert process.returncode == 10, out
    assert "trainer rank 1 died" in out
    assert f"The last complete checkpoint is {run}/checkpoints/step-" in out and f"is in {run}/flight" in out


@contextmanager
def begun(words: Sequence[str], run: Path) -> Iterator[subprocess.Popen[str]]:
    """A program, from its first checkpoint on. What is left of it is killed."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = forked.environment(**VARIABLES)
    with subprocess.Popen(words, text=True, env=env, start_new_session=True, **pipes) as process:
        try:
            until_checkpoint(run, lambda: process.poll() is None)
            yield process
        finally:
            process.kill()


def until_checkpoint(run: Path, is_alive: Callable[[], bool]) -> None:
    end = time.monotonic() + 120 * business()
    while not (run / "checkpoints/latest").exists():
        assert is_alive() and time.monotonic() < end
        time.sleep(0.01)


def still_there(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended within seconds. Ray's agents take up to a minute: they want to tell a store of it."""
    _, alive = psutil.wait_procs([process for process in processes if not _is_agent(process)], timeout=20 * business())
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _is_agent(process: psutil.Process) -> bool:
    try:
        return "agent" in " ".join(process.cmdline()).lower()
    except psutil.Error:
        return False


def _is_rank(process: psutil.Process, rank: str) -> bool:
    try:
        return process.environ().get("RANK") == rank and "ray::" in " ".join(process.cmdline())
    except psutil.Error:
        return False


# A cell of a notebook, where a loop runs already, with a reward of its own; there is no `if __name__ == "__main__"`.
CELL = """
import asyncio, json, weft

SHARE = 0.5

def digits(completions, completion, **columns):
    return [SHARE * (text[:1] == right[0]) for text, right in zip(completions, completion)]

async def cell():
    rows, seen = [json.loads(line) for line in open("additions.jsonl")], []
    run = weft.rl(
        "keys.yaml", model="adder", data={"rows": rows, "columns": {}}, reward=[digits, "length"],
        on_step=lambda line: seen.append(line["step"]), run={"dir": "epochs"}, rl={"epochs": 2}, train={"steps": 4},
    )
    assert seen == [line["step"] for line in run.metrics] == [1, 2, 3, 4] and len(run.rollouts) == 1

asyncio.run(cell())
"""


@pytest.mark.covers("rl.epochs")
def test_samples_may_be_trained_more_than_once_and_from_python(task: Path) -> None:
    """Two epochs over a rollout step: ratios leave 1 in the second. The engine takes turns with the trainer, all of
    whose parts sleep meanwhile."""
    run = task / "epochs"
    shared = ["rollout.engine=hf", "cluster.offload_during_rollout=[parameters, optimizer, gradients]"]
    keys = [word.replace("=", ": ", 1) for word in [*KEYS, *shared]]
    (task / "keys.yaml").write_text("\n".join(["model.path: adder", f"cluster.address: {cluster()}", *keys]) + "\n")
    (task / "cell.py").write_text(CELL)
    done = forked.run(partial(forked.script, ["cell.py"]), task, **VARIABLES)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [sample for group in read_rollouts(rollout_files(run / FOLDER)[1]) for sample in group.samples]
    assert {sample.rewards["digits"] for sample in samples} <= {0.0, 0.5}
    lines = lines_of(run)
    assert "rewards/digits/mean" in lines[-1]
    assert [line["epoch"] for line in lines] == [1, 1, 2, 2] and {line["rollout"] for line in lines} == {1}
    assert lines[0]["policy/kl_old"] == 0 and lines[3]["policy/kl_old"] > 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"seconds/sleep", "seconds/wake", "seconds/sync"} <= last.keys()
    assert "\n  placement: colocated\n" in (run / "config.yaml").read_text()


@pytest.mark.covers("reference.ranks", "critic.ranks", "cluster.devices")
def test_a_reference_and_a_critic_with_ranks_of_their_own(task: Path) -> None:
    """The losses, values and weights of the trainer's own; a step of which not all is whole is none."""
    keys = ["rl.algorithm=ppo", "rl.minibatches=1", "rl.epochs=1", "rl.kl_coef=0.1", "critic.lr=1e-3", "train.steps=3"]
    keys += ["checkpoint.every=1", "checkpoint.keep=1", "rl.on_policy=exact"]
    shared, separate = task / "together", task / "own"
    weft(command(task, shared, *keys))
    printed = weft(command(task, separate, *keys, "reference.ranks=1", "critic.ranks=1"))
    assert printed.count("on 1 separate rank") == 2
    for separate_line, shared_line in zip(lines_of(separate), lines_of(shared), strict=True):
        for name in ("loss", "grad_norm", "loss/value_avg", "critic/grad_norm"):
            assert separate_line[name] == shared_line[name], name
    critic = load_file(separate / "critic/checkpoints/latest/model.safetensors")
    for name, value in load_file(shared / "checkpoints/latest/critic/model.safetensors").items():
        assert torch.equal(value, critic[name])
    # On listed devices that overlap, in turns, with engines of their own: every metric is the same.
    devices = ["rollout.engine=hf", "cluster.devices={trainer: [0], rollout: 0-1, reference: [1], critic: [1]}"]
    devices += ["cluster.offload_during_rollout=[parameters, optimizer, gradients]"]
    printed = weft(command(task, task / "lists", *keys, *devices))
    assert "devices  1: rollout, reference, critic, alternating" in printed and printed.count("; on devices 1") == 2
    for listed_line, shared_line in zip(lines_of(task / "lists"), lines_of(shared), strict=True):
        differing = {name for name, value in shared_line.items() if listed_line[name] != value}
        assert {name for name in differing if not name.startswith(("time/", "seconds", "sync/"))} <= set(CLOCKS)
    shutil.rmtree(separate / "critic/checkpoints/step-000003")  # as if it had been killed in between
    assert "resumed  step 2 of 3" in weft([*WEFT, "rl", "--resume", str(separate), "critic.ranks=null"])
    assert all(torch.equal(value, weights(separate)[name]) for name, value in weights(shared).items())


@pytest.mark.covers("cluster.address", "cluster.trainer_ranks")
def test_a_cluster_that_is_not_there_is_named(task: Path) -> None:
    out = weft(command(task, task / "nowhere", "train.steps=2", "cluster.address=127.0.0.1:1"), status=2)
    assert "cluster.address: no Ray cluster at 127.0.0.1:1" in out
    out = weft(command(task, task / "large", "train.steps=2", "cluster.trainer_ranks=2", "mesh.dp_shard=3"), status=2)
    assert "mesh.dp_shard" in out
