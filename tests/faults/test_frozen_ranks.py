"""Runs whose reference or teacher has ranks of its own: one of these is killed, and a signal ends all; both go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.test_dpo_parity import folder, models
from tests.recipes import test_distill
from tests.recipes.test_distill import lines, weights
from tests.support.faults import Fault, FaultRun
from tests.support.pool import run
from weft.checkpoint.retention import complete_steps, step_folder
from weft.checkpoint.state import check_contents, read_state
from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.load import load_config
from weft.launch.options import TrainOptions
from weft.recipes import distill, dpo

STEPS = 6
WORDS = [*test_distill.WORDS, f"train.steps={STEPS}", "step.documents=3", "track.timing=false", "track.system=false"]
# command -> (schema, words, key of the ranks, phase of a reading, role in it)
CASES: dict[str, tuple[Any, list[str], str, str, str]] = {
    "dpo": (
        DpoConfig, [f"model.path={models('llama')[0]}", f"data.path={folder() / 'pairs.jsonl'}", "optimizer.lr=0.05",
                    "preference.cache=off"],
        "reference.ranks", "logprobs", "the reference",
    ),
    "distill": (
        DistillConfig, [f"model.path={test_distill.home()}/student", f"data.path={test_distill.home()}/a.jsonl",
                        f"distill.teacher={test_distill.home()}/wide", "optimizer.lr=0.05"],
        "teacher.ranks", "readout", "the teacher",
    ),
}  # fmt: skip


def in_turns(config: Any) -> None:
    (dpo if isinstance(config, DpoConfig) else distill).run(config, TrainOptions(device="cpu", quiet=True))


@pytest.mark.parametrize("command", ["dpo", pytest.param("distill", marks=pytest.mark.table)])
def test_a_frozen_rank_is_killed_and_a_signal_ends_both_sides(command: str, tmp_path: Path) -> None:
    """Either ends the run by name with a whole checkpoint. What is resumed twice is the unbroken run in turns."""
    schema, required, key, phase, role = CASES[command]
    words, path = [*required, *WORDS], tmp_path / "apart"
    killed = FaultRun(
        [command, *words, f"{key}=1", f"run.dir={path}", "--nproc", "2", "--device", "cpu"], tmp_path,
        Fault(do="kill", rank=1, phase=phase, step=0, role=role, nth=4),
    ).wait()  # fmt: skip
    assert killed.status == 10, killed.errors()
    assert "rank 1 was killed by SIGKILL" in killed.errors() and role in killed.errors(), killed.errors()
    first = check_last(path)
    resumed = [command, "--resume", str(path), "--device", "cpu"]
    stopped = FaultRun(resumed, tmp_path, Fault(do="terminate the launcher", phase="forward", step=STEPS - 1)).wait()
    assert stopped.status == 143 and "stopped" in stopped.output(), stopped.errors() + stopped.output()
    assert first < check_last(path) < STEPS
    ended = FaultRun(resumed, tmp_path).wait()
    assert ended.status == 0, ended.errors()
    run(1, in_turns, load_config([], [*words, f"run.dir={tmp_path}/turns"], schema))
    figures = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in lines(tmp_path / name)]
        for name in ("apart", "turns")
    ]
    assert figures[0] == figures[1] and len(figures[0]) == STEPS
    unbroken = weights(tmp_path / "turns", STEPS)
    assert all(torch.equal(weight, unbroken[name]) for name, weight in weights(path, STEPS).items())


def check_last(path: Path) -> int:
    """The step of the last checkpoint, which is whole."""
    checkpoints = path / "checkpoints"
    last = max(complete_steps(checkpoints))
    state = read_state(step_folder(checkpoints, last))
    check_contents(state, 0, 1)
    assert state.step == last
    return last
