"""Names of NeMo Automodel: the sections of its fine-tuning recipes (YAML with `_target_`)."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import Trainer

_INTRODUCTION = """\
Sections keep their sense and lose their `_target_`: weft builds the objects.

```yaml file=theirs.yaml
# Automodel                                            # weft
model: {pretrained_model_name_or_path: Qwen/Qwen3-4B}  # model: {path: Qwen/Qwen3-4B}
step_scheduler:
  global_batch_size: 64                                # step: {documents: 64}
  local_batch_size: 1                                  # step: {max_tokens_per_device: 8192}
  num_epochs: 1                                        # train: {epochs: 1}
  ckpt_every_steps: 100                                # checkpoint: {every: 100}
  val_every_steps: 50                                  # eval: {every: 50}
dataset: {path_or_dataset_id: chats.jsonl}             # data: {path: chats.jsonl}
packed_sequence: {packed_sequence_size: 8192}          # step: {max_tokens_per_device: 8192}
distributed: {dp_replicate_size: 2, tp_size: 1}        # mesh: {dp_replicate: 2}
optimizer: {lr: 1.0e-5, betas: [0.9, 0.95]}            # the same
peft: {dim: 16, alpha: 32}                             # lora: {rank: 16, alpha: 32}
```

What is different:

- Packing is always on, and documents do not see each other; a row holds whole documents.
- Masters are fp32 whatever the dtype of the files; Automodel asks for `torch_dtype: float32`.
- Stock HuggingFace classes throughout, mixture-of-experts models included, where weft's start-up check passes them.
- Every checkpoint is a consolidated HuggingFace directory with trainer state, and resumes on another number of GPUs.
- Tensor, context, expert and pipeline parallelism are not in this version.
"""

AUTOMODEL = Trainer(
    "automodel",
    "NeMo Automodel",
    _INTRODUCTION,
    {
        "Objects": {
            "_target_": say.BUILT,
            "recipe": say.BUILT,
            "collate_fn": say.BUILT,
            "loss_fn.*": say.OBJECTIVE,
            "ci.*": say.BUILT,
        },
        "The batch": {
            "global_batch_size": say.GLOBAL_BATCH,
            "local_batch_size": say.MICRO_BATCH,
            "validation_dataloader.*": say.EVAL_BATCH,
            "packed_sequence_size": say.PACKED_SIZE,
            "split_across_pack": say.PACKED,
            "max_packs": say.PACKED,
            "padding": say.PADDED,
        },
        "Length": {
            "seq_length": say.LENGTH,
            "seq_len": say.LENGTH,
            "truncation": say.TRUNCATION,
        },
        "The model": {
            "pretrained_model_name_or_path": say.MODEL,
            "trust_remote_code": say.REMOTE_CODE,
            "torch_dtype": say.DTYPE,
            "mp_policy.*": say.DTYPE,
            "attn_implementation": say.ATTENTION,
            "activation_checkpointing": say.RECOMPUTE,
            "use_liger_kernel": say.CHUNKED,
            "freeze_config.*": say.FREEZE,
            "fp8.*": say.QUANTISED,
            "quantization.*": say.QUANTISED,
            "compile.enabled": say.COMPILE,
            "dequantize_base_checkpoint": say.LOADING,
            "backend": say.EXPERT_KERNEL,
        },
        "The data": {
            "path_or_dataset_id": say.DATA,
            "path_or_dataset": say.DATA,
            "dataset_name": say.DATA,
            "dataset.split": say.SPLIT,
            "dataset.name": say.SUBSET,
            "dataset.chat_template": say.TEMPLATE,
            "column_mapping.*": say.COLUMNS,
            "answer_only_loss_mask": say.MASKED,
            "limit_dataset_samples": say.SAMPLES,
            "num_samples_limit": say.SAMPLES,
            "validation_dataset.*": say.EVAL_DATA,
            "dataloader.shuffle": say.SHUFFLE,
            "num_workers": say.READ_ONCE,
        },
        "The optimizer and its schedule": {
            "foreach": say.OPTIMIZER_KERNEL,
            "lr_decay_style": say.SCHEDULE,
            "lr_warmup_steps": say.WARMUP,
            "lr_decay_steps": say.DECAY_TO_END,
            "min_lr": say.MIN_LR,
            "max_grad_norm": say.CLIP,
        },
        "The length of the run": {
            "num_epochs": say.EPOCHS,
            "max_steps": say.STEPS,
            "seed": say.SEED,
            "ranked": say.SEED,
            "timeout_minutes": say.TIMEOUT,
        },
        "What comes out": {
            "ckpt_every_steps": say.SAVE,
            "save_checkpoint_every_epoch": say.SAVE_MODE,
            "val_every_steps": say.EVAL,
            "log_remote_every_steps": say.LOGGING,
            "checkpoint.enabled": say.SAVE_SWITCH,
            "checkpoint_dir": say.SAVE_FOLDER,
            "model_save_format": say.SAVE_FORMAT,
            "save_consolidated": say.SAVE_FORMAT,
            "is_async": say.ASYNC,
            "restore_from": say.RESUME,
            "wandb.*": say.TRACKER,
            "mlflow.*": say.TRACKER,
            "comet.*": say.TRACKER,
        },
        "LoRA": {
            "peft.dim": say.LORA,
            "peft.alpha": say.LORA_ALPHA,
            "peft.dropout": say.LORA_DROPOUT,
            "peft.target_modules": say.LORA_TARGETS,
            "match_all_linear": say.LORA_TARGETS,
            "peft.exclude_modules": say.LORA_TARGETS,
            "peft.use_dora": say.LORA,
            "use_triton": say.LORA,
        },
        "Ranks and FSDP": {
            "dp_size": say.SHARD,
            "dp_replicate_size": say.REPLICATE,
            "tp_size": say.TP,
            "cp_size": say.CP,
            "ep_size": say.EP,
            "pp_size": say.PP,
            "sequence_parallel": say.AXIS_DETAIL,
            "autopipeline.*": say.AXIS_DETAIL,
            "parallelizer": say.BUILT,
            "dist_env.backend": say.LAUNCHER,
            "offload_policy": say.OFFLOAD,
            "defer_fsdp_grad_sync": say.REDUCE,
            "enable_fsdp2_prefetch": say.PREFETCH,
            "fsdp2_backward_prefetch_depth": say.PREFETCH,
            "fsdp2_forward_prefetch_depth": say.PREFETCH,
        },
    },
    {},
    signs=("*_target_", "step_scheduler.*", "distributed.*", "packed_sequence.*", "peft.dim"),
)
