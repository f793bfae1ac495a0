"""weft migrate of ROLL's reinforcement learning: the draft computes what ROLL computes, or says where it differs.

The right values were read off ROLL's source: roll/configs/*.py, roll/utils/functionals.py, roll/pipeline/rlvr/*.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.rl_samples import algorithm, group
from weft import cli
from weft.config import load_config
from weft.config.migrate.migrate import migrate
from weft.config.migrate.roll import DEFAULTS
from weft.config.rl_schema import RlConfig
from weft.config.yaml12 import Loader
from weft.errors import UserError
from weft.rl.advantages import advantages

WORKER = "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"
# A config whose sampling weft can do alike: a run of 16 devices, 512 samples of one optimizer step.
BASE = f"""
pretrain: Qwen/Qwen3-8B
num_gpus_per_node: 8
max_steps: 100
save_steps: 50
rollout_batch_size: 64
prompt_length: 1024
response_length: 2048
num_return_sequences_in_group: 8
rewards: {{math_rule: {{worker_cls: {WORKER}, tag_included: [deepmath_103k]}}}}
actor_infer:
  generating_args: {{temperature: 1.0, top_p: 1.0, top_k: -1}}
  strategy_args: {{strategy_name: vllm, strategy_config: {{gpu_memory_utilization: 0.8}}}}
  device_mapping: list(range(0,16))
actor_train:
  model_args: {{disable_gradient_checkpointing: false, dtype: bf16}}
  training_args: {{learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1,
                   gradient_accumulation_steps: 32, warmup_steps: 20}}
  data_args: {{file_name: data/math.jsonl, messages: messages}}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {{fsdp_size: 16, param_dtype: bf16, reduce_dtype: float32, reshard_after_forward: true}}
  device_mapping: list(range(0,16))
"""
# Every key of `rl` that defines the algorithm, as ROLL's defaults have it beside adv_estimator: grpo.
GRPO: dict[str, Any] = {
    "reward": ["math"], "algorithm": "grpo", "advantage": "grpo", "advantage_norm": "group", "policy_loss": "ppo",
    "clip": [0.2, 0.2], "dual_clip": None, "loss_aggregation": "sequence_mean", "kl_coef": 0.0, "entropy_coef": 0,
    "old_logprobs": "recompute", "correction": "none", "dynamic_sampling": 0, "mask_truncated": False,
    "overlong_buffer": None, "prompts_per_step": 64, "group_size": 8, "minibatches": 1, "epochs": 1, "chat": False,
}  # fmt: skip


def drafted(tmp_path: Path, text: str, base: str = BASE) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(The draft as sections, its quantities that differ: name -> "theirs -> yours")."""
    (tmp_path / "a.yaml").write_text(base + text)
    draft = migrate([str(tmp_path / "a.yaml")])
    top = re.sub(r"\n#     ", " ", draft.partition("\nmodel:")[0])
    return yaml.load(draft, Loader), dict(re.findall(r"^#   ([^:]+): (.* -> .*)$", top, re.MULTILINE))


def lines(tmp_path: Path, text: str, base: str = BASE) -> dict[str, Any]:
    """The section `rl` of the draft."""
    return drafted(tmp_path, text, base)[0]["rl"]


# ---------------------------------------------------------------- the advantages, in numbers

REWARDS = ([1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0])
LENGTHS = ([2, 5, 3, 4], [1, 2, 6, 3], [4, 4, 2, 1])


def advantages_of_roll(keys: dict[str, Any]) -> list[list[float]]:
    """reward_norm, compute_reinforce_return and masked_whiten of roll/utils/functionals.py, for samples of one domain
    whose rewards lie on their last tokens."""
    rewards = np.array(REWARDS)
    grpo = keys["adv_estimator"] == "grpo"
    mean, std = ("group", "group") if grpo else (keys.get("norm_mean_type"), keys.get("norm_std_type"))
    means = {None: 0.0, "batch": rewards.mean(), "group": rewards.mean(1, keepdims=True)}
    deviations = {"batch": rewards.std(ddof=1), "group": rewards.std(1, ddof=1, keepdims=True)}
    normal = rewards - means[mean]
    normal = normal if std is None else normal / (deviations[std] + 1e-6)
    gamma = keys.get("gamma", 1.0)
    by_sample = [
        [reward * gamma ** (length - 1 - position) for position in range(length)]
        for reward, length in zip(normal.flatten(), itertools.chain(*LENGTHS), strict=True)
    ]
    if keys.get("whiten_advantages"):
        tokens = np.concatenate(by_sample)
        by_sample = [
            [(a - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8) for a in sample] for sample in by_sample
        ]
    return by_sample


KINDS = [None, "batch", "group"]


@pytest.mark.parametrize(
    ("estimator", "mean", "std", "whiten", "gamma"),
    [
        *itertools.product(["reinforce"], KINDS, KINDS, [True, False], [1.0]),
        *itertools.product(["reinforce"], KINDS, [None], [True, False], [0.9]),
        *itertools.product(["grpo"], [None], [None], [True, False], [1.0, 0.9]),
    ],
)
def test_advantages_are_those_of_roll_or_said_to_differ(
    tmp_path: Path, estimator: str, mean: str | None, std: str | None, whiten: bool, gamma: float
) -> None:
    keys = {"adv_estimator": estimator, "norm_mean_type": mean, "norm_std_type": std, "whiten_advantages": whiten}
    keys["gamma"] = gamma
    draft, differs = drafted(tmp_path, yaml.safe_dump(keys))
    name = draft["rl"]["advantage"]
    of_draft = {leaf: draft["rl"][leaf] for leaf in ("advantage", "advantage_norm", "gamma") if leaf in draft["rl"]}
    groups = [
        group(rewards, lengths, index) for index, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True))
    ]
    advantages(groups, algorithm(name, **of_draft))
    got = [sample.advantages[sample.sampled].tolist() for sample_group in groups for sample in sample_group.samples]  # type: ignore[index]
    if std == "group" and mean != "group" and estimator == "reinforce":
        assert "advantage" in differs  # ROLL's own code cannot do this: shapes do not fit
        return
    right = advantages_of_roll(keys)
    equal = all(np.allclose(a, b, rtol=1e-3) for a, b in zip(got, right, strict=True))
    assert equal == ("advantage" not in differs), (got, right)
    assert ("algorithm" in draft["rl"]) and (draft["rl"]["algorithm"] is None) == bool(differs)


# ---------------------------------------------------------------- one quantity after another

CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    # text beside BASE: keys of the draft's `rl` that are not as in GRPO (... : not there), quantities that differ
    "grpo": ("adv_estimator: grpo", {}, set()),
    "reinforce, whitened": (
        "adv_estimator: reinforce\nwhiten_advantages: true\ndual_clip_loss: true",
        {"algorithm": "reinforce++", "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1, "dual_clip": 1.4},
        set(),
    ),
    "reinforce of the group's mean, whitened": (
        "adv_estimator: reinforce\nwhiten_advantages: true\nnorm_mean_type: group",
        {"algorithm": "reinforce++_baseline", "advantage": "reinforce++_baseline", "advantage_norm": ...},
        set(),
    ),
    "plain reinforce": (
        "adv_estimator: reinforce",
        {"algorithm": None, "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1},
        {"advantage"},
    ),
    "reinforce of normalised groups": (
        "adv_estimator: reinforce\nnorm_mean_type: group\nnorm_std_type: group", {}, set()
    ),
    "the deviation of the batch": (
        "adv_estimator: reinforce\nnorm_mean_type: group\nnorm_std_type: batch", {"advantage_norm": "batch"}, set()
    ),
    "no deviation": ("adv_estimator: reinforce\nnorm_mean_type: group\nnorm_std_type: ~", {"advantage_norm": "none"},
        set()),
    "grpo, whitened": ("adv_estimator: grpo\nwhiten_advantages: true", {"algorithm": None}, {"advantage"}),
    "grpo, discounted": ("adv_estimator: grpo\ngamma: 0.9", {"algorithm": None}, {"advantage"}),
    "gigpo": (
        "adv_estimator: gigpo", {"algorithm": None, "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1},
        {"advantage"}
    ),
    "step_reinforce": (
        "adv_estimator: step_reinforce",
        {"algorithm": None, "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1},
        {"advantage"},
    ),
    "whitened rewards": (
        "adv_estimator: grpo\nwhiten_rewards: true", {"algorithm": None}, {"whitening of rewards"}
    ),
    "clips that are never reached": ("adv_estimator: grpo\nreward_clip: 10\nadvantage_clip: 10.0", {}, set()),
    "clips that are reached": (
        "adv_estimator: grpo\nreward_clip: 2\nadvantage_clip: 0.5",
        {"algorithm": None},
        {"clip of rewards", "clip of advantages"},
    ),
    "clip of whitened advantages": (
        "adv_estimator: reinforce\nwhiten_advantages: true\nreward_clip: 5\nadvantage_clip: 2.0",
        {"algorithm": None, "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1},
        {"clip of advantages"},
    ),
    "clip": ("adv_estimator: grpo\npg_clip: 0.1\ndual_clip_loss: true", {"clip": [0.1, 0.1], "dual_clip": 1.2}, set()),
    "clip range": (
        "adv_estimator: grpo\nuse_pg_clip_range: true\npg_clip_low: 0.2\npg_clip_high: 0.28\ndual_clip_loss: true",
        {"clip": [0.2, 0.28], "dual_clip": 1.4},
        set(),
    ),
    "clip range that is off": ("adv_estimator: grpo\npg_clip_low: 0.1\npg_clip_high: 0.3", {}, set()),
    "ratios of samples": ("adv_estimator: grpo\nimportance_sampling: seq", {"policy_loss": "gspo"}, set()),
    "token-mean": ("adv_estimator: grpo\nloss_agg_mode: token-mean", {"loss_aggregation": "token_mean"}, set()),
    "token-sum": ("adv_estimator: grpo\nloss_agg_mode: seq-mean-token-sum", {"loss_aggregation": "sequence_sum"},
        set()),
    "token-sum-norm": (
        "adv_estimator: grpo\nloss_agg_mode: seq-mean-token-sum-norm",
        {"loss_aggregation": "sequence_sum", "algorithm": None},
        {"aggregation of the loss"},
    ),
    "KL in the loss": (
        "adv_estimator: grpo\nuse_kl_loss: true\nkl_loss_coef: 0.001",
        {"kl_coef": 0.001, "kl_in": "loss", "kl_estimator": "k3", "kl_clamp": 10.0, "kl_unbiased": False},
        set(),
    ),
    "KL that is off": ("adv_estimator: grpo\nkl_loss_coef: 0.1\ninit_kl_coef: 0.1", {}, set()),
    "KL in the reward": (
        "adv_estimator: reinforce\nwhiten_advantages: true\nadd_token_level_kl: true",
        {
            "algorithm": "reinforce++", "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1, "kl_coef": 0.2,
            "kl_in": "reward", "kl_estimator": "k1", "kl_clamp": None,
        },
        set(),
    ),
    "KL in grpo's reward": (
        "adv_estimator: grpo\nadd_token_level_kl: true\ninit_kl_coef: 0.1\nkl_penalty: mse",
        {"algorithm": None, "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k2", "kl_clamp": None},
        {"advantage"},
    ),
    "an adaptive KL": (
        "adv_estimator: reinforce\nwhiten_advantages: true\nadd_token_level_kl: true\ninit_kl_coef: 0.1\ntarget_kl: 6",
        {
            "algorithm": None, "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1, "kl_coef": 0.1,
            "kl_in": "reward",
            "kl_estimator": "k1", "kl_clamp": None,
        },
        {"KL"},
    ),
    "two KLs": (
        "adv_estimator: reinforce\nwhiten_advantages: true\nadd_token_level_kl: true\nuse_kl_loss: true\n"
        "kl_loss_coef: 0.5",
        {
            "algorithm": None, "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1, "kl_coef": 0.5,
            "kl_in": "loss",
            "kl_estimator": "k3", "kl_clamp": 10.0, "kl_unbiased": False,
        },
        {"KL"},
    ),
    "TIS": (
        "adv_estimator: grpo\ntrain_infer_correction: {is_weight: {enabled: true, upper_bound: 2.0}}",
        {"correction": "tis", "correction_level": "token", "correction_limits": [0.0, 2.0]},
        set(),
    ),
    "TIS by its defaults": (
        "adv_estimator: grpo\ntrain_infer_correction: {is_weight: {enabled: true, weight_type: sequence}}",
        {"correction": "tis", "correction_level": "sequence", "correction_limits": [0.0, 1.2]},
        set(),
    ),
    "TIS that is off": (
        "adv_estimator: grpo\ntrain_infer_correction: {is_weight: {enabled: false, upper_bound: 2.0}}", {}, set()
    ),
    "filters of tokens": (
        "adv_estimator: grpo\ntrain_infer_correction: {filters: [{enabled: true, agg_type: geometric}]}",
        {"algorithm": None},
        {"filter of tokens"},
    ),
    "entropy": ("adv_estimator: grpo\nentropy_loss_coef: 0.01", {"entropy_coef": 0.01}, set()),
    "long samples": ("adv_estimator: grpo\nmax_len_mask: true", {"mask_truncated": True, "count_masked": False}, set()),
    "long samples, whitened": (
        "adv_estimator: reinforce\nwhiten_advantages: true\nmax_len_mask: true",
        {
            "algorithm": None, "advantage": "reinforce++", "advantage_norm": ..., "gamma": 1, "mask_truncated": True,
            "count_masked": False,
        },
        {"whitening with max_len_mask"},
    ),
    "difficulty": ("adv_estimator: grpo\ndifficulty_mask: true", {"algorithm": None}, {"groups by difficulty"}),
    "weights of samples": (
        "adv_estimator: grpo\nlength_loss_weight: true", {"algorithm": None}, {"weights of samples"}
    ),
    "epochs": ("adv_estimator: grpo\nppo_epochs: 2", {"epochs": 2}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_line_that_defines_the_algorithm_is_written(tmp_path: Path, name: str) -> None:
    text, changes, differing = CASES[name]
    draft, differs = drafted(tmp_path, text + "\n")
    right = {leaf: value for leaf, value in {**GRPO, **changes}.items() if value is not ...}
    assert draft["rl"] == right
    assert set(differs) == differing


@pytest.mark.parametrize("estimator", ["adv_estimator: gae\n", ""])
def test_gae_is_the_default(tmp_path: Path, estimator: str) -> None:
    """Neither lambda, whitening, aggregation nor the critic are weft's."""
    draft, differs = drafted(tmp_path, estimator)
    of_draft = {"algorithm": None, "advantage": "gae", "advantage_norm": "none", "gamma": 1, "gae_lambda": 0.95}
    assert draft["rl"] == {**GRPO, **of_draft}
    assert draft["critic"] == {"lr": 5e-5, "clip": None}
    assert set(differs) == {
        "aggregation of the critic's loss", "warmup_steps of the critic",
        "samples of an optimizer step of the critic",
    }  # fmt: skip
    text = (
        "lambd: 0.9\nvalue_clip: 0.5\nwhiten_advantages: true\nreward_pretrain: org/reward\ncritic_warmup: 5\n"
        "critic: {training_args: {learning_rate: 1.0e-5, warmup_steps: 20, gradient_accumulation_steps: 32, "
        "per_device_train_batch_size: 1}}\n"
    )
    draft, differs = drafted(tmp_path, estimator + text)
    of_draft |= {"advantage_norm": "batch", "gae_lambda": 0.9}
    assert draft["rl"] == {**GRPO, **of_draft}
    assert draft["critic"] == {"path": "org/reward", "lr": 1e-5, "clip": 0.5}
    assert set(differs) == {"aggregation of the critic's loss", "warm-up of the critic"}


VARIANTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "": ("", {"policy_loss": "reinforce", "clip": ..., "dual_clip": ...}, False),
    "vanilla": ("", {"policy_loss": "reinforce", "clip": ..., "dual_clip": ...}, False),
    "ppo": ("", {}, False),
    "cispo": ("", {"policy_loss": "cispo", "clip": [0.1, 0.1], "dual_clip": ...}, False),
    "cispo, with bounds": (
        ", cispo_epsilon_low: 1.0, cispo_epsilon_high: 3.0",
        {"policy_loss": "cispo", "clip": [1.0, 3.0], "dual_clip": ...},
        False,
    ),
    "tis": ("", {"policy_loss": "cispo", "dual_clip": ..., "algorithm": None}, True),
    "topr": ("", {"policy_loss": "cispo", "dual_clip": ..., "algorithm": None}, True),
    "kimi15": ("", {"algorithm": None}, True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_policy_gradients_of_the_worker_that_reads_them(tmp_path: Path, name: str) -> None:
    """pg_variant has an effect in ActorPGWorker alone, whose default is the plain policy gradient."""
    options, changes, differing = VARIANTS[name]
    variant = f"pg_variant: {name.partition(',')[0]}{options}" if name else "pg_variant: ~"
    worker = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
    base = BASE.replace("actor_train:\n", "actor_train:\n" + "".join(f"  {line}\n" for line in variant.split(", ")))
    draft, differs = drafted(
        tmp_path, "adv_estimator: grpo\n", base.replace("actor_train:\n", f"actor_train:\n  worker_cls: {worker}\n")
    )
    assert draft["rl"] == {leaf: value for leaf, value in {**GRPO, **changes}.items() if value is not ...}
    assert set(differs) == ({"policy loss"} if differing else set())
    assert lines(tmp_path, "adv_estimator: grpo\n", base) == GRPO  # in another worker it has none


def test_a_sum_over_tokens_keeps_the_step_that_adam_takes(tmp_path: Path) -> None:
    """weft divides the sums by the longest completion. With max_grad_norm and eps divided alike, AdamW takes the same
    step."""
    draft, _ = drafted(tmp_path, "adv_estimator: grpo\nloss_agg_mode: seq-mean-token-sum\nmax_grad_norm: 0.5\n")
    assert draft["optimizer"]["max_grad_norm"] == 0.5 / 2048 and draft["optimizer"]["eps"] == 1e-8 / 2048
    draft, _ = drafted(tmp_path, "adv_estimator: grpo\n")
    optimizer = {
        "name": "adamw",
        "lr": 1e-6,
        "weight_decay": 0,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "max_grad_norm": 1.0,
    }
    assert draft["optimizer"] == optimizer
    assert draft["schedule"] == {"name": "linear", "warmup_steps": 20, "min_lr_ratio": 0.0}


def test_sampling_that_nobody_wrote_down(tmp_path: Path) -> None:
    """ROLL's defaults are temperature 0.95, top_p 0.7 and top_k 50; its logprobs are those of the plain logits."""
    base = BASE.replace("  generating_args: {temperature: 1.0, top_p: 1.0, top_k: -1}\n", "")
    draft, differs = drafted(tmp_path, "adv_estimator: grpo\n", base)
    rollout = draft["rollout"]
    assert (rollout["temperature"], rollout["max_prompt_tokens"], rollout["max_new_tokens"]) == (0.95, 1024, 2048)
    assert "temperature of training" in differs
    if "rollout.allow_truncated" in {f"rollout.{leaf}" for leaf in rollout}:
        assert (rollout["top_p"], rollout["top_k"]) == (0.7, 50)
    else:
        assert (rollout["top_p"], rollout["top_k"]) == (1, 0) and {"top_p", "top_k"} <= set(differs)
        assert differs["top_p"].startswith("0.7 -> 1") and differs["top_k"].startswith("50 -> 0")
    hf = base.replace("strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}", "strategy_name: hf_infer")
    draft, differs = drafted(tmp_path, "adv_estimator: grpo\n", hf)
    assert (draft["rollout"]["top_p"], draft["rollout"]["top_k"]) == (0.7, 50)
    assert set(differs) == {"temperature of training"}


def test_the_longest_sample_decides(tmp_path: Path) -> None:
    """ROLL replaces generating_args.max_new_tokens by sequence_length - prompt_length."""
    base = BASE.replace("response_length: 2048", "sequence_length: 5120").replace(
        "top_k: -1", "top_k: -1, max_new_tokens: 99"
    )
    assert drafted(tmp_path, "adv_estimator: grpo\n", base)[0]["rollout"]["max_new_tokens"] == 4096


def test_a_draft_that_differs_is_refused_until_it_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text("")
    Path("a.yaml").write_text(BASE + "adv_estimator: reinforce\nwhiten_advantages: true\nadvantage_clip: 2.0\n")
    assert cli.main(["migrate", "a.yaml"]) == 0
    printed = capsys.readouterr()
    assert "1 quantity differs (clip of advantages)" in printed.err
    Path("mine.yaml").write_text(printed.out)
    overrides = ["model.path=org/m", "data.path=d.jsonl"]
    with pytest.raises(UserError, match=r"mine.yaml:\d+: rl.algorithm must be one of"):
        load_config(["mine.yaml"], overrides, RlConfig)
    assert "algorithm: null  # CONFIRM: write reinforce++, the nearest" in printed.out
    config = load_config(["mine.yaml"], [*overrides, "rl.algorithm=reinforce++"], RlConfig)
    assert (config.rl.advantage, config.rl.loss_aggregation, config.rl.dual_clip) == (
        "reinforce++",
        "sequence_mean",
        None,
    )
    table = printed.out.partition("# Theirs -> yours, for the quantities of the algorithm (ROLL -> weft):\n")[2]
    assert "# ! clip of advantages" in table and "#   KL " in table and table.count(" -> ") >= 20


def test_updates_that_are_not_known_are_not_one(tmp_path: Path) -> None:
    """With a batch that does not divide the samples of a rollout step, weft's default of 1 would be another run."""
    base = BASE.replace("gradient_accumulation_steps: 32", "gradient_accumulation_steps: 24")
    draft, _ = drafted(tmp_path, "adv_estimator: grpo\n", base)
    assert (
        draft["rl"]["minibatches"] is None and draft["train"]["steps"] is None and draft["checkpoint"]["every"] is None
    )


def test_rewards_that_weft_does_not_have_are_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all domains would go to the one that is known, and train on it."""
    base = BASE.replace(
        f"{{math_rule: {{worker_cls: {WORKER}, tag_included: [deepmath_103k]}}}}",
        f"{{math_rule: {{worker_cls: {WORKER}, tag_included: [deepmath_103k]}}, code: {{worker_cls: a.b.CodeWorker, "
        "tag_included: [KodCode]}}",
    )
    draft, differs = drafted(tmp_path, "adv_estimator: reinforce\nwhiten_advantages: true\n", base)
    assert draft["rl"]["reward"] == ["math", "my_rewards:code"] and draft["rl"]["reward_column"] == "domain"
    assert set(differs) == {"mean and deviation of a batch"}  # ROLL whitens each domain by itself
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text("")
    overrides = ["model.path=org/m", "data.path=d.jsonl", "rl.algorithm=reinforce++"]
    Path("mine.yaml").write_text(migrate(["a.yaml"]))
    with pytest.raises(UserError, match="rl.reward: there is no module my_rewards"):
        load_config(["mine.yaml"], overrides, RlConfig)


@pytest.mark.parametrize(
    ("train", "engines", "placement", "count"),
    [
        ("0,16", "0,16", "colocated", 16), ("0,16", "0,12", "colocated", 12), ("0,12", "12,16", "disaggregated", 4),
        ("0,12", "4,16", None, 12), ("8,16", "0,16", None, 16),
    ],
)  # fmt: skip
def test_devices_that_overlap_in_part(
    tmp_path: Path, train: str, engines: str, placement: str | None, count: int
) -> None:
    """Engines on some devices of the trainers and some others cannot be placed so: it would be another number."""
    first, last = (part.strip() for part in BASE.split("device_mapping: list(range(0,16))", 2)[:2])
    base = f"{first}\n  device_mapping: list(range({engines}))\n{last}\n  device_mapping: list(range({train}))\n"
    draft, differs = drafted(tmp_path, "adv_estimator: grpo\n", base)
    assert draft["cluster"]["placement"] == placement and draft["rollout"]["num_engines"] == count
    assert ("devices" in differs) == (placement is None)


def test_devices_that_overlap_are_named_with_who_wants_them(tmp_path: Path) -> None:
    """Engines that are servers have devices of trainers, or none of them. Other lists are carried over."""
    first, last = (part.strip() for part in BASE.split("device_mapping: list(range(0,16))", 2)[:2])
    base = f"{first}\n  device_mapping: list(range(4,16))\n{last}\n  device_mapping: list(range(0,12))\n"
    message = "trainers on 0-11, engines on 4-15: 16 in all, of which both use 4-11 ->"
    draft, differs = drafted(tmp_path, "adv_estimator: grpo\n", base)
    assert differs["devices"].startswith(message) and draft["rollout"]["num_engines"] == 12
    assert draft["cluster"] == {"trainer_ranks": 12, "placement": None}
    draft, differs = drafted(
        tmp_path, "adv_estimator: grpo\n", base.replace("strategy_name: vllm", "strategy_name: hf_infer")
    )
    assert "devices" not in differs and "num_engines" not in draft["rollout"]
    assert draft["cluster"] == {"devices": {"trainer": "0-11", "rollout": "4-15"}}
    separate = f"{first}\n  device_mapping: list(range(12,16))\n{last}\n  device_mapping: list(range(0,12))\n"
    reference = "reference: {device_mapping: 'list(range(14,18))', strategy_args: {strategy_name: fsdp2_infer}}\n"
    kl = "adv_estimator: grpo\nuse_kl_loss: true\nkl_loss_coef: 0.1\n"
    with_hf = separate.replace("strategy_name: vllm", "strategy_name: hf_infer")
    draft, _ = drafted(tmp_path, kl + reference, with_hf)
    lists = {"trainer": "0-11", "rollout": "12-15", "reference": "14-17"}
    assert draft["cluster"] == {"devices": lists} and "reference" not in draft
    _, differs = drafted(tmp_path, kl + reference, separate)
    assert (
        differs["devices of engines and reference"]
        == "both on 14-15 -> 4 for engines and 4 separate ones for reference"
    )


REFERENCE = """
use_kl_loss: true
kl_loss_coef: 0.001
adv_estimator: grpo
reference:
  model_args: {{dtype: bf16, disable_gradient_checkpointing: true}}
  strategy_args:
    strategy_name: fsdp2_infer
    strategy_config: {{fsdp_size: {size}, param_dtype: {dtype}, offload_policy: {offload}}}
  device_mapping: {devices}
"""


@pytest.mark.parametrize(
    ("size", "dtype", "offload", "devices", "expected"),
    [
        (4, "bf16", "false", "list(range(0,8))",
         {"param_dtype": "bf16", "dp_replicate": 2, "dp_shard": 4, "cpu_offload": False}),
        (16, "fp16", "true", "list(range(0,16))",
         {"param_dtype": "fp16", "dp_replicate": 1, "dp_shard": 16, "cpu_offload": True}),
        (1, "float32", "false", "list(range(0,16))",
         {"param_dtype": "fp32", "dp_replicate": 1, "dp_shard": 16, "cpu_offload": False}),
        (2, "bf16", "false", "list(range(16,20))",
         {"param_dtype": "bf16", "ranks": 4, "dp_replicate": 2, "dp_shard": 2, "cpu_offload": False}),
    ],
)  # fmt: skip
def test_the_strategy_of_the_reference(
    tmp_path: Path, size: int, dtype: str, offload: str, devices: str, expected: dict[str, Any]
) -> None:
    text = REFERENCE.format(size=size, dtype=dtype, offload=offload, devices=devices)
    assert drafted(tmp_path, text)[0]["reference"] == expected


def test_the_strategy_of_the_critic(tmp_path: Path) -> None:
    critic = (
        "critic: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 8, offload_policy: true}}, "
        "device_mapping: 'list(range(0,16))'}\n"
    )
    draft, _ = drafted(tmp_path, "adv_estimator: gae\n" + critic)
    assert draft["critic"] == {
        "lr": 5e-5, "clip": None, "dp_replicate": 2, "dp_shard": 8, "cpu_offload": True
    }  # fmt: skip


BESIDE: dict[str, dict[str, Any]] = {  # name -> what else has to be set, so that it has an effect
    "lambd": {"adv_estimator": "gae"},
    "value_clip": {"adv_estimator": "gae"},
    "reward_pretrain": {"adv_estimator": "gae"},
    "critic.model_args.model_name_or_path": {"adv_estimator": "gae"},
    "critic_warmup": {"adv_estimator": "gae"},
    "norm_mean_type": {"adv_estimator": "reinforce"},
    "norm_std_type": {"adv_estimator": "reinforce", "norm_mean_type": "group"},
    "pg_clip_low": {"use_pg_clip_range": True},
    "pg_clip_high": {"use_pg_clip_range": True},
    "use_pg_clip_range": {"pg_clip_low": 0.1},
    "difficulty_low_threshold": {"difficulty_mask": True},
    "difficulty_high_threshold": {"difficulty_mask": True},
    "use_kl_loss": {"kl_loss_coef": 0.1},
    "kl_loss_coef": {"use_kl_loss": True},
    "init_kl_coef": {"add_token_level_kl": True},
    "kl_penalty": {"add_token_level_kl": True},
    "target_kl": {"add_token_level_kl": True},
    **{
        f"train_infer_correction.is_weight.{leaf}": {"train_infer_correction.is_weight.enabled": True}
        for leaf in ("weight_type", "upper_bound", "detach")
    },
    **{
        f"actor_train.{leaf}": {"actor_train.worker_cls": "a.ActorPGWorker", "actor_train.pg_variant": variant}
        for variant, ends in {"tis": ("tis_lower_bound", "tis_upper_bound"),
                              "cispo": ("cispo_epsilon_low", "cispo_epsilon_high")}.items()
        for leaf in ends
    },
    "actor_train.pg_variant": {"actor_train.worker_cls": "a.ActorPGWorker"},
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "norm_mean_type": "group", "norm_std_type": "group", "importance_sampling": "seq", "reward_pretrain": "org/b",
    "critic.model_args.model_name_or_path": "org/c", "actor_train.worker_cls": "a.ActorPGWorker",
    "train_infer_correction.filters": [{"enabled": True}],
}  # fmt: skip
NOT_READ = ("kl_horizon", "error_max_len_threshold", "actor_infer.generating_args.num_return_sequences")


@pytest.mark.parametrize("name", sorted({*DEFAULTS} - {*NOT_READ}))
def test_no_name_of_the_algorithm_is_lost(tmp_path: Path, name: str) -> None:
    """A value that is not ROLL's default changes a line of the draft, or what differs."""
    default = DEFAULTS[name]
    changed = OTHERS.get(name, {bool: not default, float: 0.5, int: 3, str: "else"}.get(type(default), 0.5))

    def draft(**options: Any) -> list[str]:
        tree: Any = yaml.safe_load(BASE + "adv_estimator: grpo\nvalidation: {data_args: {file_name: v.jsonl}}\n")
        for key, value in options.items():
            inside = tree
            *sections, leaf = key.split(".")
            for section in sections:
                inside = inside.setdefault(section, {})
            inside[leaf] = value
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
        text = migrate([str(tmp_path / "a.yaml")]).partition("# Not converted")[0]
        return [line.partition("  # ")[0] for line in text.splitlines()]

    companions = BESIDE.get(name, {})
    assert draft(**companions, **{name: changed}) != draft(**companions)
