"""Kinds of public configs whose drafts did not load, or said something else than the config, reduced to the cause."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.config import load_config
from weft.config.commands import SCHEMAS
from weft.config.migrate import migrate as module
from weft.config.migrate.migrate import migrate
from weft.config.migrate.trainer import TABLES
from weft.errors import UserError

FOREIGN = Path(__file__).parents[1] / "foreign"
NEMO = """
cluster: {gpus_per_node: 8, num_nodes: 1}
checkpointing: {enabled: true, checkpoint_dir: results, save_period: 10, metric_name: null, keep_top_k: 3}
policy:
  model_name: org/model
  train_global_batch_size: 128
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  precision: bfloat16
  max_grad_norm: 1.0
"""
TORCH = """
  dtensor_cfg:
    enabled: true
    tensor_parallel_size: 2
    lora_cfg: {enabled: false, dim: 8, alpha: 32, target_modules: [], match_all_linear: true}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 4, optimizer: {lr: 9.0e-1}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.1, betas: [0.9, 0.98], eps: 1.0e-5}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 20}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - {milestones: [20]}
"""
MEGATRON = """
  dtensor_cfg: {enabled: true, tensor_parallel_size: 8}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 4
    optimizer: {optimizer: adam, lr: 2.0e-6, min_lr: 2.0e-7, weight_decay: 0.01, adam_beta1: 0.9, adam_beta2: 0.999,
                adam_eps: 1.0e-8}
    scheduler: {lr_decay_style: cosine, lr_decay_iters: 1000, lr_warmup_iters: 13, lr_warmup_init: 2.0e-7}
"""
PAIRS = (
    "\ndata: {shuffle: true, train: {dataset_name: HelpSteer3, split: train}, validation: {dataset_name: HelpSteer3}}\n"
)
DPO = (
    "\ndpo: {max_num_epochs: 1, max_num_steps: 150, reference_policy_kl_penalty: 0.05, sft_loss_weight: 0.5, seed: 7}\n"
)
MATH = "\ndata: {train: {dataset_name: DeepScaler}, validation: {dataset_name: AIME2024}}\n"
RM = "\nrm: {max_num_epochs: 1, val_period: 16}\n"
SFT = "\nsft: {max_num_steps: 60, val_period: 10, seed: 42}\n"
QLORA = """
base_model: org/model
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_target_linear: true
torch_compile: true
fsdp_config: {offload_params: true}
datasets: [{path: org/twice, type: alpaca}, {path: org/twice, type: alpaca}]
micro_batch_size: 1
learning_rate: 0.0002
"""
GRPO = """
  generation: {backend: vllm, max_new_tokens: 256, temperature: 0.9, val_temperature: 0.6, val_top_k: null}
data: {train: {dataset_name: OpenMathInstruct-2}, validation: {dataset_name: AIME2024}}
env: {math: {num_workers: 8}}
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_num_steps: 60
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_num_generations_per_prompt: 4
"""
AUTOMODEL = """
recipe: {_target_: nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction}
step_scheduler: {global_batch_size: 64, local_batch_size: 8, max_steps: 100}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: org/model}
packed_sequence: {packed_sequence_size: 0}
dataset: {path_or_dataset_id: org/data, split: "0.99, 0.01, 0.00"}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5}
"""
HEREDOC = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --data.max_len 2048 \\
   --data.dataset org/questions \\
   --train.batch_size 256 \\
   --model.model_name_or_path org/model \\
   --ckpt.save_steps -1 \\
   --adam.lr 5e-6 \\
   --ds.packing_samples
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""

PAIRS_OF_OPENRLHF = """
deepspeed --module openrlhf.cli.train_dpo --data.max_len 8192 --data.dataset org/pairs --data.prompt_key question \\
   --train.batch_size 256 --train.micro_batch_size 1 --model.model_name_or_path org/model --adam.lr 5e-7 \\
   --model.label_smoothing 0.1 --model.nll_loss_coef 0.2 --ref.offload --ref.model_name_or_path org/first
"""
TUNE_DPO = """
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: 8, lora_alpha: 16}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/tokenizer.model, max_seq_len: 1024}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: org/model}
ref_checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: org/first}
dataset: {_component_: torchtune.datasets.stack_exchange_paired_dataset}
batch_size: 4
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, weight_decay: 0.05, lr: 5.0e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
epochs: 1
"""


def draft(tmp_path: Path, text: str, file: str = "theirs.yaml") -> tuple[str, str]:
    """(The draft, weft's command for it)."""
    (tmp_path / file).write_text(text)
    made = migrate([str(tmp_path / file)])
    return made, made.partition("with `weft ")[2].split()[0]


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "NeMo-RL's DPO": ("a.yaml", NEMO + TORCH + PAIRS + DPO, "dpo", {
        "preference.beta": 0.05, "preference.loss": ("sigmoid", "sft"), "preference.weights": (1.0, 0.5),
        "train.steps": 150, "train.seed": 7, "mesh.tp": 2, "optimizer.lr": 5e-6, "schedule.name": "constant",
        "schedule.warmup_steps": 20, "lora.rank": None, "data.path": "nvidia/HelpSteer3", "data.subset": "preference",
    }),
    "NeMo-RL's reward model": ("a.yaml", NEMO + TORCH + PAIRS + RM, "reward", {
        "reward.loss": "bradley_terry", "train.epochs": 1, "eval.every": 16, "optimizer.betas": (0.9, 0.98),
    }),
    "NeMo-RL's SFT by Megatron": ("a.yaml", NEMO + MEGATRON + MATH + SFT, "sft", {
        "optimizer.lr": 2e-6, "optimizer.weight_decay": 0.01, "optimizer.betas": (0.9, 0.999), "mesh.tp": 4,
        "schedule.name": "cosine", "schedule.warmup_steps": 13, "schedule.min_lr_ratio": 0.1,
        "data.path": "agentica-org/DeepScaleR-Preview-Dataset",
    }),
    "NeMo-RL's REINFORCE++": (
        "a.yaml",
        NEMO + TORCH + GRPO + "  adv_estimator: {name: reinforce_plus_plus, minus_baseline: false}\n"
        "loss_fn: {reference_policy_kl_penalty: 0, use_cispo: true}\n",
        "rl",
        {"rl.advantage": "reinforce++", "rl.gamma": 1.0, "rl.policy_loss": "cispo", "rl.minibatches": 4,
         "eval.samples": 4, "eval.temperature": 0.6, "eval.top_k": 0, "rollout.temperature": 0.9},
    ),
    "NeMo-RL's estimator before its older keys": (
        "a.yaml",
        NEMO + TORCH + GRPO + "  adv_estimator: {use_leave_one_out_baseline: true, normalize_rewards: false}\n"
        "loss_fn: {reference_policy_kl_penalty: 0, use_importance_sampling_correction: true,\n"
        "  truncated_importance_sampling_type: icepop, truncated_importance_sampling_ratio: 5.0,\n"
        "  truncated_importance_sampling_ratio_min: 0.5}\n",
        "rl",
        {"rl.advantage": "rloo", "rl.correction": "icepop", "rl.correction_limits": (0.5, 5.0)},
    ),
    "Automodel without packing": ("a.yaml", AUTOMODEL, "sft", {
        "step.max_tokens_per_device": 8192, "step.documents": 64, "data.path": "org/data", "data.split": None,
    }),
    "axolotl's QLoRA": ("a.yaml", QLORA, "sft", {
        "lora.base": "nf4", "fsdp.cpu_offload": False, "model.compile": "auto",
    }),
    "OpenRLHF's script with a document": ("a.sh", HEREDOC, "sft", {
        "model.path": "org/model", "step.documents": 256, "optimizer.lr": 5e-6, "data.max_length": 2048,
    }),
    "OpenRLHF's DPO": ("a.sh", PAIRS_OF_OPENRLHF, "dpo", {
        "preference.loss": ("sigmoid", "sft"), "preference.weights": (1.0, 0.2), "preference.beta": 0.1,
        "preference.label_smoothing": 0.1, "reference.path": "org/first", "reference.cpu_offload": True,
        "step.documents": 256, "optimizer.lr": 5e-7, "optimizer.betas": (0.9, 0.95), "schedule.name": "cosine",
        "schedule.warmup_ratio": 0.03, "schedule.min_lr_ratio": 0.1, "optimizer.weight_decay": 0.0,
        "data.long_documents": "truncate", "data.columns": {"prompt": "question"},
    }),
    "OpenRLHF's IPO, by its former names": (
        "a.sh",
        "python -m openrlhf.cli.train_dpo --pretrain org/model --ipo --beta 0.2 --packing_samples --dataset a/b\n",
        "dpo",
        {"preference.loss": "ipo", "preference.beta": 0.2, "optimizer.lr": 1e-5, "data.max_length": 512,
         "step.documents": 128},
    ),
    "OpenRLHF's reward model": (
        "a.sh",
        "deepspeed --module openrlhf.cli.train_rm --model.model_name_or_path org/model --data.dataset org/pairs "
        "--model.loss_type logexp --train.batch_size 64 --ds.zero_stage 3\n",
        "reward",
        {"reward.loss": "bradley_terry", "optimizer.lr": 9e-6, "step.documents": 64, "data.max_length": 512},
    ),
    "torchtune's DPO": ("a.yaml", TUNE_DPO + "loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.05}\n", "dpo", {
        "preference.loss": "sigmoid", "preference.beta": 0.05, "reference.path": "org/first", "optimizer.lr": 5e-4,
        "optimizer.max_grad_norm": None, "schedule.name": "cosine", "schedule.warmup_steps": 100,
        "schedule.min_lr_ratio": 0.0, "lora.rank": 8, "data.path": "lvwerra/stack-exchange-paired",
        "data.columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        "data.max_length": 1024, "data.long_documents": "truncate",
    }),
    "torchtune's RSO": ("a.yaml", TUNE_DPO + "loss: {_component_: torchtune.rlhf.loss.RSOLoss, gamma: 0.3}\n", "dpo", {
        "preference.loss": "hinge", "preference.beta": 0.3,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_draft_loads_and_means_the_same(name: str, tmp_path: Path) -> None:
    file, text, command, expected = CASES[name]
    made, drafted_command = draft(tmp_path, text, file)
    assert drafted_command == command
    (tmp_path / "mine.yaml").write_text(re.sub(r"null  # CONFIRM: write (\S+),.*", r"\1", made))
    config = load_config([str(tmp_path / "mine.yaml")], [], SCHEMAS[command], weights=False)
    got = {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in expected}
    assert got == expected


@pytest.mark.parametrize("file", sorted(path.name for path in FOREIGN.iterdir() if path.suffix in (".sh", ".yaml")))
def test_every_name_of_the_old_config_is_in_its_draft(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an origin, in a note, in the comparison, or in the lists of names without a line of their own."""
    names: list[str] = []
    find_trainer = module._trainer_of

    def noted(settings: dict[str, Any], *others: Any) -> Any:
        names.extend(settings)
        return find_trainer(settings, *others)

    monkeypatch.setattr(module, "_trainer_of", noted)
    text = migrate([str(FOREIGN / file)], 8).replace("-", "_")
    former = {old.replace("-", "_"): new for trainer in TABLES.trainers for old, new in trainer.table.former.items()}
    for name in names:
        leaves = {either.rpartition(".")[2].replace("-", "_") for either in (name, former.get(name.lower(), name))}
        assert any(leaf.removeprefix("no_") in text for leaf in leaves), name


def test_a_script_brings_the_config_file_that_it_starts_with(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "grpo.yaml").write_text(NEMO + TORCH + GRPO)
    (tmp_path / "scripts").mkdir()
    script = "uv run examples/run_grpo.py --config $ROOT/configs/grpo.yaml grpo.num_prompts_per_step=$((4 * (1 + 3)))\n"
    made, command = draft(tmp_path, script, "scripts/start.sh")
    sections = yaml.safe_load(made)
    assert command == "rl" and "grpo.yaml" in made.splitlines()[0]
    assert sections["rl"]["prompts_per_step"] == 16 and sections["rl"]["group_size"] == 16
    (tmp_path / "configs" / "grpo.yaml").unlink()
    made, command = draft(tmp_path, script, "scripts/start.sh")
    assert command == "rl" and "config: the script starts with this file, which was not found" in made


def test_ppo_of_nemo_rl_is_no_fine_tuning(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is a PPO config of NeMo-RL"):
        draft(tmp_path, NEMO + TORCH + "ppo: {num_prompts_per_step: 32}\n")


def test_held_out_data_does_not_replace_the_data(tmp_path: Path) -> None:
    sections = yaml.safe_load(draft(tmp_path, NEMO + TORCH + MATH + SFT)[0])
    assert sections["data"]["path"] == "agentica-org/DeepScaleR-Preview-Dataset"
    assert sections["eval"]["sources"][0]["path"] == "HuggingFaceH4/aime_2024"


def test_a_section_that_is_off_is_named_in_one_line(tmp_path: Path) -> None:
    made = draft(tmp_path, NEMO + TORCH + MATH + SFT)[0]
    assert "policy.megatron_cfg.*: its `enabled` is false" in made.replace("\n#     ", " ")
    assert "megatron_cfg.tensor_model_parallel_size" not in made


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("grpo.adv_estimator.name: gdpo", "advantage: gdpo, which weft does not have ->"),
        ("loss_fn.positive_example_nll_weight: 0.1", "cross entropy of samples with the highest reward: added"),
        ("loss_fn.force_on_policy_ratio: true", "ratio of the policy and the old one: 1 -> to the policy of the"),
        ("loss_fn: {use_importance_sampling_correction: true, truncated_importance_sampling_type: seq-mask-tis,"
         " truncated_importance_sampling_ratio: 1.002, truncated_importance_sampling_ratio_min: 0.999}",
         "0 in samples whose geometric mean is not 0.999 to 1.002"),
    ],
)  # fmt: skip
def test_what_nemo_rl_computes_otherwise_differs(settings: str, words: str, tmp_path: Path) -> None:
    made = draft(tmp_path, f"{NEMO}{TORCH}{GRPO}{settings}\n")[0].replace("\n#     ", " ")
    assert words in made.partition("# The draft is refused until")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (QLORA + "rl: ebft\n", "it is an EBFT config of axolotl"),
        (AUTOMODEL.replace("recipe: {_target_: nemo_automodel.recipes", "recipe: TrainEagle3Recipe  # {"),
         r"for a draft model of speculative decoding \(recipe\), which weft does not train"),
        (AUTOMODEL + "flow_matching: {adapter_type: flux}\n", "for a diffusion model"),
        (AUTOMODEL.replace("train_ft.TrainFinetuneRecipe", "kd.KnowledgeDistillationRecipe"),
         "it is a distillation config of NeMo Automodel"),
        (NEMO + MATH + "\ndistillation: {num_prompts_per_step: 128}\nteacher: {model_name: org/teacher}\n",
         "it is a distillation config of NeMo-RL"),
        ("algorithm: {adv_estimator: gdpo}\nactor_rollout_ref: {model: {path: org/model}}\n",
         "it is a GDPO config of verl"),
    ],
)  # fmt: skip
def test_what_has_no_draft_is_called_what_it_is(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        draft(tmp_path, text)


@pytest.mark.parametrize(("shape", "says"), [("linear", True), ("constant", False), ("constant_with_warmup", True)])
def test_the_draft_says_that_rates_are_one_update_earlier(shape: str, says: bool, tmp_path: Path) -> None:
    warmup = "warmup_steps: 10\n" if "warmup" in shape else ""
    trl = f"model_name_or_path: org/m\ndataset_name: org/d\nlearning_rate: 1.0e-5\nlr_scheduler_type: {shape}\n{warmup}"
    assert ("one update late" in draft(tmp_path, trl)[0].replace("\n#     ", " ")) == says
