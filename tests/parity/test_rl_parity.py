"""`weft verify` of reinforcement learning: on any mesh the updates are those of plain PyTorch in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.parallel.test_kept_bases import SOURCES
from tests.support.cases import MESHES, describe, saved_model, world_of
from tests.support.pool import run
from tests.support.rl_samples import group
from tests.support.toy_tokenizers import byte_tokenizer
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.engine.batch.rows import Row, RowBuilder
from weft.errors import UserError
from weft.inference.records import write_rollouts
from weft.parallel.tp import divide
from weft.rl.trainer import TrainerRank
from weft.verify.harness import Verdict
from weft.verify.plants import planted
from weft.verify.rl_harness import verify_rl
from weft.verify.rl_rollouts import recorded_rollouts

KEYS = (
    "data.path=owner/data", "rl.reward=[length]", "rollout.temperature=0.7", "rollout.max_new_tokens=20",
    "rollout.max_prompt_tokens=30", "optimizer.eps=1e-5", "optimizer.lr=1e-3", "train.timeout=300",
)  # fmt: skip


@cache
def model(family: str, mesh: str = "1") -> str:
    two_stages = "pp_schedule" in MESHES[mesh]  # stages on each rank
    path = saved_model(family, **({"num_hidden_layers": 4} if two_stages else {}))
    byte_tokenizer().save_pretrained(path)  # nothing is tokenised
    return path


def config_of(path: str, mesh: str, *keys: str) -> RlConfig:
    sizes = [f"mesh.{axis}={size}" for axis, size in MESHES[mesh].items()]
    return load_config([], [f"model.path={path}", *KEYS, *sizes, *keys], RlConfig)


def verdict_of(plant: str | None, path: str, mesh: str, keys: tuple[str, ...]) -> Verdict | None:
    with planted(plant):
        return verify_rl(TrainerRank(config_of(path, mesh, *keys), "cpu"), 1e-3)


def verdict_on_trees(path: str, mesh: str, keys: tuple[str, ...]) -> tuple[Verdict | None, set[tuple[bool, bool]]]:
    """(The verdict, (whether a row of this rank has trees, whether it replays experts) of each)."""
    layouts, build = set[tuple[bool, bool]](), RowBuilder._build

    def noted(self: RowBuilder, *args: Any) -> Row:
        row = build(self, *args)
        layouts.add((row.bounds.segments is not None, row.routes is not None))
        return row

    with mock.patch.object(RowBuilder, "_build", noted):
        return verdict_of(None, path, mesh, keys), layouts


PPO = (
    "rl.algorithm=ppo", "rl.kl_coef=0.1", "rl.kl_in=reward", "rl.gamma=0.95", "rl.gae_lambda=0.9", "critic.head=normal",
    "critic.lr=1e-3", "rl.dual_clip=1.5", "critic.max_tokens_per_device=61",
)  # fmt: skip
CASES = [
    ("llama", "1", ()),  # the update reads the old policy itself
    ("llama", "2", ("rl.kl_coef=0.05", "rl.entropy_coef=0.01", "rl.minibatches=2", "rl.mask_truncated=true")),
    pytest.param("llama", "2x2", PPO, marks=pytest.mark.table),
    pytest.param("qwen3_moe", "2", ("rl.algorithm=gspo", "rl.epochs=2"), marks=pytest.mark.table),
    ("llama", "2", ("rl.algorithm=cispo", "rl.epochs=2", "rl.correction=icepop", "lora.rank=4", "lora.base=int8",
                    "rl.kl_coef=0.1", "rl.kl_estimator=k1", "rl.kl_unbiased=true", "optimizer.name=sgd",
                    "optimizer.eps=null")),
    # Of algorithms on one rank tests/parity/test_policy_parity.py has the losses and gradients.
    pytest.param("llama", "1", ("rl.algorithm=rloo", "rl.old_logprobs=rollout", "rl.kl_coef=0.1", "rl.kl_in=reward"),
                 marks=pytest.mark.table),
    ("llama", "2", ("rl.epochs=2", "rl.mask_truncated=true", "rl.count_masked=true", "rl.kl_coef=0.1",
        "rl.kl_clamp=0.001", "rl.teacher=TEACHER", "rl.teacher_in=advantage", "rl.teacher_coef=0.3",
                    "rl.entropy_coef=0.1", "rl.entropy_aggregation=token_mean", "rl.dual_clip=3")),
    ("llama", "1", ("rl.preset=trl", "rl.algorithm=rloo", "rl.epochs=2", "rl.entropy_coef=0.1",
                    "rl.entropy_aggregation=sequence_mean")),
    ("llama", "1", ("rl.algorithm=reinforce++", "rl.epochs=2", "rl.correction=mis", "rl.correction_level=sequence")),
    pytest.param("llama", "1", ("rl.algorithm=reinforce++_baseline", "rl.epochs=2", "rl.policy_loss=reinforce",
                                "rl.kl_coef=0.1", "rl.kl_in=reward"), marks=pytest.mark.table),
    ("qwen3", "tp2", ("rl.kl_coef=0.05", "rl.entropy_coef=0.01", "rl.minibatches=2", "rl.teacher=TEACHER",
                      "rl.teacher_divergence=jsd", "rl.teacher_beta=0.3")),
    ("llama", "tp2", PPO),
    pytest.param("qwen3", "cp2", ("rl.kl_coef=0.05", "rl.entropy_coef=0.01", "rl.minibatches=2"),
                 marks=pytest.mark.table),
    ("llama", "cp2u2", PPO),
    pytest.param("qwen3_moe", "2xcp2", ("rl.algorithm=gspo", "rl.epochs=2"), marks=pytest.mark.table),
    ("llama", "cp2xtp2", ("rl.epochs=2", "rl.correction=icepop", "rl.correction_level=sequence",
                          "rl.entropy_coef=0.1", "rl.entropy_aggregation=sequence_mean")),
    pytest.param("qwen3_moe", "2xtp2", ("rl.algorithm=gspo", "rl.epochs=2"), marks=pytest.mark.table),
    ("qwen3_moe", "ep2", ("rl.algorithm=gspo", "rl.epochs=2", "rl.kl_coef=0.1")),
    ("llama", "1", ("lora.rank=4", "lora.init=olora", "lora.base=fp8", "lora.modules_to_save=[lm_head]",
                    "optimizer.name=sgd", "optimizer.eps=null")),
    pytest.param("qwen3", "2xtp2", ("rl.epochs=2", "rl.kl_coef=0.1", "lora.rank=4", "lora.init=pissa",
                                    "lora.rslora=true", "lora.sampling=separate",
                                    "optimizer.name=sgd", "optimizer.eps=null"), marks=pytest.mark.table),
    pytest.param("llama_tied", "2xtp2", (*PPO, "reference.tp=1", "reference.dp_shard=4", "critic.dp_shard=1",
                                         "critic.tp=4"), marks=pytest.mark.table),
    ("qwen3", "pp2v", ("rl.kl_coef=0.05", "rl.entropy_coef=0.01", "rl.minibatches=2")),  # tied, both ends on one rank
    pytest.param("llama", "pp2x2", PPO, marks=pytest.mark.table),
    ("qwen3_moe", "pp2ix2", ("rl.algorithm=gspo", "rl.epochs=2", "rl.kl_coef=0.1", "model.recompute=full")),
    ("llama", "pp2", ("rl.epochs=2", "rl.correction=icepop", "lora.rank=4", "lora.base=nf4", "lora.dora=true",
                      "rl.kl_coef=0.1",
                      "optimizer.name=sgd", "optimizer.eps=null")),
    pytest.param("llama", "pp2xcp2", (), marks=pytest.mark.table),  # the update reads the old policy itself
    pytest.param("llama_tied", "2xtp2", (*PPO, "reference.pp=2", "reference.dp_shard=1", "critic.dp_shard=1",
                                         "critic.tp=1", "critic.pp=2", "critic.dp_replicate=2"),
                 marks=pytest.mark.table),
    ("llama", "pp2x2", (*PPO, "reference.pp=1", "reference.tp=2", "critic.pp=1", "critic.dp_shard=4")),
    ("phimoe", "1", ()),  # whose routers' choices are not recorded
    ("jetmoe", "1", ()),  # whose attention chooses experts, too
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh", "keys"), CASES)
def test_updates_are_those_of_one_plain_process(family: str, mesh: str, keys: tuple[str, ...]) -> None:
    keys = tuple(key.replace("TEACHER", saved_model("gemma2")) for key in keys)
    results = run(world_of(mesh), verdict_on_trees, model(family, mesh), mesh, keys)
    verdict: Verdict = results[0][0]
    assert verdict.passed, describe(verdict)
    rows = {row for _, layouts in results for row in layouts}
    assert any(trees and (replays or family != "qwen3_moe") for trees, replays in rows)
    names = {figure.name for figure in verdict.figures}
    assert "logprobs of engine and trainer" in names and "weights after 6 updates" in names
    assert ("critic: gradients, every parameter" in names) == (keys[: len(PPO)] == PPO)


@pytest.mark.table
@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_updates_over_a_base_as_it_is_on_disk(form: str, tmp_path: Path) -> None:
    """The reference is transformers' own decoding of the same files."""
    write, targets = SOURCES[form]
    path = write(tmp_path / "source")
    byte_tokenizer().save_pretrained(path)
    keys = ("lora.rank=4", f"lora.base={form}", f"lora.targets=[{','.join(targets)}]", "optimizer.name=sgd")
    verdict = run(1, verdict_of, None, str(path), "1", (*keys, "optimizer.eps=null"))[0]
    assert verdict.passed, describe(verdict)


def recorded(path: str, folder: str) -> Verdict | None:
    return verify_rl(TrainerRank(config_of(path, "1"), "cpu"), 1e-3, recorded_rollouts(folder))


def test_rollouts_of_a_run_may_be_taken(tmp_path: Path) -> None:
    groups = [group([1.0, 0.0], [4, 6]), group([0.0, None, 1.0], [5, 3, 1], index=1)]
    write_rollouts(tmp_path, 1, groups)
    verdict = run(1, recorded, model("llama"), str(tmp_path / "rollouts"))[0]
    assert verdict.passed, describe(verdict)
    assert "weights after 2 updates" in {figure.name for figure in verdict.figures}
    with pytest.raises(UserError, match="--rollouts .*: contains no rollouts"):
        recorded_rollouts(str(tmp_path))


@pytest.mark.parametrize(
    ("plant", "mesh"),
    [
        ("temperature-left-out", "1"),
        ("fillers-in-the-mean", "1"),
        ("environment-trained", "1"),
        ("replicas-apart", "2x1"),
    ],
)
def test_a_planted_bug_fails(plant: str, mesh: str) -> None:
    """Of what is read, of what is compared, of what is trained; and of the mesh."""
    verdict: Verdict = run(world_of(mesh), verdict_of, plant, model("llama"), mesh, ("rl.epochs=2",))[0]
    assert "gradients, every parameter" in verdict.failed
    assert ("readout: old logprob" in verdict.failed) == (plant == "temperature-left-out")


def without_sums(path: str, keys: tuple[str, ...]) -> Verdict | None:
    """Of what ranks of tp have alike and use for their own heads."""
    started = mock.patch("weft.engine.builder.check_division")  # which would refuse it
    compared = mock.patch("weft.engine.replicas.raise_mismatch")  # which would end it after the first update
    with started, compared, mock.patch.object(divide, "find_partial_parameters", return_value={}):
        return verify_rl(TrainerRank(config_of(path, "tp2", *keys), "cpu"), 1e-3)


def test_gradients_that_tp_does_not_complete_are_seen_in_policy_and_critic() -> None:
    verdict: Verdict = run(2, without_sums, model("qwen3"), PPO)[0]
    assert {"gradients, every parameter", "critic: gradients, every parameter"} <= set(verdict.failed)
