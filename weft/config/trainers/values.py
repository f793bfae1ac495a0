"""Values of other trainers under a key that is weft's, and what to write instead of each.

Values are compared as words of lower case; true and false are `true` and `false`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NO_HALF = {"bfloat16": "bf16", "torch.bfloat16": "bf16", "float32": "fp32", "torch.float32": "fp32", "float": "fp32"}
_DTYPES = {**_NO_HALF, "float16": "fp16", "torch.float16": "fp16", "half": "fp16"}
_ADAMW = ("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fused_adamw", "fusedadam", "adamw_apex_fused")

VALUES: Mapping[str, Mapping[str, str]] = {
    "optimizer.name": dict.fromkeys(_ADAMW, "adamw"),
    "schedule.name": {
        "cosine_with_min_lr": "cosine",
        "cosine_with_restarts": "cosine",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
    "schedule.decay": {"sqrt": "1-sqrt", "minus_sqrt": "1-sqrt"},
    "fsdp.param_dtype": _DTYPES,
    "fsdp.reduce_dtype": _NO_HALF,
    "fsdp.master_dtype": _NO_HALF,
    "optimizer.state_dtype": _NO_HALF,
    "checkpoint.dtype": _DTYPES,
    "model.attention": {
        "eager": "per_document",
        "sdpa": "auto",
        "fa2": "auto",
        "flash": "auto",
        "flash_attention_2": "auto",
        "flash_attention_3": "auto",
        "flex_attention": "flex",
    },
    "model.recompute": {"true": "full", "false": "none"},
    "fsdp.reshard_after_forward": {"always": "true", "default": "true", "never": "false"},
    "data.long_documents": {"keep_start": "truncate", "right": "truncate", "filter": "drop"},
    "checkpoint.trainer_state": {"true": "all", "false": "none"},
}


def weft_value(key: str, value: Any) -> str | None:
    """What to write instead of another trainer's value of a key, or None."""
    word = str(value).lower()
    known = VALUES.get(key, {})
    return known.get(word) or (word if word in known.values() and word != value else None)
