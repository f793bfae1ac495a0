"""Theirs -> yours of public quick starts: drafts of configs as their authors publish them, reduced to facts.

Each quantity was worked out by hand from the trainer's own defaults, and is asserted of the config the draft makes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.config import SftConfig, load_config
from weft.config.commands import schema_of
from weft.config.keys import get
from weft.config.migrate.migrate import migrate
from weft.config.rl_schema import RlConfig

VERL = """
if [ "$#" -lt 2 ]; then
    exit 1
fi
nproc_per_node=$1
save_path=$2
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=data/train.parquet data.val_files=data/test.parquet \\
    data.prompt_key=extra_info data.response_key=extra_info optim.lr=1e-4 data.prompt_dict_keys=['question'] \\
    +data.response_dict_keys=['answer'] data.micro_batch_size=4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \\
    trainer.project_name=gsm8k-sft trainer.logger=console trainer.total_training_steps=1 $@ \\
    ulysses_sequence_parallel_size=2 use_remove_padding=true
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/lora
save_steps: 500
overwrite_output_dir: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets: [{path: teknium/GPT4-LLM-Cleaned, type: alpaca}]
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
"""
TRL = """
python trl/scripts/sft.py --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 \\
    --num_train_epochs 1 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 --lora_alpha 16 --output_dir out --push_to_hub
"""
ROLL = """
pretrain: Qwen/Qwen3-30B-A3B-Base
seed: 42
num_gpus_per_node: 8
save_steps: 100
eval_steps: 100
sequence_length: 2048
prompt_key: instruction
query_key: input
response_key: output
validation: {data_args: {file_name: data/held-out.json, template: qwen2_5}}
sft_train:
  model_args: {dtype: bf16, ulysses_size: 2}
  training_args:
    {num_train_epochs: 1, per_device_train_batch_size: 1, gradient_accumulation_steps: 1, learning_rate: 5.0e-6}
  data_args: {file_name: data/code.json, template: qwen2_5, preprocessing_num_workers: 4}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 8
      param_dtype: bf16
      reduce_dtype: bf16
      offload_policy: false
      reshard_after_forward: true
      wrap_policy:
        wrap_embeddings: true
        wrap_lm_output: true
        moe_experts: [Qwen3MoeMLP]
        transformer_layer_cls_to_wrap: [Qwen3MoeAttention, Qwen3MoeSparseMoeBlock]
  device_mapping: list(range(0,8))
"""
HF_ADAM = {
    "optimizer.name": "adamw", "optimizer.betas": (0.9, 0.999), "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0,
    "optimizer.max_grad_norm": 1.0, "schedule.min_lr_ratio": 0.0, "fsdp.master_dtype": "fp32",
    "model.recompute": "full",
}  # fmt: skip
ADAPTED = ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]
# name -> (file, its text, GPUs, key of weft -> the right value)
QUICK_STARTS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "verl's GSM8K with Ulysses": ("a.sh", VERL, 8, {
        "step.documents": 256, "step.tokens": None, "optimizer.lr": 1e-4, "optimizer.betas": (0.9, 0.95),
        "optimizer.weight_decay": 0.01, "optimizer.max_grad_norm": 1.0, "schedule.name": "cosine",
        "schedule.warmup_ratio": 0.1, "schedule.min_lr_ratio": 0.0, "train.steps": 1, "data.max_length": 1024,
        "data.long_documents": "error", "data.columns": {"instruction": "extra_info.question",
        "output": "extra_info.answer"}, "mesh.cp": 2, "mesh.ulysses": 2, "model.recompute": "full", "lora.rank": None,
        "checkpoint.every": 0, "checkpoint.keep": None, "eval.every": 0, "fsdp.master_dtype": "fp32",
    }),
    "LLaMA-Factory's LoRA": ("a.yaml", FACTORY, 1, HF_ADAM | {
        "step.documents": 8, "optimizer.lr": 1e-4, "schedule.name": "cosine", "schedule.warmup_ratio": 0.1,
        "train.epochs": 3, "data.max_length": 2048, "data.long_documents": "truncate", "data.split": "[:1000]",
        "data.template_kwargs": {"enable_thinking": False}, "lora.rank": 8, "lora.alpha": None,  # twice the rank
        "lora.dropout": 0.0, "lora.targets": "all-linear", "checkpoint.every": 500, "checkpoint.keep": None,
        "run.overwrite": True, "train.timeout": 600, "fsdp.param_dtype": "bf16",
    }),
    "axolotl's LoRA": ("a.yaml", AXOLOTL, 2, HF_ADAM | {
        "step.tokens": 2 * 2 * 2048 * 2, "step.documents": None, "optimizer.lr": 2e-4, "schedule.name": "cosine",
        "schedule.warmup_ratio": 0.1, "train.epochs": 1, "data.max_length": 2048, "data.long_documents": "drop",
        "eval.share": 0.1, "lora.rank": 16, "lora.alpha": 32, "lora.dropout": 0.05, "lora.targets": tuple(ADAPTED),
        "checkpoint.keep": 4,
    }),
    "TRL's sft.py": ("a.sh", TRL, 4, HF_ADAM | {
        "step.tokens": 2 * 8 * 1024 * 4, "optimizer.lr": 2e-4, "schedule.name": "linear", "schedule.warmup_ratio": 0.0,
        "train.epochs": 1, "data.max_length": 1024, "data.long_documents": "truncate", "lora.rank": 32,
        "lora.alpha": 16, "lora.dropout": 0.05, "checkpoint.every": 500, "checkpoint.keep": None,
    }),
    "ROLL's SFT of experts": ("a.yaml", ROLL, 8, HF_ADAM | {
        "step.documents": 1 * 1 * 4, "optimizer.lr": 5e-6, "schedule.name": "linear", "schedule.warmup_ratio": 0.0,
        "train.epochs": 1, "train.seed": 42, "data.max_length": 2048, "data.shuffle": False, "mesh.cp": 2,
        "mesh.ulysses": 2, "mesh.dp_shard": 4, "fsdp.param_dtype": "bf16", "fsdp.reduce_dtype": "bf16",
        "fsdp.wrap": ("embedding", "head", "Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock"), "checkpoint.every": 100,
        "checkpoint.keep": None, "eval.every": 100, "fsdp.reshard_after_forward": True, "fsdp.cpu_offload": False,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", QUICK_STARTS)
def test_quick_starts_of_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    file, text, ranks, expected = QUICK_STARTS[name]
    Path(file).write_text(text)
    Path("d.jsonl").write_text("")
    draft = migrate([file], ranks)
    Path("mine.yaml").write_text(draft)
    held_out = [] if re.search(r"^  share: ", draft, re.MULTILINE) else ["eval.path=d.jsonl"]
    config = load_config(["mine.yaml"], ["model.path=org/m", "data.path=d.jsonl", *held_out], SftConfig)
    assert {key: get(config, key) for key in expected} == expected


GUIDE = """
exp_name: qwen3-8B-rlvr
seed: 42
num_gpus_per_node: 8
max_steps: 500
save_steps: 100
eval_steps: 10
rollout_batch_size: 64
prompt_length: 2048
response_length: 4096
num_return_sequences_in_group: 8
ppo_epochs: 1
adv_estimator: reinforce
value_clip: 0.5
reward_clip: 10
advantage_clip: 2.0
dual_clip_loss: true
norm_mean_type: ~
norm_std_type: ~
max_len_mask: true
difficulty_mask: true
difficulty_low_threshold: 0.1
difficulty_high_threshold: 0.95
add_token_level_kl: false
whiten_advantages: true
pretrain: Qwen/Qwen3-8B
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16, model_type: ~}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1,
                  gradient_accumulation_steps: 32, warmup_steps: 20, num_train_epochs: 50}
  data_args: {file_name: [data/math.jsonl], domain_interleave_probs: {math_rule: 1.0}, messages: messages}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 16, param_dtype: bf16, reduce_dtype: float32, reshard_after_forward: true,
                      offload_policy: false}
  device_mapping: list(range(0,16))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", top_p: 0.99, top_k: 100, num_beams: 1, temperature: 0.99,
                    num_return_sequences: "${num_return_sequences_in_group}"}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, block_size: 16}}
  device_mapping: list(range(0,12))
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    tag_included: [deepmath_103k, aime]
"""


def test_the_example_of_rolls_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REINFORCE with whitened advantages, which weft calls reinforce++; four quantities have no counterpart."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(GUIDE)
    Path("d.jsonl").write_text("")
    draft = migrate(["a.yaml"])
    Path("mine.yaml").write_text(draft)
    config = load_config(["mine.yaml"], ["model.path=org/m", "data.path=d.jsonl", "rl.algorithm=reinforce++"], RlConfig)
    expected = {
        "rl.advantage": "reinforce++", "rl.gamma": 1.0, "rl.policy_loss": "ppo", "rl.clip": (0.2, 0.2),
        "rl.dual_clip": 1.4, "rl.loss_aggregation": "sequence_mean", "rl.kl_coef": 0.0, "rl.entropy_coef": 0.0,
        "rl.old_logprobs": "recompute", "rl.correction": "none", "rl.mask_truncated": True, "rl.count_masked": False,
        "rl.dynamic_sampling": 0, "rl.prompts_per_step": 64, "rl.group_size": 8, "rl.minibatches": 1, "rl.epochs": 1,
        "rl.reward": ("math",), "rl.reward_column": None, "rl.overlong_buffer": None, "rl.chat": False,
        "rollout.engine": "vllm", "rollout.num_engines": 12, "rollout.max_prompt_tokens": 2048,
        "rollout.max_new_tokens": 4096, "rollout.temperature": 0.99, "rollout.top_p": 0.99, "rollout.top_k": 100,
        "rollout.min_p": 0.0, "rollout.allow_truncated": True, "rollout.gpu_memory_utilization": 0.8,
        "cluster.trainer_ranks": 16,
        "cluster.placement": "colocated", "mesh.dp_shard": 16, "mesh.dp_replicate": 1, "fsdp.param_dtype": "bf16",
        "fsdp.reduce_dtype": "fp32", "fsdp.reshard_after_forward": True, "fsdp.cpu_offload": False,
        "optimizer.name": "adamw", "optimizer.lr": 1e-6, "optimizer.weight_decay": 0.0, "optimizer.betas": (0.9, 0.999),
        "optimizer.eps": 1e-8, "optimizer.max_grad_norm": 1.0, "schedule.name": "linear", "schedule.warmup_steps": 20,
        "schedule.min_lr_ratio": 0.0, "train.steps": 500, "train.seed": 42, "checkpoint.every": 100,
        "checkpoint.keep": None, "model.recompute": "full", "data.long_documents": "drop",
    }  # fmt: skip
    assert {key: get(config, key) for key in expected} == expected
    differs = re.findall(r"^#   ([^:]+): .* ->", re.sub(r"\n#     ", " ", draft.partition("\nmodel:")[0]), re.MULTILINE)
    assert differs == [
        "whitening with max_len_mask", "clip of advantages", "groups by difficulty", "temperature of training"
    ]  # fmt: skip


AGENTS = """
train_env_manager: {max_env_num_per_worker: 16, num_env_groups: 32, group_size: 4, tags: [FrozenLake],
                    num_groups_partition: [32]}
reward_normalization: {grouping: traj_group_id, method: mean_std}
max_actions_per_traj: 5
"""


def test_groups_of_rolls_agents(tmp_path: Path) -> None:
    """rollout_batch_size counts trajectories there, and group_size of the environments is that of a prompt."""
    text = re.sub("rollout_batch_size: 64", "rollout_batch_size: 128", GUIDE) + AGENTS
    (tmp_path / "a.yaml").write_text(text.replace("num_return_sequences_in_group: 8\n", ""))
    draft = migrate([str(tmp_path / "a.yaml")])
    assert re.search(r"^  prompts_per_step: 32 .*128 trajectories", draft, re.MULTILINE)
    assert re.search(r"^  group_size: 4 ", draft, re.MULTILINE)
    assert "weft does not know it" not in draft and "pipeline: agents" in draft


def test_ulysses_of_rolls_guide(tmp_path: Path) -> None:
    """(2, 4) [replicas, shards] of 8 ranks, of which two share documents."""
    text = GUIDE.replace("fsdp_size: 16", "fsdp_size: 4").replace("model_type: ~}", "model_type: ~, ulysses_size: 2}")
    text = text.replace("range(0,16)", "range(0,8)").replace("range(0,12)", "range(0,8)")
    (tmp_path / "a.yaml").write_text(
        text.replace("gradient_accumulation_steps: 32", "gradient_accumulation_steps: 128")
    )
    draft = migrate([str(tmp_path / "a.yaml")])
    for line in (
        "dp_replicate: 2",
        "dp_shard: 2",
        "cp: 2",
        "ulysses: 2",
        "trainer_ranks: 8",
        "num_engines: 8",
        "minibatches: 1",
    ):
        assert re.search(rf"^  {line}( |$)", draft, re.MULTILINE), line


# ---------------------------------------------------------------- preferences, reward models, distillation

COMMON = "--model_name_or_path org/m --dataset_name org/d --per_device_train_batch_size 4 --output_dir out"
AXOLOTL_BASE = "base_model: org/m\nsequence_len: 2048\nmicro_batch_size: 2\nnum_epochs: 1\n"
FACTORY_BASE = (
    "model_name_or_path: org/m\ndo_train: true\nfinetuning_type: lora\nlora_target: all\ntemplate: llama3\n"
    "dataset: pairs_en\ncutoff_len: 2048\nper_device_train_batch_size: 1\nnum_train_epochs: 3.0\n"
)
PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: (file, its text, section: keys of the draft); the program alone says what most of TRL's scripts train
    "trl dpo": ("a.sh", f"trl dpo {COMMON} --learning_rate 5.0e-7 --no_remove_unused_columns",
                {"preference": {"loss": "sigmoid"}}),
    "trl dpo_vlm": ("a.sh", f"accelerate launch --config_file z.yaml examples/scripts/dpo_vlm.py {COMMON} --use_peft "
                    "--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0",
                    {"preference": {"loss": ["sigmoid", "bco_pair", "sft"], "weights": [0.8, 0.2, 1.0]}}),
    "trl kto": ("a.sh", f"python trl/scripts/kto.py {COMMON} --warmup_steps 0.1 --report_to wandb",
                {"preference": {"loss": "kto"}}),
    "trl orpo": ("a.sh", f"python examples/scripts/orpo.py {COMMON} --use_peft --lora_r=16 --bf16",
                 {"preference": {"loss": "orpo"}}),
    "trl cpo": ("a.sh", f"python examples/scripts/cpo.py {COMMON} --loss_type simpo --cpo_alpha 0.5 --simpo_gamma 0.7",
                {"preference": {"loss": ["simpo", "sft"], "weights": [1.0, 0.5], "gamma": 0.7}}),
    "trl reward": ("a.sh", f"python trl/scripts/reward.py {COMMON} --use_peft --lora_task_type SEQ_CLS",
                   {"reward": {"loss": "bradley_terry"}}),
    "trl prm": ("a.sh", f"python examples/scripts/prm.py {COMMON}", {"reward": {"loss": "process"}}),
    "trl gkd": ("a.sh", f"python examples/scripts/gkd.py {COMMON} --teacher_model_name_or_path org/t --lmbda 0",
                {"distill": {"teacher": "org/t", "loss": "jsd"}}),
    "axolotl kto": ("a.yaml", AXOLOTL_BASE + "rl: kto\nrl_beta: 0.5\nkto_desirable_weight: 0.2\nadapter: lora\n"
                    "datasets: [{path: org/kto, type: llama3.ultra, split: train}]\nremove_unused_columns: false\n",
                    {"preference": {"loss": "kto", "beta": 0.5, "desirable_weight": 0.2}}),
    "axolotl orpo": ("a.yaml", AXOLOTL_BASE + "rl: orpo\norpo_alpha: 0.1\nmax_prompt_len: 512\n"
                     "datasets: [{path: org/p, type: chat_template.argilla}]\n",
                     {"preference": {"loss": "orpo", "beta": 0.1}}),
    "axolotl prm": ("a.yaml", AXOLOTL_BASE + "process_reward_model: true\nnum_labels: 2\ndatasets:\n- {path: org/s, "
                    'type: stepwise_supervised, step_separator: "\\n\\n", train_on_last_step_only: false}\n',
                    {"reward": {"loss": "process", "step_separator": "\n\n", "train_on_last_step_only": False}}),
    "factory kto": ("a.yaml", FACTORY_BASE + "stage: kto\npref_beta: 0.1\neval_strategy: steps\n",
                    {"preference": {"loss": "kto", "beta": 0.1}}),
    "factory simpo": ("a.yaml", FACTORY_BASE + "stage: dpo\npref_loss: simpo\nsimpo_gamma: 0.6\npref_ftx: 0.2\n",
                      {"preference": {"loss": ["simpo", "sft"], "weights": [1.0, 0.2], "gamma": 0.6}}),
    "factory rm": ("a.sh", "llamafactory-cli train --stage rm --model_name_or_path org/m --finetuning_type lora "
                   "--dataset p --template llama3 --cutoff_len 99", {"reward": {"loss": "bradley_terry"}}),
    "roll dpo": ("a.yaml", "pretrain: org/m\npg_algorithm: dpo\nipo: false\nbeta: 0.2\nsequence_length: 4096\n"
                 "prompt_length: 2048\nchosen_key: better\nrejected_key: worse\nnum_gpus_per_node: 8\n"
                 "actor_train: {training_args: {learning_rate: 1.0e-6}, device_mapping: 'list(range(0,8))'}\n",
                 {"preference": {"beta": 0.2}, "data": {"columns": {"chosen": "better", "rejected": "worse"}}}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_preferences_reward_models_and_distillation(name: str, tmp_path: Path) -> None:
    """No name is unknown, and the draft is a config of its command."""
    file, text, expected = PUBLISHED[name]
    (tmp_path / file).write_text(text)
    draft = migrate([str(tmp_path / file)])
    assert "weft does not know it" not in draft and "have no such key" not in draft, draft
    sections = yaml.safe_load(draft)
    for section, keys in expected.items():
        assert {key: sections[section].get(key) for key in keys} == keys, draft
    (tmp_path / "mine.yaml").write_text(draft)
    words = ["data.path=org/d"] if sections["data"].get("path") is None else []
    load_config([str(tmp_path / "mine.yaml")], words, schema_of(sections))
