"""Names of torchtitan: the sections of its job config (TOML, or the dataclasses of the same names)."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import Trainer

_INTRODUCTION = """\
The job config becomes a YAML file, and `./run_train.sh` becomes `weft sft` or torchrun. The model is HuggingFace's own,
with its weights: there is no model registry, no flavor and no conversion.

```yaml file=theirs.yaml
# torchtitan (TOML, written as YAML)              # weft
model: {hf_assets_path: assets/Qwen3-0.6B}        # model: {path: assets/Qwen3-0.6B}
training:
  local_batch_size: 4                             # step: {max_tokens_per_device: 32768}: 4 x 8192
  global_batch_size: 64                           # step: {documents: 64}
  seq_len: 8192                                   # data: {max_length: 8192}
  steps: 1000                                     # train: {steps: 1000}
  max_norm: 1.0                                   # optimizer: {max_grad_norm: 1.0}, the default
parallelism:
  data_parallel_replicate_degree: 2               # mesh: {dp_replicate: 2}
  data_parallel_shard_degree: -1                  # mesh: {dp_shard: -1}, the default
activation_checkpoint: {mode: full}               # model: {recompute: full}
checkpoint: {interval: 500, keep_latest_k: 3}     # checkpoint: {every: 500, keep: 3}
```

What is different:

- A row holds whole documents, packed up to a budget of tokens, and documents do not see each other. The loss is the
  mean over the trained tokens of the whole step.
- A checkpoint is a HuggingFace directory with trainer state beside it. The random numbers are part of it.
- Warm-up starts at lr / warm-up steps and the schedule ends exactly at its minimum. `decay_ratio` belongs to
  `schedule.name: wsd`; without it cosine or linear decay begins after warm-up.
- Tensor, context, expert and pipeline parallelism are not in this version.
- `compile` covers the decoder layers; the loss is chunked without it.
"""

TORCHTITAN = Trainer(
    "torchtitan",
    "torchtitan",
    _INTRODUCTION,
    {
        "The batch": {
            "local_batch_size": say.MICRO_BATCH,
            "global_batch_size": say.GLOBAL_BATCH,
            "training.batch_size": say.MICRO_BATCH,
        },
        "Length": {
            "seq_len": say.LENGTH,
        },
        "The model": {
            "hf_assets_path": say.MODEL,
            "tokenizer_path": say.TOKENIZER,
            "model.name": say.MODEL,
            "flavor": say.MODEL,
            "converters": say.QUANTISED,
            "print_after_conversion": say.QUANTISED,
            "quantize.*": say.QUANTISED,
            "mixed_precision_param": say.DTYPE,
            "mixed_precision_reduce": say.REDUCE_DTYPE,
            "training.dtype": say.MASTERS,
            "activation_checkpoint.mode": say.RECOMPUTE,
            "selective_ac_option": say.RECOMPUTE_HOW,
            "per_op_sac_force_recompute_mm_shapes_by_fqns": say.RECOMPUTE_HOW,
            "compile.enable": say.COMPILE,
            "compile.components": say.COMPILE,
            "training.compile": say.COMPILE,
        },
        "The data": {
            "training.dataset": say.DATA,
            "dataset_path": say.DATA,
            "validation.dataset": say.EVAL_DATA,
        },
        "The optimizer and its schedule": {
            "beta1": say.BETAS,
            "beta2": say.BETAS,
            "optimizer.implementation": say.OPTIMIZER_KERNEL,
            "early_step_in_backward": say.OPTIMIZER_KERNEL,
            "max_norm": say.CLIP,
            "warmup_steps": say.WARMUP,
            "decay_ratio": say.WSD_RATIO,
            "decay_type": say.WSD_SHAPE,
            "min_lr_factor": say.MIN_LR_RATIO,
            "lr_min": say.MIN_LR_RATIO,
            "lr_scheduler.total_steps": say.DECAY_TO_END,
        },
        "The length of the run": {
            "training.steps": say.STEPS,
            "seed": say.SEED,
            "deterministic": say.DETERMINISTIC,
            "init_timeout_seconds": say.TIMEOUT,
            "train_timeout_seconds": say.TIMEOUT,
            "gc_freq": say.LAUNCHER,
            "gc_debug": say.LAUNCHER,
        },
        "What comes out": {
            "dump_folder": say.OUTPUT,
            "job.description": say.RUN_NAME,
            "print_args": say.LOGGING,
            "log_freq": say.LOGGING,
            "disable_color_printing": say.LOGGING,
            "save_for_all_ranks": say.LOGGING,
            "enable_tensorboard": say.TRACKER,
            "save_tb_folder": say.TRACKER,
            "enable_wandb": say.TRACKER,
            "enable_profiling": say.PROFILE,
            "profile_freq": say.PROFILE,
            "save_traces_folder": say.PROFILE,
            "enable_memory_snapshot": say.MEMORY_PROFILE,
            "save_memory_snapshot_folder": say.MEMORY_PROFILE,
            "checkpoint.enable": say.SAVE_SWITCH,
            "enable_checkpoint": say.SAVE_SWITCH,
            "checkpoint.folder": say.SAVE_FOLDER,
            "checkpoint.interval": say.SAVE,
            "keep_latest_k": say.KEEP,
            "async_mode": say.ASYNC,
            "export_dtype": say.SAVE_DTYPE,
            "last_save_model_only": say.WEIGHTS_ONLY,
            "last_save_in_hf": say.SAVE_FORMAT,
            "initial_load_path": say.FROM_WEIGHTS,
            "initial_load_model_only": say.FROM_WEIGHTS,
            "initial_load_in_hf": say.SAVE_FORMAT,
            "load_step": say.RESUME,
            "exclude_from_loading": say.RESUME,
            "create_seed_checkpoint": say.FROM_CONFIG,
            "validation.enable": say.EVAL_DATA,
            "validation.freq": say.EVAL,
            "validation.steps": say.SAMPLES,
        },
        "Ranks and FSDP": {
            "data_parallel_replicate_degree": say.REPLICATE,
            "data_parallel_shard_degree": say.SHARD,
            "fsdp_reshard_after_forward": say.RESHARD,
            "enable_cpu_offload": say.OFFLOAD,
            "tensor_parallel_degree": say.TP,
            "enable_async_tensor_parallel": say.AXIS_DETAIL,
            "disable_loss_parallel": say.AXIS_DETAIL,
            "pipeline_parallel_degree": say.PP,
            "pipeline_parallel_schedule": say.AXIS_DETAIL,
            "pipeline_parallel_microbatch_size": say.AXIS_DETAIL,
            "context_parallel_degree": say.CP,
            "context_parallel_rotate_method": say.AXIS_DETAIL,
            "expert_parallel_degree": say.EP,
            "expert_tensor_parallel_degree": say.AXIS_DETAIL,
            "enable_compiled_autograd": say.COMPILE,
        },
    },
    {
        "optimizer.lr": 8.0e-4,
        "schedule.name": "linear",
        "schedule.warmup_steps": 200,
        "schedule.min_lr_ratio": 0.0,
        "train.steps": 10000,
        "checkpoint.every": 500,
    },
    signs=(
        "job.*",
        "training.*",
        "parallelism.*",
        "metrics.*",
        "activation_checkpoint.*",
        "model.hf_assets_path",
        "model.flavor",
    ),
)
