"""Names of TRL's SFTConfig, ModelConfig and ScriptArguments, and of transformers' TrainingArguments."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import ITSELF, PREFERENCES, REINFORCEMENT, Trainer, same

_INTRODUCTION = """\
One config replaces the training arguments and the accelerate file; `weft` starts its own ranks.

```yaml file=theirs.yaml
# trl sft --config this.yaml                 # weft sft this.yaml
model_name_or_path: Qwen/Qwen3-0.6B          # model: {path: Qwen/Qwen3-0.6B}
dataset_name: my/chats                       # data: {path: my/chats}
max_length: 4096                             # data: {max_length: 4096}
packing: true                                # always
per_device_train_batch_size: 4               # step: {tokens: 262144}: 4 x 2 x 4096 x 8 GPUs
gradient_accumulation_steps: 2
learning_rate: 2.0e-5                        # optimizer: {lr: 2.0e-5}
lr_scheduler_type: cosine                    # schedule: {name: cosine}, the default
num_train_epochs: 1                          # train: {epochs: 1}, the default
```

What is different:

- A batch is a number of documents over all ranks and micro-batches. Change the number of GPUs or the token budget, and
  the result stays the same: losses, gradients and weights are those of one process.
- With `packing` a batch of TRL is a number of full rows, so that a step is a number of tokens (`step.tokens`). Without
  it a step is a number of documents.
- Only answers are trained by default. TRL trains every token of `messages` unless `assistant_only_loss` is set;
  `data.train_on: all` does the same.
- Chats of your own need no template with generation markers.
- A document longer than `data.max_length` is an error, which counts them; TRL cuts them. `data.long_documents` decides.
- TRL adds the router's auxiliary loss to that of a mixture of experts, times 0.001 unless `router_aux_loss_coef` says
  otherwise, computed over each forward; weft adds none unless `model.router_aux_loss` asks for it, and computes it over
  each document or the whole step, which no batch size changes.
- Intervals count optimizer steps. The last step is always saved, as a HuggingFace directory.
"""

TRL = Trainer(
    "trl",
    "TRL and the HuggingFace Trainer",
    _INTRODUCTION,
    {
        "The batch": {
            "per_device_train_batch_size": say.BATCH,
            "gradient_accumulation_steps": say.BATCH,
            "auto_find_batch_size": say.TOKEN_BUDGET,
            "per_device_eval_batch_size": say.EVAL_BATCH,
            "eval_accumulation_steps": say.EVAL_BATCH,
            "packing": say.PACKED,
            "packing_strategy": say.PACKED,
            "padding_free": say.PACKED,
            "eval_packing": say.PACKED,
            "pad_to_multiple_of": say.PADDED,
            "group_by_length": say.BALANCED,
            "train_sampling_strategy": say.SHUFFLE,
            "average_tokens_across_devices": say.TOKEN_MEAN,
            "dataloader_drop_last": say.LAST_BATCH,
        },
        "Length": {
            "max_length": say.LENGTH,
            "max_seq_length": say.LENGTH,
            "truncation_mode": say.TRUNCATION,
        },
        "The model": {
            "model_name_or_path": say.MODEL,
            "model_revision": say.REVISION,
            "tokenizer_name_or_path": say.TOKENIZER,
            "trust_remote_code": say.REMOTE_CODE,
            "model_init_kwargs.*": say.DTYPE,
            "torch_dtype": say.DTYPE,
            "dtype": say.DTYPE,
            "bf16": say.DTYPE,
            "fp16": say.DTYPE,
            "tf32": say.DTYPE,
            "mixed_precision": say.DTYPE,
            "attn_implementation": say.ATTENTION,
            "gradient_checkpointing": say.RECOMPUTE,
            "gradient_checkpointing_kwargs.*": say.RECOMPUTE_HOW,
            "activation_offloading": say.ACTIVATION_OFFLOAD,
            "torch_compile": say.COMPILE,
            "router_aux_loss_coef": say.ROUTER_COEFFICIENT,
            "use_liger_kernel": say.CHUNKED,
            "use_liger": say.CHUNKED,
            "load_in_4bit": say.QUANTISED,
            "load_in_8bit": say.QUANTISED,
            "bnb_4bit_quant_type": say.QUANTISED,
            "use_bnb_nested_quant": say.QUANTISED,
        },
        "The data": {
            "dataset_name": say.DATA,
            "dataset_config": say.SUBSET,
            "dataset_train_split": say.SPLIT,
            "dataset_test_split": say.EVAL_DATA,
            "dataset_mixture.*": say.MIXTURE,
            "dataset_streaming": say.STREAMING,
            "dataset_text_field": say.COLUMNS,
            "dataset_num_proc": say.WORKERS,
            "dataset_kwargs.*": say.COLUMNS,
            "remove_unused_columns": say.COLUMNS,
            "dataloader_num_workers": say.READ_ONCE,
            "dataloader_pin_memory": say.READ_ONCE,
            "dataloader_prefetch_factor": say.READ_ONCE,
            "assistant_only_loss": say.MASKED,
            "completion_only_loss": say.MASKED,
            "chat_template": say.TEMPLATE,
            "chat_template_path": say.TEMPLATE,
            "eos_token": say.EOS,
            "pad_token": say.PADDED,
            "shuffle_dataset": say.SHUFFLE,
            "loss_type": say.OBJECTIVE,
            "label_smoothing_factor": say.OBJECTIVE,
        },
        "The optimizer and its schedule": {
            "learning_rate": say.LR,
            "optim": say.OPTIMIZER,
            "optim_args.*": say.OPTIMIZER_OPTIONS,
            "adam_beta1": say.BETAS,
            "adam_beta2": say.BETAS,
            "adam_epsilon": say.EPS,
            "weight_decay": say.DECAY,
            "max_grad_norm": say.CLIP,
            "lr_scheduler_type": say.SCHEDULE,
            "lr_scheduler_kwargs.*": say.MIN_LR_RATIO,
            "warmup_steps": say.WARMUP,
            "warmup_ratio": say.WARMUP_RATIO,
            "neftune_noise_alpha": say.NO_DROPOUT,
        },
        "The length of the run": {
            "num_train_epochs": say.EPOCHS,
            "max_steps": say.STEPS,
            "seed": say.SEED,
            "data_seed": say.SEED,
            "full_determinism": say.DETERMINISTIC,
            "ddp_timeout": say.TIMEOUT,
            "do_train": say.IS_TRAINING,
            "do_eval": say.IS_TRAINING,
            "logging_nan_inf_filter": say.NONFINITE,
        },
        "What comes out": {
            "output_dir": say.OUTPUT,
            "overwrite_output_dir": say.NEVER_OVERWRITTEN,
            "run_name": say.RUN_NAME,
            "logging_steps": say.LOGGING,
            "logging_strategy": say.LOGGING,
            "logging_first_step": say.LOGGING,
            "logging_dir": say.LOGGING,
            "log_level": say.LOGGING,
            "disable_tqdm": say.LOGGING,
            "report_to": say.TRACKER,
            "project": say.PROJECT,
            "save_steps": say.SAVE,
            "save_strategy": say.SAVE_MODE,
            "save_total_limit": say.KEEP,
            "save_only_model": say.WEIGHTS_ONLY,
            "save_safetensors": say.SAVE_FORMAT,
            "resume_from_checkpoint": say.RESUME,
            "push_to_hub": say.HUB,
            "hub_model_id": say.HUB,
            "hub_strategy": say.HUB_WHEN,
            "hub_private_repo": say.HUB_PRIVATE,
            "hub_revision": say.HUB_BRANCH,
            "hub_token": say.HUB_TOKEN,
            "eval_steps": say.EVAL,
            "eval_strategy": say.EVAL,
            "eval_on_start": say.AT_START,
            "eval_dataset": say.EVAL_DATA,
            "load_best_model_at_end": say.KEEP_BEST,
            "metric_for_best_model": say.KEEP_BEST,
            "greater_is_better": say.KEEP_BEST,
            "early_stopping_patience": say.PATIENCE,
        },
        "Arguments of SFTTrainer": {
            "args": say.PYTHON,
            "train_dataset": say.DATA,
            "processing_class": say.TOKENIZER,
            "tokenizer": say.TOKENIZER,
            "data_collator": say.PACKED,
            "compute_loss_func": say.OBJECTIVE,
            "compute_metrics": say.EVAL_DATA,
            "formatting_func": say.COLUMNS,
            "callbacks": say.PYTHON,
            "optimizers": say.OPTIMIZER,
            "optimizer_cls_and_kwargs": say.OPTIMIZER_OPTIONS,
            "peft_config.*": say.LORA,
        },
        "LoRA": {
            "use_peft": say.LORA,
            "lora_r": say.LORA,
            "lora_alpha": say.LORA_ALPHA,
            "lora_dropout": say.LORA_DROPOUT,
            "lora_target_modules": say.LORA_TARGETS,
            "lora_target_parameters": say.LORA_TARGETS,
            "lora_modules_to_save": say.LORA_SAVED,
            "lora_task_type": say.LORA,
            "use_rslora": say.RSLORA,
        },
        "Not supervised fine-tuning": {
            "env.*": say.ENVIRONMENT,
            "num_generations": say.RL,
            "beta": say.RL,
            "reward_funcs": say.REWARD,
        },
    },
    {
        "data.max_length": 1024,
        "data.long_documents": "truncate",
        "model.recompute": "full",
        "optimizer.lr": 2.0e-5,
        "optimizer.weight_decay": 0.0,
        "optimizer.betas": [0.9, 0.999],
        "schedule.name": "linear",
        "schedule.warmup_ratio": 0.0,
        "schedule.min_lr_ratio": 0.0,
        "train.epochs": 3,
        "lora.rank": 16,
        "lora.alpha": 16,
        "lora.dropout": 0.05,
        "checkpoint.every": 500,
    },
    signs=(
        "model_name_or_path",
        "dataset_name",
        "dataset_mixture.*",
        "dataset_train_split",
        "dataset_test_split",
        "dataset_text_field",
        "packing_strategy",
        "assistant_only_loss",
        "completion_only_loss",
        "use_peft",
        "max_seq_length",
        "per_device_train_batch_size",
        "num_train_epochs",
    ),
    tasks={
        **same(
            ("num_generations", "reward_funcs", "max_completion_length", "epsilon", "reward_model_path", "rloo_k"),
            {"*": REINFORCEMENT},
        ),
        **same(
            ("beta", "max_prompt_length", "desirable_weight", "precompute_ref_log_probs", "rpo_alpha", "cpo_alpha"),
            {"*": PREFERENCES},
        ),
        "loss_type": same(("sigmoid", "hinge", "ipo", "kto", "simpo", "apo_zero", "apo_down"), PREFERENCES),
    },
    means={
        "packing": {"false": {}},
        "router_aux_loss_coef": {
            **same(("0", "0.0"), {}),
            "*": {"model.router_aux_loss": "document", "model.router_aux_loss_coef": ITSELF},
        },
    },
    per_device={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    packing=("packing",),
    lora=("use_peft", ("true",)),
    balancing=0.001,
)
