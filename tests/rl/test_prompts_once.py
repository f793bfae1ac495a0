"""A run of `weft rl` that forwards each prompt once is the run that forwards it for every answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.local_rl import lines_of, make_task, rollouts_of, start
from weft.engine.batch.rows import Row, RowBuilder

ROUTED = {
    "grpo": ("rl.algorithm=grpo", "rl.kl_coef=0.1"),
    "gspo": ("rl.algorithm=gspo",),
    "ppo": ("rl.algorithm=ppo", "rl.kl_coef=0.1", "critic.head=normal", "critic.lr=1e-3"),
}
KEYS = ("rl.group_size=4", "step.max_tokens_per_device=128", "train.epochs=1", "rl.kl_coef=0.1", "rl.epochs=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("prompts")
    task = make_task(folder)
    for share in ("auto", "off"):
        start(task, folder / share, *KEYS, f"step.share_prefixes={share}")
    return {share: folder / share for share in ("auto", "off")}


def test_rewards_are_the_same_and_losses_to_rounding(runs: dict[str, Path]) -> None:
    check(runs, 0.95)


def with_experts(task: Path) -> None:
    """Turns the model of the task into one with experts, which is yet to be drawn."""
    file = task / "adder/config.json"
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "mlp_only_layers": []}
    name = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes | layers | name))


@pytest.mark.table
@pytest.mark.parametrize("algorithm", ROUTED)
def test_with_replayed_experts(algorithm: str, tmp_path: Path) -> None:
    """The update's rows are trees and replay experts."""
    rows, build = dict[str, list[tuple[bool, bool]]](auto=[], off=[]), RowBuilder._build
    task = make_task(tmp_path)
    with_experts(task)
    for share, layouts in rows.items():

        def noted(self: RowBuilder, *args: Any, layouts: list[tuple[bool, bool]] = layouts) -> Row:
            row = build(self, *args)
            layouts.append((row.bounds.segments is not None, row.routes is not None))
            return row

        with mock.patch.object(RowBuilder, "_build", noted):
            start(task, tmp_path / share, *KEYS, *ROUTED[algorithm], f"step.share_prefixes={share}")
    assert (True, True) in rows["auto"] and not any(trees for trees, _ in rows["off"])
    assert any(routed for _, routed in rows["off"])
    check({share: tmp_path / share for share in rows}, 0.6)


def check(runs: dict[str, Path], max_share: float) -> None:
    """most: tokens forwarded, of those that are forwarded for every answer."""
    rollouts = {share: rollouts_of(run) for share, run in runs.items()}
    rollout_figures: dict[str, list[Any]] = {
        share: [(row["tokens"], row["reward"]) for rows in steps.values() for row in rows]
        for share, steps in rollouts.items()
    }
    assert rollout_figures["auto"] == rollout_figures["off"]
    trees, separate = (lines_of(runs[share]) for share in ("auto", "off"))
    assert len(trees) == len(separate) > 2
    for line, separate_line in zip(trees, separate, strict=True):
        assert line["tokens"] == separate_line["tokens"]
        assert line["tokens_forwarded"] < max_share * separate_line["tokens_forwarded"]
        assert line["loss"] == pytest.approx(separate_line["loss"], rel=1e-4, abs=1e-6)
        assert line["grad_norm"] == pytest.approx(separate_line["grad_norm"], rel=1e-3, abs=1e-6)
