"""Names of torchtune's recipes (full and LoRA fine-tuning)."""

from __future__ import annotations

from typing import Any

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import ITSELF, PREFERENCES, REINFORCEMENT, Trainer, same

_INTRODUCTION = """\
One config replaces the recipe's. There are no `_component_`s to choose: model, tokenizer and loss are those of the
HuggingFace directory.

```yaml file=theirs.yaml
# tune run full_finetune_distributed --config this.yaml    # weft sft this.yaml
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: models/llama/original/tokenizer.model              # the one in model.path
  max_seq_len: 4096                                        # data: {max_length: 4096, long_documents: truncate}
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: chats.json                                   # data: {path: chats.json}
  conversation_column: conversations                       # data.columns, of messages
  conversation_style: sharegpt
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: models/llama                             # model: {path: models/llama}
batch_size: 2                                              # step: {documents: 64}: 2 x 4 x 8 GPUs
gradient_accumulation_steps: 4
epochs: 1                                                  # train: {epochs: 1}, the default
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5                                                 # optimizer: {lr: 2.0e-5}
dtype: bf16                                                # fsdp: {param_dtype: bf16, master_dtype: bf16}
enable_activation_checkpointing: True                      # model: {recompute: full}
```

What is different:

- The model is whatever `model.path` names, a HuggingFace directory or hub id; checkpoints are such directories, too.
- `dtype: bf16` of torchtune keeps weights and optimizer state in bf16. weft keeps them in fp32 and computes in bf16;
  the draft has `fsdp.master_dtype: bf16`, which you may want to leave out.
- Without an `lr_scheduler` torchtune's rate is constant, and gradients are clipped only with `clip_grad_norm`.
- Conversations are rendered by the tokenizer's own chat template; the prompts of `alpaca_dataset` are not written as
  Alpaca's text.
- With `packed` a batch is a number of full rows, so that a step is a number of tokens (`step.tokens`).
"""

_COSINE = {"schedule.name": "cosine"}
_ALPACA = "conversations are rendered by the chat template: prompts are not written as Alpaca's text."


def _components(**found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"torchtune.datasets.{name}": meaning for name, meaning in found.items()}


TORCHTUNE = Trainer(
    "torchtune",
    "torchtune",
    _INTRODUCTION,
    {
        "The batch": {
            "batch_size": say.BATCH,
            "gradient_accumulation_steps": say.BATCH,
            "dataset.packed": say.PACKED,
            "dataset_val.packed": say.PACKED,
            "batch_size_val": say.EVAL_BATCH,
        },
        "Length": {"max_seq_len": say.LENGTH},
        "The model": {
            "model._component_": say.MODEL,
            "checkpointer._component_": say.MODEL,
            "checkpointer.checkpoint_dir": say.MODEL,
            "checkpointer.checkpoint_files": say.MODEL,
            "checkpointer.model_type": say.MODEL,
            "checkpointer.safe_serialization": say.SAVE_FORMAT,
            "tokenizer._component_": say.TOKENIZER,
            "tokenizer.path": say.TOKENIZER,
            "tokenizer.merges_file": say.TOKENIZER,
            "tokenizer.prompt_template": say.TEMPLATE,
            "compile": say.COMPILE,
            "dtype": say.DTYPE,
            "mixed_precision.*": say.DTYPE,
            "enable_activation_checkpointing": say.RECOMPUTE,
            "enable_activation_offloading": say.ACTIVATION_OFFLOAD,
            "ac_mode": say.RECOMPUTE_HOW,
            "ac_option": say.RECOMPUTE_HOW,
            "quantizer.*": say.QUANTISED,
        },
        "The data": {
            "dataset": say.DATASET,
            "dataset._component_": say.DATASET,
            "dataset.source": say.DATA,
            "dataset.data_files": say.DATA,
            "dataset.split": say.SPLIT,
            "dataset.conversation_column": say.COLUMNS,
            "dataset.conversation_style": say.COLUMNS,
            "dataset.column": say.COLUMNS,
            "dataset.column_map.*": say.COLUMNS,
            "dataset.new_system_prompt": say.COLUMNS,
            "dataset.train_on_input": say.MASKED,
            "dataset_val.*": say.EVAL_DATA,
            "dataset.*": say.DATA,
            "shuffle": say.SHUFFLE,
            "collate_fn": say.BUILT,
        },
        "The optimizer and its schedule": {
            "optimizer._component_": say.OPTIMIZER,
            "optimizer.fused": say.OPTIMIZER_KERNEL,
            "optimizer.foreach": say.OPTIMIZER_KERNEL,
            "optimizer_in_bwd": say.OPTIMIZER_KERNEL,
            "clip_grad_norm": say.CLIP,
            "lr_scheduler._component_": say.SCHEDULE,
            "num_warmup_steps": say.WARMUP,
            "lr_scheduler.num_cycles": say.CYCLES,
            "loss._component_": say.OBJECTIVE,
            "loss.num_output_chunks": say.CHUNKED,
        },
        "The length of the run": {
            "epochs": say.EPOCHS,
            "max_steps_per_epoch": say.STEPS,
            "run_val_every_n_steps": say.EVAL,
        },
        "What comes out": {
            "checkpointer.output_dir": say.SAVE_FOLDER,
            "recipe_checkpoint": say.RESUME,
            "should_load_recipe_state": say.RESUME,
            "keep_last_n_checkpoints": say.KEEP,
            "save_every_n_steps": say.SAVE,
            "save_adapter_weights_only": say.WEIGHTS_ONLY,
            "save_last_epoch_only": say.SAVE_MODE,
            "enable_async_checkpointing": say.ASYNC,
            "metric_logger._component_": say.TRACKER,
            "metric_logger.*": say.TRACKER,
            "log_every_n_steps": say.LOGGING,
            "log_peak_memory_stats": say.LOGGING,
            "log_level": say.LOGGING,
            "profiler.*": say.PROFILE,
        },
        "LoRA": {
            "lora_attn_modules": say.LORA_TARGETS,
            "apply_lora_to_mlp": say.LORA_TARGETS,
            "apply_lora_to_output": say.LORA_TARGETS,
            "use_dora": say.LORA_KIND,
            "quantize_base": say.QUANTISED,
        },
        "Ranks and FSDP": {
            "device": say.DEVICE,
            "cudnn_deterministic_mode": say.DETERMINISTIC,
            "fsdp_cpu_offload": say.OFFLOAD,
            "fsdp_sharding_strategy": say.RESHARD,
            "custom_sharded_layers": say.WRAP,
            "memory_efficient_fsdp_wrap": say.WRAP,
            "data_parallel_shard_dim": say.SHARD,
            "data_parallel_replicate_dim": say.REPLICATE,
            "tensor_parallel_dim": say.TP,
            "tensor_parallel_plan.*": say.AXIS_DETAIL,
            "context_parallel_dim": say.CP,
        },
    },
    {
        "optimizer.weight_decay": 0.01,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.max_grad_norm": None,
        "schedule.name": "constant",
        "schedule.warmup_ratio": 0.0,
        "schedule.min_lr_ratio": 0.0,
        "lora.alpha": 16,
    },
    signs=("*_component_", "checkpointer.checkpoint_dir", "checkpointer.checkpoint_files", "tokenizer.max_seq_len",
           "max_steps_per_epoch", "enable_activation_checkpointing", "metric_logger.*"),
    tasks={
        "loss._component_": {
            "torchtune.rlhf.loss.*": PREFERENCES,
            "torchtune.modules.loss.dpo*": PREFERENCES,
            "torchtune.dev.grpo.*": REINFORCEMENT,
            "torchtune.dev.rl.*": REINFORCEMENT,
            "torchtune.rlhf.loss.ppo*": REINFORCEMENT,
        },
        "dataset._component_": {"*preference*": PREFERENCES, "*hh_rlhf*": PREFERENCES,
                                "*stack_exchange_paired*": PREFERENCES,
                                "torchtune.dev.*": REINFORCEMENT},
        "ref_policy_checkpointer.*": {"*": REINFORCEMENT},
        "grpo_samples": {"*": REINFORCEMENT},
    },
    moves={
        "checkpointer.checkpoint_dir": "model.path",
        "dataset.source": "data.path",
        "dataset.data_files": "data.path",
        "dataset.split": "data.split",
        "shuffle": "data.shuffle",
        "clip_grad_norm": "optimizer.max_grad_norm",
        "num_warmup_steps": "schedule.warmup_steps",
        "epochs": "train.epochs",
        "compile": "model.compile",
        "keep_last_n_checkpoints": "checkpoint.keep",
        "save_every_n_steps": "checkpoint.every",
        "data_parallel_shard_dim": "mesh.dp_shard",
        "data_parallel_replicate_dim": "mesh.dp_replicate",
    },
    means={
        "max_seq_len": {"*": {"data.max_length": ITSELF, "data.long_documents": "truncate"}},
        "checkpointer._component_": same(
            ("torchtune.training.fullmodelhfcheckpointer", "torchtune.utils.fullmodelhfcheckpointer"), {}
        ),
        "dataset._component_": _components(
            alpaca_dataset={"data.path": "tatsu-lab/alpaca", "data.train_on": "all", "": _ALPACA},
            alpaca_cleaned_dataset={"data.path": "yahma/alpaca-cleaned", "data.train_on": "all", "": _ALPACA},
            chat_dataset={}, instruct_dataset={}, text_completion_dataset={},
        ),
        "dataset.source": same(("json", "csv", "text", "parquet"), {}),
        "dataset.conversation_style": same(("openai", "sharegpt"), {}),
        "dataset.train_on_input": {"true": {"data.train_on": "all"}, "false": {"data.train_on": "answers"}},
        "dtype": {
            "bf16": {"fsdp.param_dtype": "bf16", "fsdp.master_dtype": "bf16"},
            "fp32": {"fsdp.param_dtype": "fp32"},
        },
        "mixed_precision.*": {"false": {}},
        "enable_activation_checkpointing": {"true": {"model.recompute": "full"}, "false": {}},
        "optimizer._component_": {"torch.optim.adamw": {"optimizer.name": "adamw"},
                                  "torch.optim.sgd": {"optimizer.name": "sgd"}},
        "lr_scheduler._component_": {f"torchtune.{home}.get_cosine_schedule_with_warmup": _COSINE
                                     for home in ("training.lr_schedulers", "modules", "modules.lr_schedulers")},
        "loss._component_": same(
            ("torch.nn.crossentropyloss", "torchtune.modules.loss.cewithchunkedoutputloss",
             "torchtune.modules.loss.linearcrossentropyloss"), {}
        ),
        "metric_logger._component_": {
            "torchtune.training.metric_logging.wandblogger": {"track.to": ["wandb"]},
            "torchtune.training.metric_logging.tensorboardlogger": {"track.to": ["tensorboard"]},
            "torchtune.training.metric_logging.disklogger": {},
        },
        **same(("use_dora", "quantize_base", "optimizer_in_bwd"), {"false": {}}),
    },
    per_device={"batch_size": 1, "gradient_accumulation_steps": 1},
    packing=("dataset.packed",),
)  # fmt: skip
