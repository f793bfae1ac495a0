"""Names of Miles: its command-line flags (and the keys of its YAML) for supervised fine-tuning with FSDP."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import REINFORCEMENT, Trainer, same

_INTRODUCTION = """\
Flags become keys of sections; there is no Ray to start, and no rollout function stands between the file and the step.

```bash skip: options of Miles, beside what weft calls them file=theirs.sh
--hf-checkpoint /models/Qwen3-4B            # model.path=/models/Qwen3-4B
--prompt-data chats.parquet                 # data.path=chats.parquet
--input-key messages                        # found by its name, or data.columns
--num-epoch 3                               # train.epochs=3
--rollout-batch-size 128                    # step.documents=128
--global-batch-size 128
--use-dynamic-batch-size                    # always
--max-tokens-per-gpu 9216                   # step.max_tokens_per_device=9216
--loss-type sft_loss                        # weft sft
--lr 1e-5 --min-lr 1e-6                     # optimizer.lr=1e-5 schedule.min_lr_ratio=0.1
--lr-decay-style cosine                     # schedule.name=cosine, the default
--lr-warmup-fraction 0.1                    # schedule.warmup_ratio=0.1
--gradient-checkpointing                    # model.recompute=full
--save-interval 1000                        # checkpoint.every=1000
--actor-num-gpus-per-node 8                 # --nproc 8
```

What is different:

- The loss is the mean over the trained tokens of the whole step. `--calculate-per-token-loss` asks for that in Miles.
- Checkpoints are written beside training, as HuggingFace directories, and resume on another number of GPUs.
- No logprob pass runs before a step of supervised fine-tuning.
- Loss masks come from the rendering of the whole conversation, for any chat template; there is no
  `--loss-mask-type` to choose.
- Every interval counts optimizer steps, where Miles counts rollouts.
"""

MILES = Trainer(
    "miles",
    "Miles",
    _INTRODUCTION,
    {
        "The batch": {
            "global_batch_size": say.GLOBAL_BATCH,
            "rollout_batch_size": say.GLOBAL_BATCH,
            "micro_batch_size": say.MICRO_BATCH,
            "use_dynamic_batch_size": say.PACKED,
            "max_tokens_per_gpu": say.TOKEN_BUDGET,
            "log_probs_max_tokens_per_gpu": say.TOKEN_BUDGET,
            "balance_data": say.BALANCED,
            "balance_by_flops": say.BALANCED,
            "calculate_per_token_loss": say.TOKEN_MEAN,
        },
        "Length": {
            "seq_length": say.LENGTH,
            "rollout_max_prompt_len": say.LENGTH,
        },
        "The model": {
            "hf_checkpoint": say.MODEL,
            "load": say.FROM_WEIGHTS,
            "ref_load": say.RL,
            "fp16": say.DTYPE,
            "bf16": say.DTYPE,
            "keep_fp32_master": say.MASTERS,
            "attn_implementation": say.ATTENTION,
            "attention_backend": say.ATTENTION,
            "gradient_checkpointing": say.RECOMPUTE,
            "recompute_granularity": say.RECOMPUTE,
            "recompute_method": say.RECOMPUTE_HOW,
            "recompute_num_layers": say.RECOMPUTE_HOW,
            "log_probs_chunk_size": say.CHUNKED,
            "accumulate_allreduce_grads_in_fp32": say.FP32_SUMS,
            "attention_softmax_in_fp32": say.FP32_SUMS,
            "attention_dropout": say.NO_DROPOUT,
            "hidden_dropout": say.NO_DROPOUT,
            "initial_loss_scale": say.LOSS_SCALE,
            "loss_scale_window": say.LOSS_SCALE,
        },
        "The data": {
            "prompt_data": say.DATA,
            "input_key": say.COLUMNS,
            "label_key": say.COLUMNS,
            "metadata_key": say.COLUMNS,
            "tool_key": say.COLUMNS,
            "multimodal_keys.*": say.IMAGES,
            "apply_chat_template": say.TEMPLATE,
            "apply_chat_template_kwargs.*": say.TEMPLATE_KWARGS,
            "loss_mask_type": say.MASKED,
            "rollout_shuffle": say.SHUFFLE,
            "rollout_function_path": "data is read from `data.path`, and no function runs before a step: leave it out.",
        },
        "The optimizer and its schedule": {
            "optimizer": say.OPTIMIZER,
            "lr": say.LR,
            "weight_decay": say.DECAY,
            "adam_beta1": say.BETAS,
            "adam_beta2": say.BETAS,
            "adam_eps": say.EPS,
            "clip_grad": say.CLIP,
            "min_lr": say.MIN_LR,
            "lr_decay_style": say.SCHEDULE,
            "lr_decay_iters": say.DECAY_TO_END,
            "lr_warmup_iters": say.WARMUP,
            "lr_warmup_fraction": say.WARMUP_RATIO,
            "lr_warmup_init": say.WARMUP_START,
            "lr_wsd_decay_iters": say.WSD_RATIO,
            "lr_wsd_decay_style": say.WSD_SHAPE,
            "use_checkpoint_lr_scheduler": say.RESUME,
            "override_lr_scheduler": say.RESUME,
            "loss_type": say.OBJECTIVE,
        },
        "The length of the run": {
            "num_epoch": say.EPOCHS,
            "num_rollout": say.STEPS,
            "train_iters": say.STEPS,
            "seed": say.SEED,
            "rollout_seed": say.SEED,
            "deterministic_mode": say.DETERMINISTIC,
            "distributed_timeout_minutes": say.TIMEOUT,
        },
        "What comes out": {
            "save": say.OUTPUT,
            "save_interval": say.SAVE,
            "save_hf": say.SAVE_FORMAT,
            "no_save_optim": say.WEIGHTS_ONLY,
            "no_load_optim": say.FROM_WEIGHTS,
            "no_load_rng": say.FROM_WEIGHTS,
            "ckpt_step": say.FROM_WEIGHTS,
            "finetune": say.FROM_WEIGHTS,
            "fsdp_state_dict_cpu_offload": say.SAVE_FORMAT,
            "eval_interval": say.EVAL,
            "eval_prompt_data": say.EVAL_DATA,
            "use_wandb": say.TRACKER,
            "wandb_project": say.PROJECT,
            "wandb_group": say.PROJECT,
            "wandb_run_name": say.RUN_NAME,
            "wandb_key": say.ENVIRONMENT,
            "disable_wandb_random_suffix": say.RUN_NAME,
            "use_tensorboard": say.TRACKER,
            "tensorboard_dir": say.TRACKER,
            "use_pytorch_profiler": say.PROFILE,
            "profile_step_start": say.PROFILE,
            "profile_step_end": say.PROFILE,
            "record_memory_history": say.MEMORY_PROFILE,
            "memory_snapshot_path": say.MEMORY_PROFILE,
        },
        "LoRA": {
            "lora_rank": say.LORA,
            "lora_alpha": say.LORA_ALPHA,
            "lora_dropout": say.LORA_DROPOUT,
            "target_modules": say.LORA_TARGETS,
        },
        "Ranks and FSDP": {
            "train_backend": say.BACKEND,
            "actor_num_nodes": say.RANKS,
            "actor_num_gpus_per_node": say.RANKS,
            "num_gpus_per_node": say.RANKS,
            "dp_replicate_size": say.REPLICATE,
            "fsdp_cpu_offload": say.OFFLOAD,
            "fsdp_cpu_backend": say.LAUNCHER,
            "context_parallel_size": say.CP,
            "tensor_model_parallel_size": say.TP,
            "pipeline_model_parallel_size": say.PP,
            "expert_model_parallel_size": say.EP,
            "expert_tensor_parallel_size": say.AXIS_DETAIL,
            "sequence_parallel": say.AXIS_DETAIL,
        },
        "Not supervised fine-tuning": {
            "debug_train_only": say.IS_TRAINING,
            "disable_compute_advantages_and_returns": say.RL,
            "update_weight_buffer_size": say.RL,
            "update_weights_interval": say.RL,
            "n_samples_per_prompt": say.RL,
            "advantage_estimator": say.RL,
            "eps_clip": say.RL,
            "eps_clip_high": say.RL,
            "kl_coef": say.RL,
            "kl_loss_coef": say.RL,
            "use_kl_loss": say.RL,
            "use_tis": say.RL,
            "colocate": say.RL,
            "rm_type": say.REWARD,
        },
    },
    {
        "optimizer.lr": 2.0e-5,
        "optimizer.weight_decay": 0.0,
        "schedule.name": "constant",
        "schedule.warmup_ratio": 0.0,
        "schedule.min_lr_ratio": 0.0,
    },
    signs=(
        "hf_checkpoint",
        "prompt_data",
        "input_key",
        "num_epoch",
        "rollout_batch_size",
        "rollout_function_path",
        "train_backend",
        "max_tokens_per_gpu",
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "n_samples_per_prompt",
        "advantage_estimator",
        "rm_type",
    ),
    tasks=same(
        ("advantage_estimator", "n_samples_per_prompt", "rm_type", "custom_rm_path", "eps_clip"), {"*": REINFORCEMENT}
    ),
)
