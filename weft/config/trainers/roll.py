"""Names of ROLL: the SFT pipeline's config, model_args, training_args, data_args and strategy_config of FSDP2."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import PREFERENCES, REINFORCEMENT, Trainer, same

_INTRODUCTION = """\
ROLL's worker sections (`sft_train.training_args` and so on) become weft's sections; Ray is for `weft rl` alone, which
starts it.

```yaml file=theirs.yaml
# ROLL                                            # weft
pretrain: Qwen/Qwen3-4B                           # model: {path: Qwen/Qwen3-4B}
sequence_length: 4096                             # data: {max_length: 4096}
sft_train:
  model_args: {dtype: bf16}                       # fsdp: {param_dtype: bf16}, the default on accelerators
  training_args:
    per_device_train_batch_size: 1                # step: {documents: 256}: 1 x 32 x 8 GPUs
    gradient_accumulation_steps: 32
    learning_rate: 1.0e-5                         # optimizer: {lr: 1.0e-5}
  data_args: {file_name: data/chats.json}         # data: {path: data/chats.json}
  strategy_args:
    strategy_name: fsdp2_train                    # the only one
    strategy_config: {fsdp_size: 8}               # mesh: {dp_shard: 8}
  device_mapping: list(range(0,8))                # --nproc 8
```

What is different:

- `param_dtype` in ROLL is also the dtype of the weights that the optimizer steps. In weft these are fp32 masters
  (`fsdp.master_dtype`), and `fsdp.param_dtype` is the dtype of compute.
- Documents are packed; ROLL pads each to `sequence_length`.
- A batch is a number of documents over all ranks; the loss is the mean over its trained tokens.
- Resuming restores weights, optimizer state, random numbers and the place in the data, on any number of GPUs.
- A key that has no effect is refused. ROLL accepts any key.
- The loss falls on all assistant turns; ROLL trains single turns of instruction, input and output.
"""

ROLL = Trainer(
    "roll",
    "ROLL",
    _INTRODUCTION,
    {
        "The batch": {
            "per_device_train_batch_size": say.BATCH,
            "gradient_accumulation_steps": say.BATCH,
            "infer_batch_size": say.EVAL_BATCH,
            "val_batch_size": say.EVAL_BATCH,
            "use_sequence_packing": say.PACKED,
            "use_dynamic_batching_in_train": say.PACKED,
            "max_tokens_per_microbatch_in_train": say.TOKEN_BUDGET,
            "use_remove_padding": say.PACKED,
            "balance_batch": say.BALANCED,
            "loss_agg_mode": say.TOKEN_MEAN,
        },
        "Length": {
            "sequence_length": say.LENGTH,
            "cutoff_len": say.LENGTH,
        },
        "The model": {
            "pretrain": say.MODEL,
            "model_name_or_path": say.MODEL,
            "model_type": say.MODEL,
            "dtype": say.DTYPE,
            "param_dtype": say.DTYPE,
            "reduce_dtype": say.REDUCE_DTYPE,
            "bf16": say.DTYPE,
            "attn_implementation": say.ATTENTION,
            "flash_attn": say.ATTENTION,
            "disable_gradient_checkpointing": say.RECOMPUTE,
            "gradient_checkpointing_use_reentrant": say.RECOMPUTE_HOW,
            "recompute_granularity": say.RECOMPUTE,
            "apply_tiled_mlp": say.RECOMPUTE,
            "tiled_num_shards": say.RECOMPUTE,
            "freeze_module_prefix": say.FREEZE,
            "moe_aux_loss_coef": say.ROUTER_COEFFICIENT,
            "moe_use_grouped_mm": say.EXPERT_KERNEL,
            "apply_expert_patch": say.ALL_UNITS,
        },
        "The data": {
            "data_args.file_name": say.DATA,
            "file_name": say.DATA,
            "dataset_dir": say.DATA,
            "validation.data_args.file_name": say.EVAL_DATA,
            "prompt_key": say.COLUMNS,
            "query_key": say.COLUMNS,
            "response_key": say.COLUMNS,
            "system_key": say.COLUMNS,
            "data_args.messages": say.COLUMNS,
            "data_args.prompt": say.COLUMNS,
            "template": say.TEMPLATE,
            "global_template": say.TEMPLATE,
            "preprocessing_num_workers": say.WORKERS,
            "interleave_probs": say.MIXTURE,
            "domain_interleave_probs.*": say.MIXTURE,
        },
        "The optimizer and its schedule": {
            "learning_rate": say.LR,
            "weight_decay": say.DECAY,
            "adam_beta1": say.BETAS,
            "adam_beta2": say.BETAS,
            "adam_epsilon": say.EPS,
            "max_grad_norm": say.CLIP,
            "lr_scheduler_type": say.SCHEDULE,
            "warmup_steps": say.WARMUP,
            "warmup_ratio": say.WARMUP_RATIO,
        },
        "The length of the run": {
            "num_train_epochs": say.EPOCHS,
            "max_steps": say.STEPS,
            "seed": say.SEED,
            "rpc_timeout": say.TIMEOUT,
        },
        "What comes out": {
            "output_dir": say.OUTPUT,
            "logging_dir": say.LOGGING,
            "logging_steps": say.LOGGING,
            "exp_name": say.RUN_NAME,
            "track_with": say.TRACKER,
            "tracker_kwargs.*": say.TRACKER,
            "save_steps": say.SAVE,
            "checkpoint_config.*": say.SAVE,
            "save_only_model": say.WEIGHTS_ONLY,
            "async_save_ckpt": say.ASYNC,
            "async_upload": say.UPLOAD,
            "keep_local_file": say.KEEP,
            "max_ckpt_to_keep": say.KEEP,
            "eval_steps": say.EVAL,
            "resume_from_checkpoint": say.RESUME,
        },
        "LoRA": {
            "lora_rank": say.LORA,
            "lora_alpha": say.LORA_ALPHA,
            "lora_dropout": say.LORA_DROPOUT,
            "lora_target": say.LORA_TARGETS,
            "additional_target": say.LORA_SAVED,
            "autocast_adapter_dtype": say.MASTERS,
        },
        "Ranks and FSDP": {
            "fsdp_size": say.SHARD,
            "num_gpus_per_node": say.RANKS,
            "device_mapping": say.DEVICES,
            "strategy_name": say.BACKEND,
            "reshard_after_forward": say.RESHARD,
            "wrap_policy": say.WRAP,
            "moe_experts": say.WRAP,
            "wrap_embeddings": say.WRAP,
            "wrap_lm_output": say.WRAP,
            "transformer_layer_cls_to_wrap": say.WRAP,
            "forward_prefetch": say.PREFETCH,
            "offload_policy": say.OFFLOAD,
            "is_offload_states": say.OFFLOAD,
            "is_offload_optimizer_states_in_train_step": say.OFFLOAD,
            "reduce_scatter_during_grad_accumulation": say.REDUCE,
            "use_distributed_optimizer": say.BACKEND,
            "use_batched_model_update": say.RL,
            "model_update_buffer_size_mb": say.RL,
            "additional_configs.*": say.BACKEND,
            "sequence_parallel": say.AXIS_DETAIL,
            "ulysses_size": say.CP,
            "context_parallel_size": say.CP,
            "tensor_model_parallel_size": say.TP,
            "pipeline_model_parallel_size": say.PP,
            "expert_model_parallel_size": say.EP,
            "ep_size": say.EP,
            "efsdp_size": say.EP,
            "system_envs.*": say.ENVIRONMENT,
            "hydra.*": say.OUTPUT,
        },
        "Not supervised fine-tuning": {
            "actor_infer.*": say.RL,
            "reference.*": say.RL,
            "critic.*": say.RL,
            "rewards.*": say.REWARD,
            "num_return_sequences_in_group": say.RL,
            "adv_estimator": say.RL,
            "pg_variant": say.RL,
            "init_kl_coef": say.RL,
            "reward_pretrain": say.REWARD,
        },
    },
    {
        "model.recompute": "full",
        "optimizer.lr": 5.0e-5,
        "optimizer.weight_decay": 0.0,
        "optimizer.betas": [0.9, 0.999],
        "schedule.name": "linear",
        "schedule.warmup_ratio": 0.0,
        "schedule.min_lr_ratio": 0.0,
        "data.shuffle": False,
        "checkpoint.every": 500,
    },
    signs=(
        "pretrain",
        "sequence_length",
        "num_gpus_per_node",
        "query_key",
        "track_with",
        "rpc_timeout",
        "sft_train.*",
        "actor_train.*",
        "actor_infer.*",
        "rewards.*",
    ),
    tasks={
        **same(("adv_estimator", "actor_infer.*", "rewards.*", "custom_envs.*"), {"*": REINFORCEMENT}),
        **same(("chosen_key", "rejected_key"), {"*": PREFERENCES}),
    },
)
