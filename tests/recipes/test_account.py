"""What is said of memory after it ran out, and the recomputation that a run takes by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft import cli
from weft.config.load import load_config
from weft.config.recompute import policy_of
from weft.config.schema import SftConfig
from weft.errors import UserError
from weft.launch.machine import ACCELERATORS, Accelerator
from weft.recipes import sft
from weft.recipes.plan.account import Situation, chosen_recompute, knobs
from weft.recipes.plan.choices import Choice

ROOT = Path(__file__).parents[2]
H100 = ACCELERATORS["h100-80gb"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def config_of(*overrides: str) -> SftConfig:
    words = ["data.path=examples/chat.jsonl", *overrides]
    return load_config(["examples/sft_qwen3_4b.yaml"], words, SftConfig, weights=False)


def test_the_cheapest_settings_save_what_they_say(checkout: Path) -> None:
    """Each saving is that of the plan with and without the setting; what costs less comes first."""
    config = config_of("model.recompute=none")
    proposals = knobs(Situation.of(config, 8, "cpu", H100))
    costs = [max(0.0, round(knob.slower, 2)) for knob in proposals]
    assert costs == sorted(costs)
    names = [knob.override.strip("'").partition("=")[0] for knob in proposals]
    assert len(names) == len(set(names)) and "step.max_tokens_per_device" in names and "model.recompute" in names
    for knob in proposals:
        if knob.override.startswith(("'model", "model", "optimizer", "fsdp")):
            changed = config_of("model.recompute=none", knob.override.strip("'"))
            sizes = []
            for variant in (config, changed):
                run = Situation.of(variant, 8, "cpu", H100)
                sizes.append(run.memory_and_seconds(Choice.of(run.model.config), 16_384)[0].fullest)
            assert sizes[0] - sizes[1] == knob.saved > 0


@pytest.mark.covers("model.recompute")
def test_auto_takes_the_least_time_of_what_fits(checkout: Path) -> None:
    chosen = []
    for gib in (200, 80, 40, 24, 1):
        policy, line = chosen_recompute(config_of("model.recompute=auto"), 8, "cpu", replace(H100, memory=gib << 30))
        chosen.append(str(policy_of(policy) or "none"))
        assert ("nothing fits" in line) == (gib == 1)
    assert chosen[0] == "none" and chosen[-1] == "full"
    assert chosen[1:4] == ["{keep: [attention], every: 2}", "selective", "{keep: [attention], every: 1}"]


def test_auto_is_named_where_nothing_chooses_it() -> None:
    with pytest.raises(UserError, match="set model.recompute to none, selective or full"):
        policy_of("auto")


def test_a_run_that_ran_out_of_memory_ends_with_the_account(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(sft, "run", run)
    original = Situation.of

    def on_h100(config: Any, world: int, device: Any, assumed: Accelerator | None = None) -> Situation:
        return original(config, 8, device, H100)

    monkeypatch.setattr(Situation, "of", staticmethod(on_h100))
    monkeypatch.setattr(cli, "check_installed", lambda *_: None)
    words = ["sft", "--nproc", "1", "--device", "cpu", f"model.path={ROOT / 'examples/models/Qwen3-4B'}"]
    words += ["data.path=examples/chat.jsonl", "step.documents=8", "model.init=random", f"run.dir={tmp_path / 'run'}"]
    assert cli.main(words) == 12
    errors = capsys.readouterr().err
    assert errors.index("OutOfMemoryError: CUDA out of memory") < errors.index("account  of the fullest rank")
    assert len(re.findall(r" saves [\d.]+ GiB, ", errors)) == 3
