"""weft migrate of verl's and TRL's reinforcement learning: the draft computes what they compute, or says where not.

The right values were read off their sources: verl/trainer/config/*.yaml, verl/trainer/ppo/core_algos.py,
trl/trainer/grpo_config.py, trl/trainer/grpo_trainer.py. test_migrate_roll.py does the same for ROLL.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.config import load_config
from weft.config.migrate import verl
from weft.config.migrate.migrate import migrate
from weft.config.migrate.scripts import read_script
from weft.config.rl_schema import RlConfig
from weft.config.yaml12 import Loader, leaves_of

FOREIGN = Path(__file__).parents[1] / "foreign"


def drafted(file: Path, ranks: int | None = None) -> tuple[dict[str, Any], dict[str, str], str]:
    """(section.key -> value of the draft, quantities that differ: name -> "theirs -> yours", the text)."""
    text = migrate([str(file)], ranks)
    top = re.sub(r"\n#     ", " ", text.partition("\nmodel:")[0])
    sections = yaml.load(text, Loader)
    values = {f"{section}.{leaf}": value for section, keys in sections.items() for leaf, value in keys.items()}
    return values, dict(re.findall(r"^#   ([^:]+): (.* -> .*)$", top, re.MULTILINE)), text


def verl_draft(tmp_path: Path, *overrides: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """Of the script in tests/foreign with more overrides, of which the last counts."""
    script = (FOREIGN / "verl_grpo.sh").read_text().replace("$@", " ".join(overrides))
    (tmp_path / "run.sh").write_text(script)
    return drafted(tmp_path / "run.sh")


def trl_draft(tmp_path: Path, text: str, ranks: int | None = 4) -> tuple[dict[str, Any], dict[str, str], str]:
    base = yaml.safe_load((FOREIGN / "trl_grpo.yaml").read_text()) | yaml.safe_load(text)
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(base))
    return drafted(tmp_path / "grpo.yaml", ranks)


VERL = {
    "rl.advantage": "grpo", "rl.advantage_norm": "group", "rl.policy_loss": "ppo", "rl.clip": [0.2, 0.28],
    "rl.dual_clip": 3, "rl.loss_aggregation": "token_mean", "rl.kl_coef": 0.002, "rl.kl_in": "loss",
    "rl.kl_estimator": "k3", "rl.kl_clamp": 10.0, "rl.kl_unbiased": False, "rl.entropy_coef": 0,
    "rl.old_logprobs": "recompute", "rl.correction": "none", "rl.dynamic_sampling": 0, "rl.mask_truncated": False,
    "rl.prompts_per_step": 512, "rl.group_size": 5, "rl.minibatches": 4, "rl.epochs": 1, "rl.chat": False,
    "rollout.engine": "vllm", "rollout.tp": 2, "rollout.num_engines": 8, "rollout.gpu_memory_utilization": 0.6,
    "rollout.max_prompt_tokens": 512, "rollout.max_new_tokens": 1024, "rollout.temperature": 1, "rollout.top_p": 1,
    "rollout.top_k": 0, "cluster.trainer_ranks": 16, "cluster.placement": "colocated",
    "cluster.offload_during_rollout": ["optimizer"], "reference.cpu_offload": True,
    "data.columns": {"answer": "reward_model.ground_truth"}, "data.long_documents": "drop",
    "optimizer.lr": 2e-6, "optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8,
    "optimizer.max_grad_norm": 1.0, "schedule.name": "constant",
    # verl counts rollout steps, of four updates each
    "schedule.warmup_steps": 20, "checkpoint.every": 80, "eval.every": 5, "eval.at_start": True, "eval.samples": 0,
    "train.epochs": 15,
}  # fmt: skip
TRL = {
    "rl.reward": ["math"], "rl.algorithm": "grpo", "rl.advantage": "grpo", "rl.advantage_norm": "none",
    "rl.policy_loss": "ppo", "rl.clip": [0.2, 0.28], "rl.dual_clip": None, "rl.loss_aggregation": "sequence_sum",
    "rl.kl_coef": 0.01, "rl.kl_in": "loss", "rl.kl_estimator": "k3", "rl.kl_clamp": None, "rl.kl_unbiased": True,
    "rl.correction": "mis", "rl.correction_level": "sequence", "rl.correction_limits": [0, 3],
    "rl.mask_truncated": True, "rl.count_masked": True,
    # 8 a device x 8 steps of generation x 4 devices = 256 samples; an update takes 8 x 4 x 4 = 128
    "rl.prompts_per_step": 32, "rl.group_size": 8, "rl.minibatches": 2, "rl.epochs": 2,
    "rollout.engine": "vllm", "rollout.num_engines": 4, "rollout.gpu_memory_utilization": 0.4,
    "rollout.max_new_tokens": 1024, "cluster.placement": "colocated", "cluster.trainer_ranks": 4,
    "data.columns": {"answer": "solution"}, "optimizer.lr": 1e-5, "optimizer.weight_decay": 0.0,
    "schedule.name": "linear", "schedule.warmup_ratio": 0.0, "schedule.min_lr_ratio": 0.0,
    "train.steps": 400, "checkpoint.every": 50, "lora.rank": 32,
}  # fmt: skip


def test_grpo_of_verl(tmp_path: Path) -> None:
    values, differs, _ = verl_draft(tmp_path)
    assert {key: values.get(key) for key in VERL} == VERL
    assert set(differs) == {"reward", "schedule of the learning rate"}  # its warm-up is the same within four updates
    assert values["rl.algorithm"] is None  # to be confirmed


def test_grpo_of_trl(tmp_path: Path) -> None:
    values, differs, _ = trl_draft(tmp_path, "{}")
    assert {key: values.get(key) for key in TRL} == TRL
    assert not differs


@pytest.mark.parametrize(
    ("overrides", "expected", "differing"),
    [
        (["algorithm.adv_estimator=rloo"], {"rl.advantage": "rloo"}, set()),
        (["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"],
         {"rl.advantage": "reinforce++", "rl.gamma": 0.9}, set()),
        (["algorithm.adv_estimator=remax"], {"rl.advantage": "grpo"}, {"advantage"}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], {"rl.advantage_norm": "none"}, set()),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"],
         {"rl.loss_aggregation": "sequence_sum", "optimizer.eps": 1e-8 / 1024, "optimizer.max_grad_norm": 1 / 1024},
         set()),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
         {"rl.loss_aggregation": "sequence_sum"}, {"aggregation of the loss"}),
        # gspo reads no loss_agg_mode
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
         {"rl.policy_loss": "gspo", "rl.loss_aggregation": "sequence_mean"}, set()),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"], {"rl.policy_loss": "ppo"}, {"policy loss"}),
        # no ratio is below 0
        (["actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "actor_rollout_ref.actor.clip_ratio_low=10"],
         {"rl.policy_loss": "cispo", "rl.clip": [1, 0.28]}, set()),
        # clip_ratio alone changes nothing: the two others have a default
        (["actor_rollout_ref.actor.clip_ratio=0.1"], {"rl.clip": [0.2, 0.28]}, set()),
        (["actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_low=null"],
         {"rl.clip": [0.1, 0.28]}, set()),
        (["algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.use_kl_loss=False"],
         {"rl.kl_in": "reward", "rl.kl_coef": 0.001, "rl.kl_estimator": "k1", "rl.kl_clamp": None}, set()),
        (["algorithm.use_kl_in_reward=True"], {"rl.kl_in": "loss"}, {"KL"}),
        (["actor_rollout_ref.actor.kl_loss_type=k3+"], {"rl.kl_estimator": "k3"}, {"KL"}),
        (["algorithm.rollout_correction.rollout_is=sequence"],
         {"rl.correction": "tis", "rl.correction_level": "sequence", "rl.correction_limits": [0.0, 2.0]}, set()),
        (["algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=2"],
         {"rl.correction": "none"}, {"samples that are omitted"}),
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=5"], {"rl.correction_limits": [0.0, 5.0]}, set()),
        (["algorithm.rollout_correction.bypass_mode=True"], {"rl.old_logprobs": "rollout"}, set()),
        (["actor_rollout_ref.actor.ppo_epochs=2"], {"rl.epochs": 2, "checkpoint.every": 160}, set()),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=100"], {"rl.minibatches": None}, set()),
        (["actor_rollout_ref.rollout.top_p=0.9"], {"rollout.allow_truncated": True, "rollout.top_p": 0.9}, set()),
        (["actor_rollout_ref.rollout.val_kwargs.do_sample=True", "actor_rollout_ref.rollout.val_kwargs.n=4",
          "actor_rollout_ref.rollout.val_kwargs.temperature=0.6"],
         {"eval.samples": 4, "eval.temperature": 0.6}, set()),
        (["custom_reward_function.path=rewards/mine.py"], {"rl.reward": ["rewards.mine:compute_score"]}, set()),
        (["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=256"],
         {"rl.overlong_buffer": 256, "rl.overlong_penalty": 1.0}, set()),
        (["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"],
         {"rl.dynamic_sampling": 10}, set()),
        (["algorithm.adv_estimator=gae", "critic.optim.lr=1e-5", "critic.optim.weight_decay=0.1"],
         {"rl.advantage": "gae", "rl.advantage_norm": "batch", "rl.gae_lambda": 1.0, "critic.lr": 1e-5,
          "critic.clip": 0.5, "optimizer.lr": 2e-6}, {"critic's head at the start", "critic.optim.weight_decay"}),
        (["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"], {"schedule.name": "cosine"}, set()),
        (["data.train_files=\"['a/train.parquet','b/train.parquet']\""],
         {"data.sources": [
             {"name": f"{name}-train", "path": f"{name}/train.parquet",
              "columns": {"answer": "reward_model.ground_truth"}}
             for name in "ab"
          ], "rl.reward": None}, set()),
    ],
)  # fmt: skip
def test_what_settings_of_verl_mean(
    tmp_path: Path, overrides: list[str], expected: dict[str, Any], differing: set[str]
) -> None:
    values, differs, _ = verl_draft(tmp_path, *overrides)
    assert {key: values.get(key) for key in expected} == expected
    assert set(differs) - {"reward", "schedule of the learning rate"} == differing


@pytest.mark.parametrize(
    ("text", "expected", "differing"),
    [
        ("loss_type: grpo", {"rl.loss_aggregation": "sequence_mean"}, set()),
        # the tokens of a rollout step's updates are counted together
        ("loss_type: dapo", {"rl.loss_aggregation": "token_mean"}, {"aggregation of the loss"}),
        ("{loss_type: dapo, steps_per_generation: 4}", {"rl.minibatches": 1}, set()),
        ("loss_type: bnpo", {"rl.loss_aggregation": "token_mean"}, {"policy loss", "aggregation of the loss"}),
        # epsilon_high is the bound itself there, and there is no lower one
        ("{loss_type: cispo, epsilon_high: 5.0, steps_per_generation: 4}",
         {"rl.policy_loss": "cispo", "rl.clip": [1.0, 4.0]}, set()),
        ("{importance_sampling_level: sequence, loss_type: grpo}", {"rl.policy_loss": "gspo"}, set()),
        ("loss_type: sapo", {"rl.policy_loss": "sapo", "rl.loss_aggregation": "sequence_mean", "rl.clip": None}, set()),
        ("{loss_type: sapo, sapo_temperature_neg: 1.2}", {"rl.policy_loss": "sapo"}, {"policy loss"}),
        ("delta: 4.0", {"rl.dual_clip": 4}, set()),
        ("scale_rewards: batch", {"rl.advantage_norm": "batch"}, set()),
        ("scale_rewards: true", {"rl.advantage_norm": "group"}, set()),
        ("beta: 0.0", {"rl.kl_coef": 0.0}, set()),
        ("use_bias_correction_kl: false", {"rl.kl_unbiased": False}, set()),
        ("use_vllm: false", {"rollout.engine": "embedded", "rl.correction": "none"}, set()),
        ("vllm_mode: server", {"cluster.placement": "disaggregated"}, set()),
        ("{vllm_importance_sampling_mode: token_truncate, vllm_importance_sampling_cap: 2.0}",
         {"rl.correction": "tis", "rl.correction_level": "token", "rl.correction_limits": [0, 2]}, set()),
        ("{vllm_importance_sampling_mode: token_mask, vllm_importance_sampling_clip_min: 0.5}",
         {"rl.correction": "icepop", "rl.correction_limits": [0.5, 3]}, set()),
        ("vllm_importance_sampling_correction: false", {"rl.correction": "none"}, set()),
        ("generation_batch_size: 512", {"rl.prompts_per_step": 64, "rl.minibatches": 4}, set()),
        ("reward_funcs: [think_format_reward, accuracy_reward]", {"rl.reward": ["format", "math"]}, {"reward"}),
        ("reward_funcs: [my.rewards.length]", {"rl.reward": ["my.rewards:length"]}, set()),
        ("reward_funcs: org/reward-model", {"rl.reward": ["model:org/reward-model"]}, set()),
        ("max_prompt_length: 256", {"rollout.max_prompt_tokens": 256}, {"prompts that are too long"}),
        ("repetition_penalty: 1.1", {}, {"repetition_penalty"}),
        ("sync_ref_model: true", {}, {"reference"}),
        ("{top_p: 0.9, min_p: 0.05}", {"rollout.allow_truncated": True, "rollout.min_p": 0.05}, set()),
    ],
)  # fmt: skip
def test_what_settings_of_trl_mean(tmp_path: Path, text: str, expected: dict[str, Any], differing: set[str]) -> None:
    values, differs, _ = trl_draft(tmp_path, text)
    assert {key: values.get(key) for key in expected} == expected
    assert set(differs) == differing


def test_what_the_number_of_gpus_decides_is_left_open(tmp_path: Path) -> None:
    values, _, text = trl_draft(tmp_path, "{}", ranks=None)
    assert values["rl.prompts_per_step"] is None and "set --nproc" in text


def test_nothing_of_verl_is_lost_without_a_word(tmp_path: Path) -> None:
    """Every name of a script, with many of a critic and a reward model, is taken, read or named below the draft."""
    overrides = [
        "algorithm.adv_estimator=gae", "critic.model.path=org/critic", "critic.ppo_micro_batch_size_per_gpu=8",
        "critic.model.override_config.dropout=0", "critic.whatever=1", "reward_model.model.path=org/rm",
        "actor_rollout_ref.rollout.unheard_of=3", "data.sampler.class_name=Mine", "algorithm.unheard_of=4",
    ]  # fmt: skip
    _, _, text = verl_draft(tmp_path, *overrides)
    carried, _, below = text.partition("# Not converted:")
    below = below.replace("\n#    ", "")
    for name in (
        "critic.whatever", "critic.model.override_config.dropout", "reward_model.model.path", "algorithm.unheard_of",
        "actor_rollout_ref.rollout.unheard_of", "data.sampler.class_name",
    ):  # fmt: skip
        assert name in below, name
    for name, _ in leaves_of(read_script(str(FOREIGN / "verl_grpo.sh"))):
        leaf = name.rpartition(".")[2]
        read = verl.Verl.handles(name) or leaf in carried or name in below
        assert read or leaf == "(module)", name  # it is in the first lines


@pytest.mark.parametrize("algorithm", ["gae", "grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_drafts_of_verl_load(tmp_path: Path, algorithm: str) -> None:
    _, _, text = verl_draft(tmp_path, f"algorithm.adv_estimator={algorithm}", "data.val_files=null",
                            f"data.train_files={tmp_path}/gsm8k.jsonl")  # fmt: skip
    (tmp_path / "gsm8k.jsonl").write_text('{"prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}}\n')
    text = re.sub(r"algorithm: null  # CONFIRM: write ([\w+]+),", r"algorithm: \1  #", text)
    (tmp_path / "draft.yaml").write_text(text)
    config = load_config([str(tmp_path / "draft.yaml")], ["rollout.python=/usr/bin/python3"], RlConfig)
    assert config.rl.minibatches == 4


SCRIPT = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/d.parquet"
    " actor_rollout_ref.model.path=org/m"
)
ASYNC = SCRIPT + (
    " data.train_batch_size=0 actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=32"
    " actor_rollout_ref.rollout.tensor_model_parallel_size=2 rollout.n_gpus_per_node=8 trainer.n_gpus_per_node=4"
    " rollout.total_rollout_steps=6400 async_training.require_batches=2 async_training.trigger_parameter_sync_step=4"
)
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
# what a script of verl says -> keys of the draft, quantities that differ
OF_VERL: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "fully async": (
        f"{ASYNC} async_training.staleness_threshold=0.5",
        {"rl.prompts_per_step": 256, "rl.minibatches": 8, "train.steps": 200, "train.epochs": None,
         "cluster.placement": "disaggregated", "cluster.trainer_ranks": 4, "rollout.num_engines": 4,
         "cluster.max_staleness": 1},
        {"samples ahead of the weights"},
    ),
    "fully async, a whole version ahead": (
        f"{ASYNC} async_training.staleness_threshold=2", {"cluster.max_staleness": 2}, set()
    ),
    "one step off policy": (
        f"{SCRIPT} rollout.n_gpus_per_node=6 trainer.n_gpus_per_node=2 actor_rollout_ref.rollout.n=4"
        " actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        {"cluster.placement": "disaggregated", "rollout.num_engines": 6, "cluster.max_staleness": 1}, set(),
    ),
    "the section `reward` of 2026": (
        f"{SCRIPT} actor_rollout_ref.rollout.n=4 reward.reward_manager.name=dapo +{OVERLONG}.enable=True"
        f" +{OVERLONG}.len=512 +{OVERLONG}.penalty_factor=0.5 reward.custom_reward_function.path=mine/score.py",
        {"rl.overlong_buffer": 512, "rl.overlong_penalty": 0.5, "rl.reward": ["mine.score:compute_score"]}, set(),
    ),
    "one sample per prompt": (
        f"{SCRIPT} actor_rollout_ref.rollout.n=1", {"rl.advantage": "reinforce++"},
        {"advantage of a group of one sample"},
    ),
    "bounds of IcePop": (
        f"{SCRIPT} actor_rollout_ref.rollout.n=4 algorithm.rollout_correction.rollout_is=token"
        " algorithm.rollout_correction.rollout_is_threshold=0.5_4.0",
        {"rl.correction": "icepop", "rl.correction_limits": [0.5, 4.0]}, set(),
    ),
    "two data sets": (
        f"{SCRIPT} actor_rollout_ref.rollout.n=4 data.train_files=\"['a/gsm8k/x.parquet','a/math/x.parquet']\"",
        {"rl.reward": ["regex"]}, {"reward of the other files"},
    ),
    "a variable that only the run knows": (
        f"{SCRIPT} actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.temperature=$TEMPERATURE",
        {"rollout.temperature": 1.0}, {"actor_rollout_ref.rollout.temperature"},
    ),
    "branches, probes and uv": (
        "DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\nTP=${ROLLOUT_TP:-}\n"
        'case "${DEVICE}" in\n  cpu | gpu)\n    case "${MACHINE}" in\n      gb200)\n        N=4\n        EXTRA+=(\n'
        "          x.y=1\n        )\n        ;;\n      *)\n        N=8\n        ;;\n    esac\n    TP=${TP:-2}\n    ;;\n"
        "  npu)\n    TP=16\n    ;;\nesac\nLAUNCH=(uv run --frozen --extra vllm python3)\n"
        f'"${{LAUNCH[@]}}" {SCRIPT.partition(" ")[2]} actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=${{N}}'
        " actor_rollout_ref.rollout.tensor_model_parallel_size=${TP}",
        {"cluster.trainer_ranks": 8, "rollout.tp": 2, "rollout.num_engines": 4}, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_VERL)
def test_scripts_of_verl_in_2026(tmp_path: Path, name: str) -> None:
    text, expected, differing = OF_VERL[name]
    (tmp_path / "a.sh").write_text(text + "\n")
    values, differs, draft = drafted(tmp_path / "a.sh")
    assert {key: values.get(key) for key in expected} == expected
    assert {*differs} - {"reward", "schedule of the learning rate"} == differing
    assert "weft does not know it" not in draft
    (tmp_path / "mine.yaml").write_text(draft)
    (tmp_path / "d.jsonl").write_text("")
    given = [
        "data.sources=null",
        f"data.path={tmp_path}/d.jsonl",
    ]
    given += (
        ["rl.reward=[math]"] if "rl.reward_options" not in values else ["rl.reward_options={regex.pattern: '(.+)'}"]
    )
    load_config(
        [str(tmp_path / "mine.yaml")], [*given, "rollout.python=/usr/bin/python3", "rl.algorithm=grpo"], RlConfig
    )


def test_drafts_of_trl_load(tmp_path: Path) -> None:
    _, _, text = trl_draft(tmp_path, "{}")
    (tmp_path / "draft.yaml").write_text(text)
    config = load_config([str(tmp_path / "draft.yaml")], ["rollout.python=/usr/bin/python3"], RlConfig)
    assert config.rl.prompts_per_step == 32 and config.rl.loss_aggregation == "sequence_sum"


@pytest.mark.parametrize("text", ["num_ppo_epochs: 2\nreward_model_path: org/rm", "reward_model_path: org/rm"])
def test_other_algorithms_of_trl_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(f"model_name_or_path: m\ndataset_name: d\n{text}\n")
    with pytest.raises(Exception, match="PPO"):
        migrate([str(tmp_path / "a.yaml")])


RLOO = {
    "rl.reward": ["math"], "rl.advantage": "rloo", "rl.policy_loss": "ppo_sequence", "rl.clip": [0.2, 0.28],
    "rl.dual_clip": None, "rl.loss_aggregation": "sequence_mean", "rl.kl_coef": 0.05, "rl.kl_in": "reward",
    "rl.kl_estimator": "k1", "rl.kl_clamp": None, "rl.entropy_coef": 0, "rl.correction": "none",
    "rl.old_logprobs": "recompute", "rl.mask_truncated": False, "rl.dynamic_sampling": 0,
    # 8 a device x 4 x 4 devices = 128 samples, in groups of two
    "rl.prompts_per_step": 64, "rl.group_size": 2, "rl.minibatches": 1, "rl.epochs": 1,
    "rollout.engine": "vllm", "rollout.max_new_tokens": 512, "optimizer.lr": 1e-6, "schedule.name": "linear",
}  # fmt: skip
RLOO_SCRIPT = (
    "accelerate launch --num_processes 4 examples/scripts/rloo.py --model_name_or_path org/base --dataset_name org/d "
    "--reward_funcs accuracy_reward --use_vllm true --gradient_accumulation_steps 4 --epsilon_high 0.28"
)


@pytest.mark.parametrize(
    ("options", "expected", "differing"),
    [
        ("", {}, set()),
        ("--num_generations 4 --beta 0", {"rl.group_size": 4, "rl.kl_coef": 0}, set()),
        ("--normalize_advantages true", {"rl.advantage": "rloo"}, {"advantage"}),
        ("--reward_clip_range -1 1", {}, {"clip of rewards"}),
        ("--mask_truncated_completions true", {"rl.mask_truncated": True, "rl.count_masked": True}, set()),
        ("--steps_per_generation 8 --num_iterations 2", {"rl.minibatches": 2, "rl.epochs": 2}, set()),
        ("--rloo_k 4", {"rl.group_size": 4}, {"version"}),
    ],
)
def test_rloo_of_trl(tmp_path: Path, options: str, expected: dict[str, Any], differing: set[str]) -> None:
    (tmp_path / "rloo.sh").write_text(f"{RLOO_SCRIPT} {options}\n")
    values, differs, text = drafted(tmp_path / "rloo.sh")
    changed = RLOO if not options else {}
    assert {key: values.get(key) for key in {**changed, **expected}} == {**changed, **expected}
    assert set(differs) == differing and "does not know" not in text
    if not differing:
        (tmp_path / "draft.yaml").write_text(text)
        load_config([str(tmp_path / "draft.yaml")], ["rollout.python=/usr/bin/python3"], RlConfig)


@pytest.mark.parametrize(
    "text",
    ["trl_program: 1", "missing_eos_penalty: 1.0\nuse_vllm: true", "reward_model_path: org/rm\nmax_new_tokens: 64"],
)
def test_online_dpo_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """And never drafted as GRPO, whose options it shares."""
    file = tmp_path / "a.yaml"
    file.write_text(f"model_name_or_path: m\ndataset_name: d\n{text}\n")
    if text.startswith("trl_program"):
        file = tmp_path / "a.sh"
        file.write_text(
            "python examples/scripts/online_dpo.py --model_name_or_path m --use_vllm --num_train_epochs 1\n"
        )
    with pytest.raises(Exception, match=r"an ONLINE DPO config of TRL.*`rl.advantage: rloo` and `rl.group_size: 2`"):
        migrate([str(file)])


def nemo_draft(tmp_path: Path, text: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """Of the run in tests/foreign/rl, over its parent, with more settings over it."""
    for name in ("nemo_rl_parent.yaml", "nemo_rl_grpo.yaml"):
        (tmp_path / name).write_text((FOREIGN / "rl" / name).read_text())
    (tmp_path / "run.yaml").write_text(f"defaults: nemo_rl_grpo.yaml\n{text}\n")
    return drafted(tmp_path / "run.yaml")


NEMO = {
    "model.path": "org/base-8b", "model.recompute": "full", "data.path": "org/math", "rl.chat": True,
    "rl.reward": ["math"],
    # 512 samples / 256; the schedule, the run and checkpoints count rollout steps
    "rl.prompts_per_step": 32, "rl.group_size": 16, "rl.minibatches": 2, "rl.epochs": 1,
    "train.steps": 1000, "checkpoint.every": 20, "schedule.warmup_steps": 100, "schedule.name": "constant",
    "rl.advantage": "grpo", "rl.advantage_norm": "group", "rl.policy_loss": "ppo", "rl.clip": [0.2, 0.2],
    "rl.dual_clip": None, "rl.loss_aggregation": "token_mean", "rl.kl_coef": 0.02, "rl.kl_in": "loss",
    "rl.kl_estimator": "k3", "rl.kl_clamp": None, "rl.kl_unbiased": False, "rl.correction": "none",
    "rl.old_logprobs": "recompute", "rl.mask_truncated": False, "rl.dynamic_sampling": 0,
    "rollout.engine": "vllm", "rollout.tp": 2, "rollout.num_engines": 8, "rollout.gpu_memory_utilization": 0.6,
    "rollout.max_prompt_tokens": 1024, "rollout.max_new_tokens": 3072, "rollout.temperature": 1, "rollout.top_k": 0,
    "cluster.trainer_ranks": 16, "cluster.placement": "colocated", "mesh.tp": 2, "fsdp.param_dtype": "bf16",
    "step.max_tokens_per_device": 16384, "optimizer.name": "adamw", "optimizer.lr": 3e-7,
    "optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8,
    "optimizer.max_grad_norm": 1, "run.dir": "results/grpo", "track.report_to": ["wandb"],
}  # fmt: skip
NEMO_DIFFERS = {"advantage", "longest completion", "schedule of the learning rate"}


def test_grpo_of_nemo_rl(tmp_path: Path) -> None:
    values, differs, text = nemo_draft(tmp_path, "")
    assert {key: values.get(key) for key in NEMO} == NEMO
    assert set(differs) == NEMO_DIFFERS and "does not know" not in text
    (tmp_path / "draft.yaml").write_text(text.replace("algorithm: null", "algorithm: grpo"))
    config = load_config([str(tmp_path / "draft.yaml")], ["rollout.python=/usr/bin/python3"], RlConfig)
    assert config.rl.minibatches == 2


@pytest.mark.parametrize(
    ("text", "expected", "differing"),
    [
        ("grpo: {normalize_rewards: false}", {"rl.advantage": "rloo"}, NEMO_DIFFERS - {"advantage"}),
        ("grpo: {normalize_rewards: false, use_leave_one_out_baseline: false}",
         {"rl.advantage": "grpo", "rl.advantage_norm": "none"}, NEMO_DIFFERS - {"advantage"}),
        ("grpo: {use_leave_one_out_baseline: false}", {"rl.advantage_norm": "group"}, NEMO_DIFFERS),
        ("grpo: {overlong_filtering: true}", {"rl.mask_truncated": True}, NEMO_DIFFERS),
        ("grpo: {max_num_steps: 20}", {"train.steps": 40, "schedule.warmup_steps": 40}, {*NEMO_DIFFERS, "warm-up"}),
        ("loss_fn: {token_level_loss: false}", {"rl.loss_aggregation": "sequence_mean"}, NEMO_DIFFERS),
        ("loss_fn: {disable_ppo_ratio: true}", {"rl.policy_loss": "reinforce"}, NEMO_DIFFERS),
        ("loss_fn: {sequence_level_importance_ratios: true}", {"rl.policy_loss": "gspo"}, NEMO_DIFFERS),
        ("loss_fn: {ratio_clip_c: 3}", {"rl.dual_clip": 3}, NEMO_DIFFERS),
        ("loss_fn: {kl_output_clamp_value: 10}", {"rl.kl_clamp": 10}, NEMO_DIFFERS),
        ("loss_fn: {use_on_policy_kl_approximation: true}", {"rl.kl_coef": 0.02}, {*NEMO_DIFFERS, "KL"}),
        ("loss_fn: {use_importance_sampling_correction: true}",
         {"rl.correction": "tis", "rl.correction_limits": [0, 1e30]}, NEMO_DIFFERS),
        ("loss_fn: {use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2}",
         {"rl.correction_limits": [0, 2]}, NEMO_DIFFERS),
        ("policy: {generation: {max_new_tokens: 1024}}",
         {"rollout.max_prompt_tokens": 3072, "rollout.max_new_tokens": 1024}, NEMO_DIFFERS - {"longest completion"}),
        ("policy: {generation: {colocated: {enabled: false, resources: {gpus_per_node: 8, num_nodes: 1}}}}",
         {"cluster.placement": "disaggregated", "cluster.trainer_ranks": 8, "rollout.num_engines": 4}, NEMO_DIFFERS),
        # a section in place of its parent's list
        ("policy: {scheduler: {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {eta_min: 3.0e-8}}}",
         {"schedule.name": "cosine", "schedule.min_lr_ratio": 0.1, "schedule.warmup_steps": None}, NEMO_DIFFERS),
        ("env: {sliding_puzzle_game: {cfg: {size: 4}}}", {"rl.reward": None}, {*NEMO_DIFFERS, "reward"}),
    ],
)  # fmt: skip
def test_what_settings_of_nemo_rl_mean(
    tmp_path: Path, text: str, expected: dict[str, Any], differing: set[str]
) -> None:
    values, differs, _ = nemo_draft(tmp_path, text)
    assert {key: values.get(key) for key in expected} == expected
    assert set(differs) == differing


def test_parents_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\npolicy: {model_name: m}\n")
    with pytest.raises(Exception, match=r"a\.yaml: its `defaults` name .*b\.yaml, which does not exist"):
        migrate([str(tmp_path / "a.yaml")])
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\n")
    with pytest.raises(Exception, match="lead back to it"):
        migrate([str(tmp_path / "a.yaml")])


PRIME = {
    "model.path": "org/base-4b", "model.recompute": "full", "rl.prompts_per_step": 32, "rl.group_size": 16,
    "rl.minibatches": 1, "rl.epochs": 1, "rl.advantage": "grpo", "rl.advantage_norm": "none", "rl.policy_loss": "dppo",
    "rl.clip": [0.2, 0.2], "rl.loss_aggregation": "token_mean", "rl.kl_coef": 0,
    "rl.old_logprobs": "rollout", "rl.entropy_coef": 0, "rl.mask_truncated": False, "rl.dynamic_sampling": 0,
    "rollout.engine": "vllm", "rollout.tp": 2, "rollout.num_engines": 2, "rollout.max_prompt_tokens": 1024,
    "rollout.max_new_tokens": 3072, "rollout.temperature": 0.8, "rollout.top_p": 1,
    "rollout.gpu_memory_utilization": 0.9, "cluster.trainer_ranks": 4, "cluster.placement": "disaggregated",
    "cluster.max_staleness": 4, "mesh.cp": 2, "fsdp.cpu_offload": "optimizer", "step.max_tokens_per_device": 4096,
    "optimizer.name": "adamw", "optimizer.lr": 3e-6, "optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8, "optimizer.max_grad_norm": 1,
    # warm-up, a constant rate, and a linear decay over the last 100 steps to a tenth
    "schedule.name": "wsd", "schedule.warmup_steps": 20, "schedule.decay_ratio": 0.2, "schedule.decay": "linear",
    "schedule.min_lr_ratio": 0.1, "train.steps": 500, "checkpoint.every": 50, "run.dir": "outputs/math",
    "track.report_to": ["wandb"], "track.project": "math",
}  # fmt: skip
PRIME_DIFFERS = {
    "prompts and rewards", "samples without an advantage", "warm-up of W updates, in update k"
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "expected", "differing"),
    [
        ("", "", PRIME, set()),
        ("group_size = 16", "group_size = 1", {"rl.group_size": None, "rl.prompts_per_step": None}, set()),
        ("[orchestrator]", '[orchestrator.algo]\ntype = "max_rl"\n[orchestrator]', {"rl.advantage": "max_rl"}, set()),
        ("[orchestrator]", '[orchestrator.algo]\ntype = "rae"\n[orchestrator]', {"rl.advantage": "grpo"},
         {"advantage"}),
        ("[orchestrator]", '[orchestrator.algo.length_penalty]\ntype = "linear"\n[orchestrator]', {}, {"advantage"}),
        ("[orchestrator]", '[orchestrator.algo]\ntype = "opd"\nteacher = {name = "org/t"}\n[orchestrator]',
         {"rl.teacher": "org/t", "rl.teacher_in": "advantage", "rl.old_logprobs": "recompute"},
         {"advantage", "correction of the engine's mismatch"}),
        ("max_completion_tokens = 3072\n", "",
         {"rollout.max_prompt_tokens": 1024, "rollout.max_new_tokens": 3072}, {"longest completion"}),
        ("max_completion_tokens = 3072\n", "max_completion_tokens = 1024\nextra_body = {top_k = 50}\n",
         {"rollout.max_new_tokens": 1024, "rollout.top_k": 50, "rollout.allow_truncated": True,
          "rl.old_logprobs": "recompute"}, {"correction of the engine's mismatch"}),
        ("num_train_gpus = 4\nnum_infer_gpus = 4",
         'type = "multi_node"\nnum_train_nodes = 2\nnum_infer_nodes = 3',
         {"cluster.trainer_ranks": 16, "rollout.num_engines": 12}, set()),
        ("[trainer.model]", "[trainer.loss]\nkl_tau = 0.1\n[trainer.model]", {"rl.policy_loss": "ppo"},
         {"policy loss"}),
        ('type = "linear"', 'type = "cosine"', {"schedule.name": "cosine", "schedule.warmup_steps": 20}, set()),
        ("[trainer.model]", "[trainer.model]\noptim_cpu_offload = false\nep = 4",
         {"fsdp.cpu_offload": None, "mesh.ep": 4}, set()),
    ],
)  # fmt: skip
def test_grpo_of_prime_rl(
    tmp_path: Path, before: str, after: str, expected: dict[str, Any], differing: set[str]
) -> None:
    (tmp_path / "rl.toml").write_text((FOREIGN / "rl" / "prime_rl.toml").read_text().replace(before, after, 1))
    values, differs, text = drafted(tmp_path / "rl.toml")
    assert {key: values.get(key) for key in expected} == expected
    assert set(differs) == PRIME_DIFFERS | differing and "does not know" not in text
    (tmp_path / "p.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    sections = yaml.safe_load(text)
    sections["rl"] |= {"algorithm": "grpo", "reward": ["math"]}
    sections["rl"] |= {key: 8 for key in ("group_size", "prompts_per_step") if sections["rl"][key] is None}
    sections["data"]["path"] = str(tmp_path / "p.jsonl")
    (tmp_path / "draft.yaml").write_text(yaml.safe_dump(sections))
    load_config([str(tmp_path / "draft.yaml")], ["rollout.python=/usr/bin/python3"], RlConfig)
