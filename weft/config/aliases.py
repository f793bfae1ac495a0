"""Names that users bring from other trainers, and what to say in weft instead.

Sources: HuggingFace Trainer and TRL, verl, ROLL, Miles, torchtitan, NeMo Automodel. A name is looked up by its last
part, so that `actor_rollout_ref.actor.optim.lr_warmup_steps` and `lr_warmup_steps` are the same. Keys of weft are
written in backquotes: a test holds that each exists, or is in NOT_YET.
"""

from __future__ import annotations

# Sections and keys of the design that enter the schema with their feature.
NOT_YET = (
    "mesh.cp",
    "mesh.tp",
    "mesh.ep",
    "mesh.pp",
    "data.chat_template",
    "eval",
    "rl",
    "rollout",
    "cluster",
    "lora",
)
# Values of keys that exist.
NOT_YET_VALUES = {("model.recompute", "selective"), ("optimizer.name", "muon")}

_BATCH = (
    "a step is a set of documents, whatever the number of devices. Say `step.documents` = per-device batch x "
    "accumulation x data ranks; micro-batches follow from `step.max_tokens_per_device`."
)
_GLOBAL_BATCH = "say `step.documents` (over all ranks, per optimizer step)."
_MICRO_BATCH = (
    "micro-batches are cut by tokens, not by a count: say `step.max_tokens_per_device` (sequences x their length)."
)
_TOKEN_BUDGET = "say `step.max_tokens_per_device`."
_PACKED = (
    "documents are always packed into rows of `step.max_tokens_per_device` tokens and never see each other: leave it "
    "out."
)
_BALANCED = "ranks are always balanced by estimated FLOPs: leave it out."
_LENGTH = "say `data.max_length`, and what happens to longer documents with `data.long_documents`."
_MODEL = "say `model.path`."
_DTYPE = (
    "say `fsdp.param_dtype` (compute), `fsdp.reduce_dtype` and `fsdp.master_dtype`; the default computes in bf16 on "
    "accelerators and keeps fp32 masters."
)
_LOSS_SCALE = "say `fsdp.loss_scale` and `fsdp.loss_scale_interval`, with `fsdp.param_dtype` fp16."
_RECOMPUTE = "say `model.recompute`: none or full."
_COMPILE = "say `model.compile`: each decoder layer is compiled."
_FREEZE = "say `model.freeze`: a list of names of parameters or modules."
_CHUNKED = "the loss is always computed in chunks of tokens and full logits are never held: leave it out."
_DATA = (
    "say `data.path` (a file, a pattern of files, a saved dataset, or owner/name on the hub) or `data.sources`, with "
    "`data.split`, `data.subset` and `data.columns`."
)
_COLUMNS = (
    "columns called messages, prompt and completion, text, or instruction, input and output are found by name; others "
    "are named in `data.columns`, as in {prompt: question, completion: answer}."
)
_MASKED = (
    "the loss falls on assistant turns of `messages`, on `completion`, or on all of `text`: leave it out and choose "
    "by the columns of the data."
)
_TEMPLATE = "the tokenizer's chat template is used; `data.chat_template` is not in this version yet: leave it out."
_BETAS = "say `optimizer.betas`, for example [0.9, 0.95]."
_CLIP = "say `optimizer.max_grad_norm`."
_SCHEDULE = "say `schedule.name`: constant, linear, cosine or wsd."
_WARMUP = "say `schedule.warmup_steps`."
_WARMUP_RATIO = "say `schedule.warmup_ratio`."
_EPOCHS = "say `train.epochs`."
_STEPS = "say `train.steps` (optimizer steps)."
_TIMEOUT = "say `train.timeout` (seconds)."
_OUTPUT = "say `run.dir`."
_LOGGING = "every step is written to RUN/metrics.jsonl: leave it out."
_TRACKER = "trackers are not in this version yet; every step is written to RUN/metrics.jsonl: leave it out."
_SAVE = "say `checkpoint.every` (optimizer steps; the last step is always saved)."
_SAVE_MODE = "say `checkpoint.every` (optimizer steps) or `checkpoint.every_minutes`; 0: only the last."
_KEEP = "say `checkpoint.keep` (null keeps all), and `checkpoint.keep_every` for those that stay."
_ASYNC = "say `checkpoint.async`: true (the default) or false."
_WEIGHTS_ONLY = (
    "every checkpoint is a HuggingFace directory; say `checkpoint.trainer_state`: all, last, or none for weights alone."
)
_SAVE_DTYPE = "say `checkpoint.dtype`: auto, bf16, fp16 or fp32."
_RESUME = "resuming is no key: `weft sft --resume RUN`."
_EVAL = "`eval` is not in this version yet: leave it out."
_SHARD = "say `mesh.dp_shard` (-1: all ranks)."
_REPLICATE = "say `mesh.dp_replicate`."
_TP = "weft calls it `mesh.tp`, which is not in this version yet: leave it out."
_CP = "weft calls it `mesh.cp`, which is not in this version yet: leave it out."
_EP = "weft calls it `mesh.ep`, which is not in this version yet: leave it out."
_PP = "weft calls it `mesh.pp`, which is not in this version yet: leave it out."
_RANKS = "the number of ranks is --nproc on the command line, or torchrun's: leave it out."
_WRAP = "say `fsdp.wrap`: auto (the units are printed at start), or a list of layers, head, embedding and class names."
_PREFETCH = "say `fsdp.prefetch`: how many units ahead, in forward and backward; null leaves it to FSDP2."
_OFFLOAD = "say `fsdp.cpu_offload` (parameters, gradients and optimizer together)."
_REDUCE = "say `fsdp.reduce`: every, scatter or last."
_LORA = "`lora` is not in this version yet: all weights are trained. Leave it out."
_RL = "`rl` is not in this version yet: leave it out."

ALIASES: dict[str, str] = {
    # the batch
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "accumulate_grad_batches": _BATCH,
    "grad_acc_steps": _BATCH,
    "train_batch_size": _GLOBAL_BATCH,
    "global_batch_size": _GLOBAL_BATCH,
    "batch_size": _GLOBAL_BATCH,
    "local_batch_size": _MICRO_BATCH,
    "micro_batch_size": _MICRO_BATCH,
    "micro_batch_size_per_gpu": _MICRO_BATCH,
    "max_tokens_per_gpu": _TOKEN_BUDGET,
    "max_token_len_per_gpu": _TOKEN_BUDGET,
    "max_tokens_per_microbatch": _TOKEN_BUDGET,
    "packing": _PACKED,
    "packing_strategy": _PACKED,
    "use_dynamic_bsz": _PACKED,
    "use_dynamic_batch_size": _PACKED,
    "use_remove_padding": _PACKED,
    "use_sequence_packing": _PACKED,
    "padding_free": _PACKED,
    "group_by_length": _BALANCED,
    "balance_data": _BALANCED,
    "balance_dp_token": _BALANCED,
    # length
    "max_seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "seq_length": _LENGTH,
    "seq_len": _LENGTH,
    "sequence_length": _LENGTH,
    "model_max_length": _LENGTH,
    "cutoff_len": _LENGTH,
    "truncation": _LENGTH,
    # the model
    "model_name_or_path": _MODEL,
    "pretrained_model_name_or_path": _MODEL,
    "partial_pretrain": _MODEL,
    "pretrain": _MODEL,
    "hf_checkpoint": _MODEL,
    "hf_assets_path": _MODEL,
    "torch_dtype": _DTYPE,
    "dtype": _DTYPE,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "mixed_precision": _DTYPE,
    "initial_loss_scale": _LOSS_SCALE,
    "initial_scale_power": _LOSS_SCALE,
    "loss_scale_window": _LOSS_SCALE,
    "model_dtype": _DTYPE,
    "mixed_precision_param": _DTYPE,
    "mixed_precision_reduce": _DTYPE,
    "keep_fp32_master": "say `fsdp.master_dtype`: fp32 (the default) or bf16.",
    "attn_implementation": "say `model.attention`: auto, per_document, varlen or flex.",
    "use_flash_attn": "say `model.attention`: auto takes the fastest kernel that is right.",
    "gradient_checkpointing": _RECOMPUTE,
    "enable_gradient_checkpointing": _RECOMPUTE,
    "disable_gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpoint": _RECOMPUTE,
    "use_liger": _CHUNKED,
    "use_liger_kernel": _CHUNKED,
    "use_fused_kernels": _CHUNKED,
    "log_probs_chunk_size": _CHUNKED,
    "torch_compile": _COMPILE,
    "use_torch_compile": _COMPILE,
    "freeze_modules": _FREEZE,
    "frozen_modules": _FREEZE,
    "freeze_params": _FREEZE,
    # the data
    "dataset": _DATA,
    "dataset_name": _DATA,
    "dataset_path": _DATA,
    "train_files": _DATA,
    "train_file": _DATA,
    "prompt_data": _DATA,
    "file_name": _DATA,
    "dataset_text_field": _COLUMNS,
    "messages_key": _COLUMNS,
    "prompt_key": _COLUMNS,
    "response_key": _COLUMNS,
    "input_key": _COLUMNS,
    "label_key": _COLUMNS,
    "assistant_only_loss": _MASKED,
    "completion_only_loss": _MASKED,
    "train_on_inputs": _MASKED,
    "chat_template_path": _TEMPLATE,
    "shuffle_dataset": "say `data.shuffle`.",
    "shuffle_seed": "say `train.seed`.",
    # the optimizer and its schedule
    "learning_rate": "say `optimizer.lr`.",
    "optim": "say `optimizer.name`: adamw or sgd.",
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "beta1": _BETAS,
    "beta2": _BETAS,
    "adam_epsilon": "say `optimizer.eps`.",
    "adam_eps": "say `optimizer.eps`.",
    "clip_grad": _CLIP,
    "grad_clip": _CLIP,
    "max_norm": _CLIP,
    "gradient_clip_val": _CLIP,
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "lr_decay_style": _SCHEDULE,
    "lr_warmup_steps": _WARMUP,
    "lr_warmup_iters": _WARMUP,
    "num_warmup_steps": _WARMUP,
    "lr_warmup_fraction": _WARMUP_RATIO,
    "lr_warmup_steps_ratio": _WARMUP_RATIO,
    "min_lr": "say `schedule.min_lr_ratio` = min_lr / `optimizer.lr`.",
    "min_lr_factor": "say `schedule.min_lr_ratio`.",
    "lr_wsd_decay_iters": "say `schedule.decay_ratio` = decay steps / all steps.",
    "lr_wsd_decay_style": "say `schedule.decay`: linear, cosine or 1-sqrt.",
    "decay_type": "say `schedule.decay`: linear, cosine or 1-sqrt.",
    # the length of the run
    "num_train_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_epoch": _EPOCHS,
    "total_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "max_steps": _STEPS,
    "train_iters": _STEPS,
    "total_training_steps": _STEPS,
    "full_determinism": "say `train.deterministic`.",
    "deterministic_mode": "say `train.deterministic`.",
    "data_seed": "say `train.seed`.",
    "ddp_timeout": _TIMEOUT,
    "nccl_timeout": _TIMEOUT,
    "dist_timeout_s": _TIMEOUT,
    "train_timeout_seconds": _TIMEOUT,
    # what comes out
    "output_dir": _OUTPUT,
    "default_local_dir": _OUTPUT,
    "dump_folder": _OUTPUT,
    "run_name": _OUTPUT,
    "logging_steps": _LOGGING,
    "log_freq": _LOGGING,
    "report_to": _TRACKER,
    "use_wandb": _TRACKER,
    "wandb_project": _TRACKER,
    "save_steps": _SAVE,
    "save_freq": _SAVE,
    "save_interval": _SAVE,
    "save_every": _SAVE,
    "save_every_steps": _SAVE,
    "ckpt_every_steps": _SAVE,
    "save_strategy": _SAVE_MODE,
    "save_on_epoch_end": _SAVE_MODE,
    "save_total_limit": _KEEP,
    "max_ckpt_to_keep": _KEEP,
    "max_actor_ckpt_to_keep": _KEEP,
    "keep_latest_k": _KEEP,
    "async_mode": _ASYNC,
    "async_save": _ASYNC,
    "is_async": _ASYNC,
    "save_only_model": _WEIGHTS_ONLY,
    "save_contents": _WEIGHTS_ONLY,
    "no_save_optim": _WEIGHTS_ONLY,
    "last_save_model_only": _WEIGHTS_ONLY,
    "last_save_in_hf": _WEIGHTS_ONLY,
    "save_hf": _WEIGHTS_ONLY,
    "export_dtype": _SAVE_DTYPE,
    "resume_from_checkpoint": _RESUME,
    "resume_from_path": _RESUME,
    "resume_mode": _RESUME,
    "load_step": _RESUME,
    "eval_steps": _EVAL,
    "eval_strategy": _EVAL,
    "eval_dataset": _EVAL,
    "val_files": _EVAL,
    "test_freq": _EVAL,
    # the mesh
    "fsdp_size": _SHARD,
    "dp_size": _SHARD,
    "data_parallel_shard_degree": _SHARD,
    "dp_replicate_size": _REPLICATE,
    "data_parallel_replicate_degree": _REPLICATE,
    "tp_size": _TP,
    "tensor_parallel_size": _TP,
    "tensor_parallel_degree": _TP,
    "tensor_model_parallel_size": _TP,
    "cp_size": _CP,
    "context_parallel_size": _CP,
    "context_parallel_degree": _CP,
    "ulysses_size": _CP,
    "ulysses_sequence_parallel_size": _CP,
    "sp_size": _CP,
    "ep_size": _EP,
    "expert_parallel_degree": _EP,
    "expert_model_parallel_size": _EP,
    "pp_size": _PP,
    "pipeline_parallel_degree": _PP,
    "pipeline_model_parallel_size": _PP,
    "n_gpus_per_node": _RANKS,
    "num_gpus_per_node": _RANKS,
    "nproc_per_node": _RANKS,
    "nnodes": _RANKS,
    "num_processes": _RANKS,
    # FSDP
    "wrap_policy": _WRAP,
    "moe_experts": _WRAP,
    "transformer_layer_cls_to_wrap": _WRAP,
    "fsdp_transformer_layer_cls_to_wrap": _WRAP,
    "forward_prefetch": _PREFETCH,
    "backward_prefetch": _PREFETCH,
    "enable_fsdp2_prefetch": _PREFETCH,
    "fsdp2_backward_prefetch_depth": _PREFETCH,
    "fsdp2_forward_prefetch_depth": _PREFETCH,
    "offload_policy": _OFFLOAD,
    "param_offload": _OFFLOAD,
    "optimizer_offload": _OFFLOAD,
    "fsdp_cpu_offload": _OFFLOAD,
    "enable_cpu_offload": _OFFLOAD,
    "fsdp_reshard_after_forward": "say `fsdp.reshard_after_forward`.",
    "reduce_scatter_during_grad_accumulation": _REDUCE,
    "defer_fsdp_grad_sync": _REDUCE,
    # LoRA and RL
    "use_peft": _LORA,
    "lora_r": _LORA,
    "lora_rank": _LORA,
    "lora_alpha": _LORA,
    "lora_target": _LORA,
    "num_generations": _RL,
    "adv_estimator": _RL,
    "ppo_mini_batch_size": _RL,
    "ppo_epochs": _RL,
    "kl_coef": _RL,
    "kl_loss_coef": _RL,
    "clip_ratio": _RL,
    "eps_clip": _RL,
}


def advice_for(name: str) -> str | None:
    """What to say instead of a dotted name of another trainer, or None where it is not known."""
    leaf = name.rpartition(".")[2].lower().replace("-", "_")
    return ALIASES.get(leaf)


def not_yet(name: str) -> str | None:
    """The key or section of the design that covers a dotted name, or None."""
    return next((planned for planned in NOT_YET if name == planned or name.startswith(planned + ".")), None)
