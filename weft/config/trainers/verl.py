"""Names of verl: the SFT trainers (old and engine-based), FSDPEngineConfig, and the actor's of its RL configs."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import REINFORCEMENT, Trainer, same

_INTRODUCTION = """\
Overrides look alike: `python -m verl.trainer.sft_trainer data.train_batch_size=256` becomes
`weft sft base.yaml step.documents=256`. Lists and null are YAML's. Hydra's own syntax (`+key=...`, `~key`, `defaults:`,
`${...}`) is not: several files merge left to right instead. `weft migrate` takes the YAML, the script that starts the
run (`weft migrate run_sft.sh`: its overrides, with the variables that it sets put in), or both, the script last.

```yaml file=theirs.yaml
# verl                                            # weft
data:
  train_files: chats.parquet                      # data: {path: chats.parquet}
  train_batch_size: 256                           # step: {documents: 256}
  max_token_len_per_gpu: 8192                     # step: {max_tokens_per_device: 8192}
  max_length: 4096                                # data: {max_length: 4096}
model:
  partial_pretrain: Qwen/Qwen3-0.6B               # model: {path: Qwen/Qwen3-0.6B}
  fsdp_config: {model_dtype: fp32}                # the default
optim: {lr: 1.0e-5, clip_grad: 1.0}               # optimizer: {lr: 1.0e-5, max_grad_norm: 1.0}
trainer: {total_epochs: 4, save_freq: 100}        # train: {epochs: 4}, checkpoint: {every: 100}
```

What is different:

- There is one batch size, `step.documents`, over all ranks. Micro-batches follow from a token budget, as with
  `use_dynamic_bsz`, and never change the result.
- Checkpoints are HuggingFace directories: there is no `verl.model_merger` step, and one resumes on another number of
  GPUs.
- Loss falls on every assistant turn of `messages`, from the rendering of the whole conversation.
- Files of the former `fsdp_sft_trainer` (they have `partial_pretrain`) are drafted with its own defaults: learning rate
  1e-5, cosine, 0.1 of the steps of warm-up.
- Sequence parallelism (`ulysses_sequence_parallel_size`) is not in this version; raise `step.max_tokens_per_device` and
  set `model.recompute: full` for long documents.
"""

VERL = Trainer(
    "verl",
    "verl",
    _INTRODUCTION,
    {
        "The batch": {
            "train_batch_size": say.GLOBAL_BATCH,
            "micro_batch_size": say.MICRO_BATCH,
            "micro_batch_size_per_gpu": say.MICRO_BATCH,
            "max_token_len_per_gpu": say.TOKEN_BUDGET,
            "ppo_max_token_len_per_gpu": say.TOKEN_BUDGET,
            "use_dynamic_bsz": say.PACKED,
            "use_remove_padding": say.PACKED,
            "pad_mode": say.PACKED,
            "balance_dp_token": say.BALANCED,
            "loss_agg_mode": say.TOKEN_MEAN,
        },
        "Length": {
            "max_length": say.LENGTH,
            "max_prompt_length": say.LENGTH,
            "max_response_length": say.LENGTH,
            "truncation": say.TRUNCATION,
            "filter_overlong_prompts": say.TRUNCATION,
        },
        "The model": {
            "partial_pretrain": say.MODEL,
            "hf_config_path": say.MODEL,
            "tokenizer_path": say.TOKENIZER,
            "trust_remote_code": say.REMOTE_CODE,
            "external_lib": say.REMOTE_CODE,
            "override_config.*": say.MODEL,
            "use_shm": say.LOADING,
            "model_dtype": say.MASTERS,
            "dtype": say.DTYPE,
            "mixed_precision": say.DTYPE,
            "enable_gradient_checkpointing": say.RECOMPUTE,
            "enable_activation_offload": say.ACTIVATION_OFFLOAD,
            "use_torch_compile": say.COMPILE,
            "use_liger": say.CHUNKED,
            "use_fused_kernels": say.CHUNKED,
            "fused_kernel_options.*": say.CHUNKED,
            "entropy_from_logits_with_chunking": say.CHUNKED,
            "entropy_checkpointing": say.CHUNKED,
            "tiled_mlp.*": say.RECOMPUTE,
            "freeze_vision_tower": say.FREEZE,
        },
        "The data": {
            "train_files": say.DATA,
            "val_files": say.EVAL_DATA,
            "train_max_samples": say.SAMPLES,
            "val_max_samples": say.SAMPLES,
            "messages_key": say.COLUMNS,
            "tools_key": say.COLUMNS,
            "enable_thinking_key": say.THINKING,
            "prompt_key": say.COLUMNS,
            "response_key": say.COLUMNS,
            "prompt_dict_keys": say.COLUMNS,
            "response_dict_keys": say.COLUMNS,
            "multiturn.enable": say.COLUMNS,
            "custom_cls.*": say.COLUMNS,
            "image_key": say.IMAGES,
            "chat_template": say.TEMPLATE,
            "custom_chat_template": say.TEMPLATE,
            "apply_chat_template_kwargs.*": say.TEMPLATE_KWARGS,
            "ignore_input_ids_mismatch": (
                "conversations are rendered whole, and turns are found in that rendering: leave it out."
            ),
            "dataloader_num_workers": say.READ_ONCE,
        },
        "The optimizer and its schedule": {
            "lr": say.LR,
            "optim.optimizer": say.OPTIMIZER,
            "optimizer_impl": say.OPTIMIZER,
            "override_optimizer_config.*": say.OPTIMIZER_OPTIONS,
            "weight_decay": say.DECAY,
            "betas": say.BETAS,
            "clip_grad": say.CLIP,
            "grad_clip": say.CLIP,
            "lr_scheduler": say.SCHEDULE,
            "lr_scheduler_type": say.SCHEDULE,
            "warmup_style": say.SCHEDULE,
            "lr_warmup_steps": say.WARMUP,
            "lr_warmup_steps_ratio": say.WARMUP_RATIO,
            "warmup_steps_ratio": say.WARMUP_RATIO,
            "min_lr_ratio": say.MIN_LR_RATIO,
            "num_cycles": say.CYCLES,
            "zero_indexed_step": say.WARMUP_START,
        },
        "The length of the run": {
            "total_epochs": say.EPOCHS,
            "total_training_steps": say.STEPS,
            "seed": say.SEED,
            "full_determinism": say.DETERMINISTIC,
            "nccl_timeout": say.TIMEOUT,
        },
        "What comes out": {
            "default_local_dir": say.OUTPUT,
            "default_hdfs_dir": say.OUTPUT,
            "project_name": say.PROJECT,
            "experiment_name": say.RUN_NAME,
            "logger": say.TRACKER,
            "save_freq": say.SAVE,
            "test_freq": say.EVAL,
            "val_before_train": say.AT_START,
            "max_ckpt_to_keep": say.KEEP,
            "max_actor_ckpt_to_keep": say.KEEP,
            "save_contents": say.WEIGHTS_ONLY,
            "load_contents": say.WEIGHTS_ONLY,
            "async_save": say.ASYNC,
            "mbridge_config.*": say.BACKEND,
            "resume_mode": say.RESUME,
            "resume_from_path": say.RESUME,
            "resume_path": say.RESUME,
            "profile_steps": say.PROFILE,
        },
        "LoRA": {
            "lora_rank": say.LORA,
            "lora_alpha": say.LORA_ALPHA,
            "target_modules": say.LORA_TARGETS,
            "exclude_modules": say.LORA_TARGETS,
            "target_parameters": say.LORA_TARGETS,
            "lora_adapter_path": say.LORA_PATH,
        },
        "Ranks and FSDP": {
            "fsdp_size": say.SHARD,
            "n_gpus_per_node": say.RANKS,
            "nnodes": say.RANKS,
            "device": say.DEVICE,
            "strategy": say.BACKEND,
            "forward_only": say.BACKEND,
            "use_orig_params": say.BACKEND,
            "reshard_after_forward": say.RESHARD,
            "wrap_policy": say.WRAP,
            "min_num_params": say.WRAP,
            "forward_prefetch": say.PREFETCH,
            "offload_policy": say.OFFLOAD,
            "offload_params": say.OFFLOAD,
            "param_offload": say.OFFLOAD,
            "optimizer_offload": say.OFFLOAD,
            "grad_offload": say.OFFLOAD,
            "cpu_offload": say.OFFLOAD,
            "ulysses_sequence_parallel_size": say.CP,
            "tensor_model_parallel_size": say.TP,
            "pipeline_model_parallel_size": say.PP,
            "expert_model_parallel_size": say.EP,
        },
        "Not supervised fine-tuning": {
            "actor_rollout_ref.rollout.*": say.RL,
            "algorithm.*": say.RL,
            "critic.*": say.RL,
            "reward_model.*": say.REWARD,
            "ray_kwargs.*": say.LAUNCHER,
            "ppo_mini_batch_size": say.RL,
            "ppo_micro_batch_size_per_gpu": say.RL,
            "ppo_epochs": say.RL,
            "adv_estimator": say.RL,
            "clip_ratio": say.RL,
            "clip_ratio_low": say.RL,
            "clip_ratio_high": say.RL,
            "kl_coef": say.RL,
            "kl_loss_coef": say.RL,
            "use_kl_loss": say.RL,
            "entropy_coeff": say.RL,
            "gpu_memory_utilization": say.RL,
            "custom_reward_function.*": say.REWARD,
        },
    },
    {
        "model.recompute": "full",
        "step.documents": 256,
        "optimizer.lr": 1.0e-3,
        "optimizer.weight_decay": 0.01,
        "optimizer.betas": [0.9, 0.999],
        "schedule.name": "constant",
        "schedule.warmup_ratio": 0.0,
        "schedule.min_lr_ratio": 0.0,
        "train.epochs": 4,
        "checkpoint.every": 0,
        "lora.alpha": 16,
    },
    {
        "step.documents": 256,
        "optimizer.weight_decay": 0.01,
        "schedule.warmup_ratio": 0.1,
        "schedule.min_lr_ratio": 0.0,
        "train.epochs": 4,
        "checkpoint.every": 0,
        "lora.alpha": 16,
    },
    ("partial_pretrain",),
    signs=(
        "data.train_files",
        "data.train_batch_size",
        "data.micro_batch_size*",
        "data.prompt_key",
        "data.messages_key",
        "*prompt_dict_keys",
        "model.partial_pretrain",
        "trainer.default_local_dir",
        "trainer.total_epochs",
        "engine.*",
        "actor_rollout_ref.*",
        "algorithm.*",
    ),
    tasks=same(("adv_estimator", "algorithm.*", "actor_rollout_ref.*", "critic.*"), {"*": REINFORCEMENT}),
)
