"""Names of axolotl's YAML; it takes those of transformers' TrainingArguments, too, which trl.py has."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import ITSELF, PREFERENCES, REINFORCEMENT, Trainer, same

_INTRODUCTION = """\
One file replaces one file; `weft` starts its own ranks, without `accelerate launch` or DeepSpeed.

```yaml file=theirs.yaml
# axolotl train this.yaml                    # weft sft this.yaml
base_model: Qwen/Qwen3-0.6B                  # model: {path: Qwen/Qwen3-0.6B}
datasets:
  - path: my/chats                           # data: {path: my/chats}
    type: chat_template
    field_messages: conversations            # data.columns, of messages
sequence_len: 4096                           # data: {max_length: 4096, long_documents: drop}
sample_packing: true                         # always
micro_batch_size: 2                          # step: {tokens: 262144}: 2 x 4 x 4096 x 8 GPUs
gradient_accumulation_steps: 4
num_epochs: 1                                # train: {epochs: 1}, the default
optimizer: adamw_torch_fused                 # optimizer: {name: adamw}, the default
learning_rate: 2.0e-5                        # optimizer: {lr: 2.0e-5}
adapter: lora                                # lora: {rank: 16, alpha: 32}
lora_r: 16
lora_alpha: 32
lora_target_linear: true                     # lora: {targets: all-linear}, the default
```

What is different:

- With `sample_packing` a batch of axolotl is a number of full rows, so that a step is a number of tokens
  (`step.tokens`). Without it a step is a number of documents.
- A document longer than `data.max_length` is an error, which counts them; axolotl drops them. `data.long_documents`
  decides.
- Conversations are rendered by the tokenizer's own chat template, whatever `type` the dataset has: the prompts of
  `type: alpaca` are not written as Alpaca's text.
- Quantised bases and 8-bit optimizers are not in this version: `qlora` becomes LoRA on the base as it is.
- Held-out documents are a file of their own (`eval.path`); `val_set_size` takes a share of the training data.
- Intervals count optimizer steps, not shares of an epoch. The last step is always saved.
"""

AXOLOTL = Trainer(
    "axolotl",
    "axolotl",
    _INTRODUCTION,
    {
        "The batch": {
            "micro_batch_size": say.MICRO_BATCH,
            "gradient_accumulation_steps": say.BATCH,
            "eval_batch_size": say.EVAL_BATCH,
            "sample_packing": say.PACKED,
            "eval_sample_packing": say.PACKED,
            "sample_packing_group_size": say.PACKED,
            "sample_packing_bin_size": say.PACKED,
            "pad_to_sequence_len": say.PADDED,
            "group_by_length": say.BALANCED,
        },
        "Length": {
            "sequence_len": say.LENGTH,
            "eval_sequence_len": say.LENGTH,
            "excess_length_strategy": say.TRUNCATION,
            "min_sample_len": say.SAMPLES,
        },
        "The model": {
            "base_model": say.MODEL,
            "base_model_config": say.MODEL,
            "model_type": say.MODEL,
            "revision_of_model": say.REVISION,
            "is_llama_derived_model": say.MODEL,
            "is_mistral_derived_model": say.MODEL,
            "tokenizer_type": say.TOKENIZER,
            "tokenizer_config": say.TOKENIZER,
            "tokenizer_use_fast": say.TOKENIZER,
            "resize_token_embeddings_to_32x": say.TOKENIZER,
            "special_tokens.*": say.EOS,
            "tokens": say.TOKENIZER,
            "flash_attention": say.ATTENTION,
            "sdp_attention": say.ATTENTION,
            "xformers_attention": say.ATTENTION,
            "flex_attention": say.ATTENTION,
            "eager_attention": say.ATTENTION,
            "flash_attn_cross_entropy": say.CHUNKED,
            "flash_attn_rms_norm": say.EXPERT_KERNEL,
            "flash_attn_fuse_qkv": say.EXPERT_KERNEL,
            "flash_attn_fuse_mlp": say.EXPERT_KERNEL,
            "liger_rope": say.EXPERT_KERNEL,
            "liger_rms_norm": say.EXPERT_KERNEL,
            "liger_glu_activation": say.EXPERT_KERNEL,
            "liger_layer_norm": say.EXPERT_KERNEL,
            "liger_fused_linear_cross_entropy": say.CHUNKED,
            "plugins": say.EXPERT_KERNEL,
            "strict": say.BUILT,
            "unfrozen_parameters": say.FREEZE,
        },
        "The data": {
            "datasets": say.DATA,
            "datasets.type": say.TEMPLATE,
            "test_datasets": say.EVAL_DATA,
            "val_set_size": say.HELD_OUT,
            "dataset_prepared_path": say.CACHE,
            "dataset_processes": say.WORKERS,
            "shuffle_merged_datasets": say.SHUFFLE,
            "train_on_inputs": say.MASKED,
            "chat_template_jinja": say.TEMPLATE,
            "default_system_message": say.COLUMNS,
            "eval_table_size": say.LOGGING,
        },
        "The optimizer and its schedule": {
            "optimizer": say.OPTIMIZER,
            "lr_scheduler": say.SCHEDULE,
            "cosine_min_lr_ratio": say.MIN_LR_RATIO,
            "cosine_constant_lr_ratio": say.WSD_RATIO,
            "embedding_lr": say.GROUPS,
            "embedding_lr_scale": say.GROUPS,
            "loss_watchdog_threshold": say.NONFINITE,
            "loss_watchdog_patience": say.NONFINITE,
        },
        "The length of the run": {"num_epochs": say.EPOCHS, "relora_steps": say.LORA_KIND},
        "What comes out": {
            "saves_per_epoch": say.PER_EPOCH,
            "evals_per_epoch": say.PER_EPOCH,
            "save_first_step": say.SAVE,
            "wandb_project": say.PROJECT,
            "wandb_name": say.RUN_NAME,
            "wandb_entity": say.TRACKER,
            "wandb_watch": say.TRACKER,
            "wandb_log_model": say.TRACKER,
            "wandb_run_id": say.TRACKER,
        },
        "LoRA": {
            "adapter": say.METHOD,
            "lora_model_dir": say.LORA_PATH,
            "lora_target_linear": say.LORA_TARGETS,
            "lora_fan_in_fan_out": say.LORA_TARGETS,
            "lora_mlp_kernel": say.EXPERT_KERNEL,
            "lora_qkv_kernel": say.EXPERT_KERNEL,
            "lora_o_kernel": say.EXPERT_KERNEL,
            "peft_use_dora": say.LORA_KIND,
            "peft_use_rslora": say.RSLORA,
        },
        "Ranks": {
            "local_rank": say.RANKS,
            "fsdp_final_state_dict_type": say.SAVE_FORMAT,
            "sequence_parallel_degree": say.CP,
            "tensor_parallel_size": say.TP,
        },
        "Not supervised fine-tuning": {"rl": say.TASK, "rl_beta": say.TASK, "reward_model": say.TASK, "trl.*": say.RL},
    },
    {
        "data.max_length": 512,
        "data.long_documents": "drop",
        "optimizer.weight_decay": 0.0,
        "optimizer.betas": [0.9, 0.999],
        "schedule.min_lr_ratio": 0.0,
    },
    signs=(
        "base_model", "base_model_config", "sequence_len", "sample_packing", "micro_batch_size", "datasets",
        "dataset_prepared_path", "val_set_size", "adapter", "lora_target_linear", "train_on_inputs",
        "pad_to_sequence_len", "evals_per_epoch", "saves_per_epoch",
    ),
    tasks={
        "rl": {"grpo": REINFORCEMENT, "*": PREFERENCES},
        "reward_model": {"true": PREFERENCES},
        "process_reward_model": {"true": PREFERENCES},
    },
    moves={
        "sequence_len": "data.max_length",
        "excess_length_strategy": "data.long_documents",
        "cosine_min_lr_ratio": "schedule.min_lr_ratio",
        "dataset_processes": "data.workers",
        "shuffle_merged_datasets": "data.shuffle",
        "dp_shard_size": "mesh.dp_shard",
        "batch_size": "step.documents",
        "early_stopping_patience": "eval.patience",
        "lora_model_dir": "lora.path",
        "peft_use_rslora": "lora.rslora",
        "wandb_name": "track.name",
    },
    means={
        "train_on_inputs": {"true": {"data.train_on": "all"}, "false": {}},
        "bf16": {"auto": {}, "true": {"fsdp.param_dtype": "bf16"}, "false": {},
                 "full": {"fsdp.param_dtype": "bf16", "fsdp.master_dtype": "bf16"}},
        "gradient_checkpointing": {"true": {"model.recompute": "full"}, "false": {},
                                   "offload": {"model.recompute": "full", "": say.ACTIVATION_OFFLOAD}},
        "wandb_project": {"*": {"track.to": ["wandb"], "track.project": ITSELF}},
        "chat_template": {"chatml": {"data.chat_template": "chatml"}, "tokenizer_default": {}},
        "adapter": {"lora": {}, "qlora": {"": say.QUANTISED}},
        "lora_target_linear": {"true": {"lora.targets": "all-linear"}, "false": {}},
        "excess_length_strategy": {"raise": {"data.long_documents": "error"}},
        **same(("load_in_8bit", "load_in_4bit", "rl", "peft_use_dora"), {"false": {}}),
    },
    per_device={"micro_batch_size": 1, "gradient_accumulation_steps": 1},
    packing=("sample_packing",),
    lora=("adapter", ("lora", "qlora")),
)  # fmt: skip
