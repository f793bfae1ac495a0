"""A run that is killed and resumed is the run that was not, bit for bit; on another mesh, the same curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cases import world_of
from tests.resuming import STEPS, Sections, equal, lines, process, state_of

CASES: dict[str, tuple[str, Sections]] = {
    "1 rank, sync": ("1", {}),
    "1 rank, async, SGD": (
        "1",
        {"checkpoint": {"async_": True}, "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.1}},
    ),
    "2 ranks, async, a row for each document": (
        "2",
        {"checkpoint": {"async_": True}, "step": {"max_tokens_per_device": 48}},
    ),
    "4 ranks, sync": ("4", {}),
    "HSDP 2x2, async, bf16 masters": ("2x2", {"checkpoint": {"async_": True}, "fsdp": {"master_dtype": "bf16"}}),
}


def chain(folder: Path, mesh: str, sections: Sections, plant: str | None = None) -> list[list[float]]:
    """Ten processes: each goes on from the last checkpoint, takes one step, and is killed in the next."""
    drawn: list[list[float]] = [[] for _ in range(world_of(mesh))]
    for number in range(1, STEPS + 1):
        part = process(folder, mesh, resume=number > 1, kill_in=number + 1, sections=sections, plant=plant)
        drawn = [before + now for before, now in zip(drawn, part, strict=True)]
    return drawn


def same_run(one: Path, other: Path) -> list[str]:
    """What differs between two runs."""
    weights = [load_file(folder / "checkpoints" / "latest" / "model.safetensors") for folder in (one, other)]
    found = {
        "metrics": lines(one) == lines(other),
        "trainer state": equal(state_of(one, STEPS), state_of(other, STEPS)),
        "weights": equal(weights[0], weights[1]),
    }
    return [name for name, same in found.items() if not same]


@pytest.mark.parametrize("name", CASES)
def test_killed_after_each_step_it_is_the_unbroken_run_bit_for_bit(name: str, tmp_path: Path) -> None:
    mesh, sections = CASES[name]
    expected = process(tmp_path / "whole", mesh, sections=sections)
    drawn = chain(tmp_path / "killed", mesh, sections)
    assert same_run(tmp_path / "whole", tmp_path / "killed") == []
    assert drawn == expected
    assert len({tuple(rank) for rank in drawn}) == world_of(mesh)  # no two ranks draw the same
