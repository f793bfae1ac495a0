"""A small copy of any config that keeps what can go wrong: every layer type, windows, chunks, experts, odd scalings."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

_WINDOW = 16  # every window and chunk of a small copy; check rows are longer
_ORIGINAL_POSITIONS = 64
_HEADS = 4
# At the usual 0.02 a narrow model is nearly linear: rotary tables rounded to bf16 move its logits by 1e-5 only; at 0.2
# by 5e-3, while the rounding of fp32 stays where it was.
_INITIALIZER_RANGE = 0.2
_PERIODS = ("full_attention_interval", "attn_layer_period", "expert_layer_period", "global_attn_every_n_layers",
            "sliding_window_pattern", "hybrid_layer_period")  # fmt: skip
_SMALL = {
    "intermediate_size": 128, "ffn_dim": 128, "n_inner": 128, "ffn_hidden_size": 128, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "intermediate_size_mlp": 64, "vocab_size": 512,
    "vocab_size_per_layer_input": 512,    "q_lora_rank": 32, "kv_lora_rank": 16,
}  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def fewer_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """A copy with about `layers` layers, more where it takes more to have one of each type. Widths stay."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    total = int(text.num_hidden_layers)
    types = getattr(text, "layer_types", None)
    periods = [value for name in _PERIODS if isinstance(value := getattr(text, name, None), int)]
    if types:
        kept = sorted({types.index(kind) for kind in types})
        kept += [i for i in range(total) if i not in kept][: max(0, layers - len(kept))]
    else:
        kept = list(range(min(total, max([layers, *periods]))))
    kept.sort()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == total and total > 1:
            setattr(text, name, type(value)(value[i] for i in kept))
    text.num_hidden_layers = len(kept)
    _renumber(text, kept)
    if getattr(text, "first_k_dense_replace", 0) >= len(kept):
        text.first_k_dense_replace = min(1, len(kept) - 1)
    return small


def _renumber(text: Any, kept: list[int]) -> None:
    """What the config says of single layers by their number, such as gemma4 of the width of their heads."""
    said = text.to_dict().get("per_layer_config")
    if said:
        text.per_layer_config = {new: said[str(old)] for new, old in enumerate(kept) if str(old) in said} or None


def narrow(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with small widths, few experts, a window of 16, and long-context rules that begin at 64 tokens."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    _narrow_heads(text)
    for name, value in _SMALL.items():
        _lower(text, name, value)
    for name in _EXPERTS:
        _lower(text, name, 8)
    for name in ("sliding_window", "attention_chunk_size"):
        _lower(text, name, _WINDOW)
    for name in _TOKEN_IDS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    _early_long_context(text)
    if hasattr(text, "initializer_range"):
        text.initializer_range = _INITIALIZER_RANGE
    return small


def _lower(config: Any, name: str, ceiling: int) -> None:
    value = _of_all_layers(config, name)
    if isinstance(value, int) and not isinstance(value, bool) and value > ceiling:
        setattr(config, name, ceiling)


def _of_all_layers(config: Any, name: str) -> Any:
    """transformers refuses to read from a config what it says otherwise of some layers."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def _narrow_heads(text: Any) -> None:
    """Four heads of at most the width they had; head counts keep the ratio of query to key heads."""
    heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
    if heads <= _HEADS:
        return
    width = _of_all_layers(text, "head_dim") or hidden // heads
    kv = _of_all_layers(text, "num_key_value_heads")
    text.num_attention_heads = _HEADS
    if isinstance(kv, int):
        text.num_key_value_heads = max(1, kv * _HEADS // heads)
    text.hidden_size = _HEADS * int(width)


def _early_long_context(text: Any) -> None:
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for rope in nested:
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = _ORIGINAL_POSITIONS
    if getattr(text, "original_max_position_embeddings", None):
        text.original_max_position_embeddings = _ORIGINAL_POSITIONS
