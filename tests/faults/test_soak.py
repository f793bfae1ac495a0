"""Runs of `weft rl` on a real Ray whose parts are struck at random moments (`make test-soak`): they end, no sample is
lost or counted twice, and what is promised to be equal to the unbroken run is.

WEFT_SOAK_STRIKES, WEFT_SOAK_STEPS and WEFT_SOAK_SEED change how often, how long, and when; -s prints what was struck.
tests/rl/test_engine_restarts.py has a short soak in the suite, of engines in one process."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.rl.test_environments import TOKENIZER
from tests.rl.test_rl_run import WEFT, command, lines_of, task, weights
from tests.support import soak
from tests.support.cases import saved_model
from tests.support.local_rl import KEYS as LOCAL
from tests.support.local_rl import make_task, rollouts_of, start, write_teacher
from tests.support.soak import StruckPart, run_struck
from weft.inference.records import FOLDER, read_rollouts, rollout_files
from weft.inference.types import SampleGroup

__all__ = ["task"]
pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(7200)]
ENGINES = ["rollout.engine=hf", "rollout.num_engines=2"]
EXACT = [
    *ENGINES, "rl.on_policy=exact", "model.init=pretrained", "reference.ranks=1", "rl.kl_coef=0.01",
    "cluster.frozen_restarts=1000", "rl.reward=[tests.support.reward_functions:slow_length, length]",
]  # fmt: skip
LONG = [
    "rl.minibatches=1", "checkpoint.every=5", "cluster.address=null", "rollout.restarts=1000", "rollout.timeout=20",
    "train.timeout=20",
]  # fmt: skip
RESTARTS, ENGINE_COUNT = "rollout/engine_restarts", "rollout/engines"
NOT_COMPARED = (RESTARTS, ENGINE_COUNT, "critic/peak_memory_gib")
SEED = int(os.environ.get("WEFT_SOAK_SEED", "0"))


def setting(name: str, default: int) -> int:
    return int(os.environ.get(f"WEFT_SOAK_{name}", default))


def report(struck: Counter[str], began: float) -> None:
    print(f"seed {SEED}, {struck.total()} strikes in {time.monotonic() - began:.0f} s: {dict(sorted(struck.items()))}")


def groups_of(run: Path) -> dict[int, list[SampleGroup]]:
    return {step: read_rollouts(path) for step, path in rollout_files(run / FOLDER).items()}


def ids_of(groups: list[SampleGroup]) -> list[tuple[str, int]]:
    """(prompt, number) of each episode; AssertionError if one is there twice."""
    ids = [(group.prompt.id, sample.number) for group in groups for sample in group.samples if not sample.branch]
    assert len(set(ids)) == len(ids)
    return ids


def unstruck(words: list[str], run: Path) -> None:
    run_struck(words[len(WEFT) :], run, {}, 0)


def same(run: Path, unbroken: Path) -> None:
    """Both runs have the same metrics, weights and samples, with their tokens, logprobs and rewards; each sample of a
    step is there once."""
    lines, expected = [
        [{k: v for k, v in line.items() if k not in NOT_COMPARED} for line in lines_of(folder)]
        for folder in (run, unbroken)
    ]
    assert lines == expected
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(unbroken).items())
    for groups in groups_of(run).values():
        ids_of(groups)
    assert rollouts_of(run) == rollouts_of(unbroken)


def test_three_parts_that_are_struck_change_nothing(tmp_path: Path) -> None:
    """One strike each. The unbroken run is one process."""
    task = make_task(tmp_path)
    write_teacher(task / "adder", task / "written")
    keys = [*EXACT, f"model.path={task}/written", "train.steps=12", "checkpoint.every=12"]
    run, unbroken = task / "run", task / "unbroken"
    start(task, unbroken, *keys)
    words = ["rl", f"data.path={task}/additions.jsonl", *LOCAL, *keys, f"run.dir={run}"]
    parts = {
        "engine": StruckPart(("kill", "nonsense"), rest=60.0),
        "reference": StruckPart(rest=60.0),
        "reward": StruckPart(which=soak.is_reward, rest=60.0),
    }
    run_struck(words, run, parts, 3, seed=SEED, pause=0.8)
    same(run, unbroken)


def test_random_parts_that_are_struck_change_nothing(task: Path) -> None:
    """Engines (killed, stopped, answering nonsense), the reference's rank, reward processes, trainer ranks (killed,
    stopped), the controller, its cleanup process and Ray's own processes (killed), in one run under --restarts: its
    metrics, weights and samples are those of the unbroken run."""
    strikes = setting("STRIKES", 24)
    steps, model, began = setting("STEPS", 4 * strikes), task / "written", time.monotonic()
    write_teacher(task / "adder", model)
    keys = [*EXACT, *LONG, f"model.path={model}", f"train.steps={steps}", "rl.reward_timeout=15", "--nproc", "2"]
    run, unbroken = task / "parts", task / "parts-unbroken"
    unstruck(command(task, unbroken, *keys), unbroken)
    print(f"the unbroken run of {steps} steps took {time.monotonic() - began:.0f} s")
    parts = {
        "engine": StruckPart(("kill", "kill", "nonsense", "nonsense", "stop")),
        "reference": StruckPart(("kill", "kill", "kill", "stop")),
        # Twice within one call, a reward process costs a sample.
        "reward": StruckPart(("kill", "kill", "stop"), soak.is_reward, rest=30.0),
        "trainer": StruckPart(("kill", "kill", "kill", "stop"), ends=True),
        "controller": StruckPart(ends=True),
        "reaper": StruckPart(which=soak.is_reaper, rest=30.0),
        "ray": StruckPart(which=soak.is_ray, ends=True),
    }
    words = [*command(task, run, *keys)[len(WEFT) :], "--restarts", str(4 * strikes)]
    began = time.monotonic()
    out, struck = run_struck(words, run, parts, strikes, seed=SEED, pause=2.0, limit=1800.0)
    report(struck, began)
    same(run, unbroken)
    if strikes >= 24:
        assert all(any(key.startswith(name) for key in struck) for name in parts)
        assert "restart 1 of" in out and re.search(r"resumed  \S+ has no checkpoint|resumed  step \d+ of", out)


def test_kills_while_a_restart_starts_cost_restarts_alone(task: Path) -> None:
    """Ray's own processes and the controller are killed while they start, one start after the other: --restarts N are
    N restarts."""
    write_teacher(task / "adder", model := task / "started")
    keys = [*EXACT, *LONG, f"model.path={model}", "train.steps=6", "--nproc", "2"]
    run, unbroken = task / "starts", task / "starts-unbroken"
    unstruck(command(task, unbroken, *keys), unbroken)
    parts = {"controller": StruckPart(), "ray": StruckPart(("kill", "kill", "kill", "stop"), soak.is_ray)}
    words = [*command(task, run, *keys)[len(WEFT) :], "--restarts", "30"]
    out, _ = run_struck(words, run, parts, setting("START_STRIKES", 8), seed=SEED, pause=6.0, after="lock")
    assert out.count("the attempt failed at step 1 (") >= 2 and "not restarted" not in out, out
    same(run, unbroken)


def test_a_critic_with_ranks_of_its_own_that_is_struck_changes_nothing(task: Path) -> None:
    """Its checkpoints and the policy's are of the same step again."""
    write_teacher(task / "adder", model := task / "criticised")
    keys = [
        *EXACT[:-1], "rl.reward=[length]", *LONG, "checkpoint.every=2", f"model.path={model}", "train.steps=60",
        "rl.algorithm=ppo", "critic.ranks=1", "rl.epochs=1",
    ]  # fmt: skip
    run, unbroken = task / "critic", task / "critic-unbroken"
    unstruck(command(task, unbroken, *keys), unbroken)
    parts = {"reference": StruckPart(("kill", "kill", "stop"))}  # each rank of the critic or the reference
    words = [*command(task, run, *keys)[len(WEFT) :], "--restarts", "30"]
    out, _ = run_struck(words, run, parts, setting("CRITIC_STRIKES", 8), seed=SEED, pause=4.0)
    assert "critic rank 0 died" in out and "reference ranks are started again" in out, out
    same(run, unbroken)


def test_engines_that_join_and_are_struck_change_nothing(tmp_path: Path) -> None:
    """Two engines join the first in real processes; any of the three is killed, and terminated, twice: an engine that
    has joined leaves and joins again. The unbroken run is one process."""
    task = make_task(tmp_path)
    keys = [
        "rollout.engine=hf", "rl.on_policy=exact", "train.steps=80", "checkpoint.every=80", "rollout.restarts=9",
        "rl.reward=[tests.support.reward_functions:slow_length, length]",
    ]  # fmt: skip
    run, unbroken = task / "run", task / "unbroken"
    start(task, unbroken, f"model.path={task}/adder", *keys)
    words = ["rl", f"model.path={task}/adder", f"data.path={task}/additions.jsonl", *LOCAL, *keys, f"run.dir={run}"]
    words.append("cluster.engines={min: 1, max: 3}")
    parts = {"engine": StruckPart(("kill", "terminate"))}
    out, _ = run_struck(words, run, parts, 4, seed=SEED, pause=4.0, after="metrics.jsonl")
    assert "rollout engine 1 has joined" in out and "rollout engine 2 has joined" in out
    assert re.search(r"rollout engine [12] has left: \d of 1 to 3: ", out), out
    assert len({line[ENGINE_COUNT] for line in lines_of(run)}) > 1
    same(run, unbroken)


@pytest.mark.parametrize("kind", ["agent", "environment"])
def test_episodes_whose_processes_are_struck_cost_only_themselves(kind: str, task: Path, tmp_path: Path) -> None:
    """Each episode of each step is recorded once, trained or with its error; and a replay of what was recorded has the
    same losses and weights, so that training has counted no sample twice."""
    strikes, steps, began = setting("EPISODE_STRIKES", 12), setting("EPISODE_STEPS", 100), time.monotonic()
    if kind == "agent":
        shutil.copytree(saved_model("qwen3", vocab_size=len(TOKENIZER), initializer_range=0.05), tmp_path / "model")
        TOKENIZER.save_pretrained(tmp_path / "model")
        plays = ("follow", "fork", "team", "again")
        rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "play": plays[n % 4]} for n in range(16)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = [
            f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl", "rl.agent=tests.support.agents:solve",
            "rl.agent_timeout=20", "rl.reward=[]", "rl.reward_options=null", "data.columns=null",
            "rollout.max_prompt_tokens=240", "rollout.max_new_tokens=8", "step.max_tokens_per_device=1024",
        ]  # fmt: skip
    else:
        given = [
            "rl.environment=tests.support.fault_user_code:FaultyEnvironment", "rl.environment_timeout=20",
            "rl.reward=[tests.support.reward_functions:variety]", "rl.reward_options=null",
        ]  # fmt: skip
    keys = [*ENGINES, *LONG, *given, f"train.steps={steps}"]
    run = tmp_path / "run"
    parts = {
        kind: StruckPart(("kill", "kill", "kill", "stop"), soak.is_conversation),
        "fork server": StruckPart(("kill", "stop"), soak.is_fork_server, rest=20.0),
        "engine": StruckPart(("kill", "nonsense")),
    }
    words = command(task, run, *keys)[len(WEFT) :]
    _, struck = run_struck(words, run, parts, strikes, seed=SEED, pause=2.0, limit=1800.0)
    report(struck, began)
    assert any(key.startswith(kind) for key in struck)
    lines, groups = lines_of(run), groups_of(run)
    assert [line["step"] for line in lines] == sorted(groups) == list(range(1, steps + 1))
    failed = 0
    for line in lines:
        step = groups[line["step"]]
        assert len(ids_of(step)) == 16 and all(len(group.samples) >= 4 for group in step)
        errors = sum("error" in sample.notes for group in step for sample in group.samples)
        assert line["rewards/failed"] == errors
        failed += errors
    print(f"{failed} of {16 * steps} episodes failed")
    assert failed > 0
    replayed = tmp_path / "replayed"
    unstruck([*command(task, replayed, *keys), "--replay", str(run / FOLDER)], replayed)
    for line, expected in zip(lines_of(replayed), lines, strict=True):
        assert (line["loss"], line["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    assert all(torch.equal(value, weights(replayed)[name]) for name, value in weights(run).items())
