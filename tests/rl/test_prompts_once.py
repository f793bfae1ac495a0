"""A run of `weft rl` that forwards each prompt once is the run that forwards it for every answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.local_rl import lines_of, make_task, rollouts_of, start

KEYS = ("rl.group_size=4", "step.max_tokens_per_device=128", "train.epochs=1", "rl.kl_coef=0.1", "rl.epochs=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("prompts")
    task = make_task(folder)
    for share in ("auto", "off"):
        start(task, folder / share, *KEYS, f"step.share_prefixes={share}")
    return {share: folder / share for share in ("auto", "off")}


def test_rewards_are_the_same_and_losses_to_rounding(runs: dict[str, Path]) -> None:
    rollouts = {share: rollouts_of(run) for share, run in runs.items()}
    taken: dict[str, list[Any]] = {
        share: [(row["tokens"], row["reward"]) for rows in steps.values() for row in rows]
        for share, steps in rollouts.items()
    }
    assert taken["auto"] == taken["off"]
    trees, apart = (lines_of(runs[share]) for share in ("auto", "off"))
    assert len(trees) == len(apart) > 2
    for one, other in zip(trees, apart, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["tokens_forwarded"] < 0.95 * other["tokens_forwarded"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
