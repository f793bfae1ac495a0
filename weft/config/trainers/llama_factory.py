"""Names of LLaMA-Factory's YAML; it takes those of transformers' TrainingArguments, too, which trl.py has."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import ITSELF, PREFERENCES, REINFORCEMENT, Trainer, same

_INTRODUCTION = """\
One file replaces one file; `weft` starts its own ranks, without `llamafactory-cli`, torchrun or DeepSpeed.

```yaml file=theirs.yaml
# llamafactory-cli train this.yaml           # weft sft this.yaml
model_name_or_path: Qwen/Qwen3-0.6B          # model: {path: Qwen/Qwen3-0.6B}
stage: sft
finetuning_type: lora                        # lora: {rank: 8}
lora_rank: 8
lora_target: all                             # lora: {targets: all-linear}, the default
dataset: my_chats                            # data: {path: chats.jsonl}, what dataset_info.json says of my_chats
template: qwen                               # the tokenizer's own
cutoff_len: 2048                             # data: {max_length: 2048, long_documents: truncate}
per_device_train_batch_size: 1               # step: {documents: 64}: 1 x 8 x 8 GPUs
gradient_accumulation_steps: 8
learning_rate: 1.0e-4                        # optimizer: {lr: 1.0e-4}
num_train_epochs: 3.0                        # train: {epochs: 3}
lr_scheduler_type: cosine                    # schedule: {name: cosine}, the default
```

What is different:

- Data are named by a path or a name on the hub, not through dataset_info.json. Files in its formats are read as they
  are: `instruction`, `input` and `output` by their names, and ShareGPT's `conversations` with
  `data.columns: {messages: conversations}`; other words of who speaks are mapped by `data.roles`.
- Conversations are rendered by the tokenizer's own chat template; `template` names one of LLaMA-Factory's own.
- Where `finetuning_type` is not said, LLaMA-Factory trains LoRA of rank 8, and weft all weights.
- A document longer than `data.max_length` is an error, which counts them; LLaMA-Factory cuts them.
  `data.long_documents` decides.
- Held-out documents are a file of their own (`eval.path`); `val_size` takes a share of the training data.
- Intervals count optimizer steps. The last step is always saved, as a HuggingFace directory.
"""

LLAMA_FACTORY = Trainer(
    "llama_factory",
    "LLaMA-Factory",
    _INTRODUCTION,
    {
        "The batch": {
            "per_device_train_batch_size": say.BATCH,
            "gradient_accumulation_steps": say.BATCH,
            "packing": say.PACKED,
            "neat_packing": say.PACKED,
            "preprocessing_batch_size": say.READ_ONCE,
        },
        "Length": {"cutoff_len": say.LENGTH},
        "The model": {
            "model_name_or_path": say.MODEL,
            "use_fast_tokenizer": say.TOKENIZER,
            "resize_vocab": say.TOKENIZER,
            "split_special_tokens": say.TOKENIZER,
            "add_tokens": say.TOKENIZER,
            "add_special_tokens": say.TOKENIZER,
            "rope_scaling": say.MODEL,
            "flash_attn": say.ATTENTION,
            "shift_attn": say.ATTENTION,
            "mixture_of_depths": say.MODEL,
            "use_unsloth": say.EXPERT_KERNEL,
            "use_unsloth_gc": say.RECOMPUTE,
            "use_reentrant_gc": say.RECOMPUTE_HOW,
            "enable_liger_kernel": say.CHUNKED,
            "disable_gradient_checkpointing": say.RECOMPUTE,
            "moe_aux_loss_coef": say.ROUTER_COEFFICIENT,
            "train_from_scratch": say.FROM_CONFIG,
            "upcast_layernorm": say.DTYPE,
            "upcast_lmhead_output": say.DTYPE,
            "pure_bf16": say.MASTERS,
            "fp8": say.DTYPE,
            "quantization_bit": say.QUANTISED,
            "quantization_method": say.QUANTISED,
            "quantization_type": say.QUANTISED,
            "double_quantization": say.QUANTISED,
            "image_max_pixels": say.IMAGES,
            "video_max_pixels": say.IMAGES,
            "freeze_vision_tower": say.FREEZE,
            "freeze_multi_modal_projector": say.FREEZE,
        },
        "The data": {
            "dataset": say.DATASET,
            "dataset_dir": say.DATA,
            "media_dir": say.IMAGES,
            "eval_dataset": say.EVAL_DATA,
            "template": say.TEMPLATE,
            "default_system": say.COLUMNS,
            "tool_format": say.TEMPLATE,
            "enable_thinking": say.TEMPLATE_KWARGS,
            "train_on_prompt": say.MASKED,
            "mask_history": say.MASKED,
            "streaming": say.STREAMING,
            "buffer_size": say.STREAMING,
            "mix_strategy": say.MIXTURE,
            "interleave_probs": say.MIXTURE,
            "overwrite_cache": say.CACHE,
            "tokenized_path": say.CACHE,
            "preprocessing_num_workers": say.WORKERS,
            "max_samples": say.SAMPLES,
            "val_size": say.HELD_OUT,
            "eval_on_each_dataset": say.EVAL_DATA,
        },
        "The optimizer": {
            "use_galore": say.OPTIMIZER,
            "use_apollo": say.OPTIMIZER,
            "use_badam": say.OPTIMIZER,
            "use_adam_mini": say.OPTIMIZER,
            "use_muon": say.OPTIMIZER,
            "use_dft_loss": say.OBJECTIVE,
        },
        "What comes out": {
            "plot_loss": say.LOGGING,
            "include_num_input_tokens_seen": say.LOGGING,
            "compute_accuracy": say.EVAL_DATA,
            "use_swanlab": say.TRACKER,
        },
        "The method": {
            "stage": say.TASK,
            "finetuning_type": say.METHOD,
            "freeze_trainable_layers": say.FREEZE,
            "freeze_trainable_modules": say.FREEZE,
            "freeze_extra_modules": say.FREEZE,
            "use_llama_pro": say.FREEZE,
            "lora_rank": say.LORA,
            "lora_target": say.LORA_TARGETS,
            "additional_target": say.LORA_SAVED,
            "adapter_name_or_path": say.LORA_PATH,
            "create_new_adapter": say.LORA_KIND,
            "loraplus_lr_ratio": say.GROUPS,
            "use_dora": say.LORA_KIND,
            "pissa_init": say.LORA_KIND,
            "pref_beta": say.TASK,
            "pref_loss": say.TASK,
            "pref_ftx": say.TASK,
            "ref_model": say.TASK,
            "ray_run_name": say.LAUNCHER,
            "ray_num_workers": say.RANKS,
        },
    },
    {
        "data.max_length": 2048,
        "data.long_documents": "truncate",
        "model.recompute": "full",
        "optimizer.lr": 5.0e-5,
        "optimizer.weight_decay": 0.0,
        "optimizer.betas": [0.9, 0.999],
        "schedule.name": "linear",
        "schedule.warmup_ratio": 0.0,
        "schedule.min_lr_ratio": 0.0,
        "train.epochs": 3,
        "lora.rank": 8,
        "checkpoint.every": 500,
    },
    signs=(
        "model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "stage", "finetuning_type",
        "cutoff_len", "template", "dataset", "dataset_dir", "lora_rank", "lora_target", "overwrite_cache",
        "preprocessing_num_workers", "plot_loss", "max_samples", "neat_packing",
    ),
    tasks={
        "stage": {"dpo": PREFERENCES, "kto": PREFERENCES, "rm": PREFERENCES, "ppo": REINFORCEMENT},
        "pref_loss": {"*": PREFERENCES},
    },
    moves={"adapter_name_or_path": "lora.path"},
    means={
        "stage": {"sft": {}, "pt": {"data.train_on": "all"}},
        "do_train": {"true": {}},
        "finetuning_type": {"lora": {}, "full": {}},
        "train_on_prompt": {"true": {"data.train_on": "all"}, "false": {}},
        "mask_history": {"true": {"data.train_on": "last"}, "false": {}},
        "pure_bf16": {"true": {"fsdp.param_dtype": "bf16", "fsdp.master_dtype": "bf16"}, "false": {}},
        "moe_aux_loss_coef": {"*": {"model.router_aux_loss": "document", "model.router_aux_loss_coef": ITSELF}},
        "train_from_scratch": {"true": {"model.init": "random"}, "false": {}},
        "flash_attn": same(("auto", "fa2", "fa3", "sdpa", "disabled"), {}),
        "lora_target": {"all": {"lora.targets": "all-linear"}},
        **same(("use_dora", "pissa_init", "fp8", "packing", "neat_packing"), {"false": {}}),
    },
    per_device={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    packing=("packing", "neat_packing"),
    lora=("finetuning_type", ("", "lora")),
)  # fmt: skip
