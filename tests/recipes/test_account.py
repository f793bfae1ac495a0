"""What is said of memory after it ran out, and the recomputation that a run takes by itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft import cli
from weft.config.load import load_config
from weft.config.recompute import policy_of
from weft.config.schema import SftConfig
from weft.config.validate import check_config
from weft.engine.config import EngineConfig
from weft.errors import UserError
from weft.launch.machine import ACCELERATORS, Accelerator
from weft.recipes import sft
from weft.recipes.plan.account import Situation, knobs, with_chosen_recompute
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.choices import Choice
from weft.recipes.plan.machines import machine_of
from weft.recipes.plan.search import Search, search

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


CASES = {
    "recompute none": ("sft_qwen3_4b", 8, ["model.recompute=none"]),
    "tiles by themselves": ("sft_qwen3_0.6b", 1, ["step.max_tokens_per_device=65536", "mesh.dp_shard=1"]),
    "one document a row": ("sft_qwen3_8b_one_gpu", 1, ["fsdp.cpu_offload=false"]),
    "documents cut over ranks": ("sft_qwen3_4b_256k", 8, []),
    "experts and replicas": ("sft_qwen3_30b_a3b", 16, ["mesh.dp_replicate=2", "mesh.dp_shard=8"]),
    "frozen base": ("sft_llama_70b_qlora", 1, ["lora.base=compute"]),
}
_SLOW = ("recompute none", "frozen base")  # several seconds


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.table] * (case in _SLOW)) for case in CASES])
def test_each_proposal_is_taken_as_it_is_printed_and_saves_what_it_says(case: str, checkout: Path) -> None:
    """Pasted behind the same config, it is no error, and the plan of that run has so much less; what costs least time
    comes first."""
    example, world, words = CASES[case]

    def situation(*overrides: str) -> Situation:
        every = ["data.path=examples/chat.jsonl", *words, *overrides]
        config = load_config([f"examples/{example}.yaml"], every, SftConfig, weights=False)
        return Situation.from_config(config, world, "cpu", H100)

    def fullest_and_seconds(run: Situation) -> tuple[int, float]:
        budget = run.model.config.step.max_tokens_per_device
        memory, seconds = run.memory_and_seconds(Choice.from_config(run.model.config), budget)
        return memory.fullest, seconds

    run = situation()
    fullest, seconds = fullest_and_seconds(run)
    proposals = knobs(run)
    assert proposals
    costs = [max(0.0, round(knob.slower, 2)) for knob in proposals]
    assert costs == sorted(costs)
    names = [knob.override.strip("'").partition("=")[0] for knob in proposals]
    assert len(names) == len(set(names))
    for knob in proposals:
        changed, changed_seconds = fullest_and_seconds(situation(*shlex.split(knob.override)))
        assert fullest - changed == knob.saved > 0
        if "max_tokens" in knob.override:  # its documents are shorter, too
            assert knob.slower > -0.01
        else:
            assert changed_seconds / seconds - 1 == pytest.approx(knob.slower)


@pytest.mark.covers("model.recompute")
def test_auto_takes_the_least_time_of_what_fits(checkout: Path) -> None:
    chosen = []
    for gib in (200, 44, 28, 1):
        config, line = with_chosen_recompute(
            config_of("model.recompute=auto"), 8, "cpu", replace(H100, memory=gib << 30)
        )
        chosen.append(str(policy_of(config.model.recompute) or "none"))
        assert ("nothing fits" in line) == (gib == 1)
    assert chosen[0] == "none"
    assert chosen[1:3] == ["selective", "{keep: [attention], every: 1}"]


@pytest.mark.parametrize(
    ("words", "gibs"),
    [
        (["step.max_tokens_per_device=65536"], (200, 40, 20)),  # tiles, that tiled_mlp=auto takes; offload
        (["step.max_tokens_per_device=16384"], (40,)),  # tiles that it does not take by itself
        (["step.max_tokens_per_device=16384", "model.compile=true"], (40,)),
        (["step.max_tokens_per_device=16384", "model.offload_activations=inputs"], (80,)),
    ],
)
def test_auto_takes_what_the_search_proposes(words: list[str], gibs: Sequence[int], checkout: Path) -> None:
    """The settings of the same mesh that are first in `weft plan --search`; the config allows them."""
    given = ["data.path=examples/chat.jsonl", "data.max_length=null", "model.recompute=auto", "mesh.dp_shard=1", *words]
    config = load_config(["examples/sft_qwen3_0.6b.yaml"], given, SftConfig, weights=False)
    length = config.step.max_tokens_per_device
    for gib in gibs:
        small = replace(H100, memory=gib << 30)
        auto, _ = with_chosen_recompute(config, 1, "cpu", small)
        stated = replace(config, model=replace(config.model, recompute="full"))
        model = Blueprint(EngineConfig.from_config(stated), "cpu", small)
        best = search(Search(stated, model, machine_of(small), 1, [length] * 8, stated=True)).best
        assert not best[0].choice.changes(Choice.from_config(auto))
        assert not check_config(auto)
        assert all(not check_config(proposal.choice.apply(stated)) for proposal in best)


def test_auto_is_named_where_nothing_chooses_it() -> None:
    with pytest.raises(UserError, match="set model.recompute to none, selective or full"):
        policy_of("auto")


def test_a_run_that_ran_out_of_memory_ends_with_the_account(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(sft, "run", run)
    original = Situation.from_config

    def on_h100(config: Any, world: int, device: Any, assumed: Accelerator | None = None) -> Situation:
        return original(config, 8, device, H100)

    monkeypatch.setattr(Situation, "from_config", staticmethod(on_h100))
    monkeypatch.setattr(cli, "check_installed", lambda *_: None)
    words = ["sft", "--nproc", "1", "--device", "cpu", f"model.path={ROOT / 'examples/models/Qwen3-4B'}"]
    words += ["data.path=examples/chat.jsonl", "step.documents=8", "model.init=random", f"run.dir={tmp_path / 'run'}"]
    assert cli.main(words) == 12
    errors = capsys.readouterr().err
    assert errors.index("OutOfMemoryError: CUDA out of memory") < errors.index("account  of the fullest rank")
    assert len(re.findall(r" saves [\d.]+ GiB, ", errors)) == 3
