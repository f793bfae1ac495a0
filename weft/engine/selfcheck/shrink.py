"""Small copies of any config that keep its features: kinds of layers, windows, chunks, experts, scalings."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

from weft.engine.selfcheck.kinds import LayerKinds, meta_model
from weft.models.cost import EXPERTS, expert_counts
from weft.models.facts import rope_parameters

_WINDOW = 16  # every window and chunk of a small copy; check rows are longer
_ORIGINAL_POSITIONS = 64
_HEADS = 4
_PATCHES = 8  # on a side of an image
_HIDDEN = 256
# At the usual 0.02 a narrow model is nearly linear: rotary tables rounded to bf16 move its logits by only 1e-5; at 0.2
# they move them by 5e-3, while fp32 rounding has the same effect as before.
_INITIALIZER_RANGE = 0.2
_SMALL = {
    "intermediate_size": 128, "ffn_dim": 128, "n_inner": 128, "ffn_hidden_size": 128, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "intermediate_size_mlp": 64, "vocab_size": 512,
    "vocab_size_per_layer_input": 512, "q_lora_rank": 32, "kv_lora_rank": 16, "chunk_size": _WINDOW,
    "mamba_chunk_size": _WINDOW, "mamba_d_state": 16, "ssm_state_size": 16, "state_size": 16, "index_topk": _WINDOW,
}  # fmt: skip
# Sizes of state mixers and of wide attention, which keep their ratio to the hidden width.
_WITH_HIDDEN = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "mamba_d_ssm", "attention_hidden_size")
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def fewer_layers(config: PretrainedConfig, layers: int, kinds: LayerKinds) -> PretrainedConfig:
    """A copy with `layers` decoder layers, or more if it needs them to have every kind in `kinds`. Widths do not
    change.

    The first layer of each kind is kept, if the config has per-layer lists; otherwise the shortest prefix of the layers
    with every kind; otherwise all layers.
    """
    total, firsts = len(kinds.layers), [kinds.layers.index(kind) for kind in set(kinds.layers)]
    remaining = [number for number in range(total) if number not in firsts]
    spread = sorted(firsts + remaining[: max(0, layers - len(firsts))])
    for numbers in (spread, list(range(max(layers, max(firsts) + 1)))):
        if len(numbers) < total:
            small = _with_layers(config, numbers)
            if _has_all_kinds(small, kinds):
                return small
    return copy.deepcopy(config)


def _with_layers(config: PretrainedConfig, numbers: list[int]) -> PretrainedConfig:
    """A copy with these layers only. Lists with one entry per layer, and lists of layer numbers, are shortened too."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    total = int(text.num_hidden_layers)
    for name, value in list(vars(text).items()):
        if not isinstance(value, list | tuple) or total < 2:
            continue
        if "layer" in name and value and list(value) == sorted(set(range(total)).intersection(value)):
            setattr(text, name, type(value)(index for index, old in enumerate(numbers) if old in value))
        elif len(value) == total:
            setattr(text, name, type(value)(value[i] for i in numbers))
    text.num_hidden_layers = len(numbers)
    # Values of single layers, by number (head widths in gemma4).
    per_layer = text.to_dict().get("per_layer_config")
    if per_layer:
        text.per_layer_config = {
            new: per_layer[str(old)] for new, old in enumerate(numbers) if str(old) in per_layer
        } or None
    return small


def _has_all_kinds(config: PretrainedConfig, kinds: LayerKinds) -> bool:
    try:
        return kinds.are_those_of(meta_model(config))
    except Exception:  # any exception type: shortened lists may not fit together
        return False


def narrow(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with small widths, few experts, a window of 16, and long-context rules that begin at 64 tokens."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # keys whose values differ by layer raise when read
        text.allow_global_per_layer_attribute_access = True
    _narrow_heads(text)
    for name, value in _SMALL.items():
        _lower(text, name, value)
    experts = _enough_experts(text)
    for name in EXPERTS:
        _lower(text, name, experts)
    for name in ("sliding_window", "attention_chunk_size"):
        _lower(text, name, _WINDOW)
    for name in _TOKEN_IDS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    for rope in rope_parameters(text):
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = _ORIGINAL_POSITIONS
        elif rope.get("rope_type") == "dynamic":  # documents of checks stay below its limit, as those of a run do
            text.max_position_embeddings = max(text.max_position_embeddings, _ORIGINAL_POSITIONS)
    if getattr(text, "original_max_position_embeddings", None):
        text.original_max_position_embeddings = _ORIGINAL_POSITIONS
    if hasattr(text, "initializer_range"):
        text.initializer_range = _INITIALIZER_RANGE
    if getattr(small, "vision_config", None) is not None:
        _smaller_images(small)
        _narrow_tower(small.vision_config, text)
        _keep_placeholders(small, text.vocab_size)
    return small


def _keep_placeholders(config: Any, vocabulary: int) -> None:
    """Move the placeholder ids of images and videos to the end of the vocabulary if any lies beyond it."""
    names = [name for name in ("image_token_id", "video_token_id") if isinstance(getattr(config, name, None), int)]
    if any(getattr(config, name) >= vocabulary for name in names):
        for offset, name in enumerate(names, start=1):
            setattr(config, name, vocabulary - offset)


def _smaller_images(config: Any) -> None:
    """Limit images to 8 x 8 patches, and lower the config's tokens per image, if any, in the same ratio."""
    vision = config.vision_config
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    side, patch = (x[0] if isinstance(x, list | tuple) else x for x in (size, patch))
    if not (isinstance(side, int) and isinstance(patch, int)) or side // patch <= _PATCHES:
        return
    vision.image_size = [_PATCHES * patch] * 2 if isinstance(size, list | tuple) else _PATCHES * patch
    tokens = getattr(config, "mm_tokens_per_image", None)
    if tokens is not None:
        config.mm_tokens_per_image = max(1, tokens * _PATCHES**2 // (side // patch) ** 2)


def _narrow_tower(vision: Any, text: Any) -> None:
    """Two layers of two heads; the last attends to the whole image."""
    for name in ("depth", "num_hidden_layers"):
        _lower(vision, name, 2)
    for name, value in (("fullatt_block_indexes", [1]), ("deepstack_visual_indexes", [0])):
        if getattr(vision, name, None):
            setattr(vision, name, value)
    heads = "num_heads" if hasattr(vision, "num_heads") else "num_attention_heads"
    width = "embed_dim" if hasattr(vision, "embed_dim") and hasattr(vision, "num_heads") else "hidden_size"
    out = "hidden_size" if width == "embed_dim" else "out_hidden_size"
    count, total = getattr(vision, heads, None), getattr(vision, width, None)
    if isinstance(count, int) and isinstance(total, int) and count > 2:
        setattr(vision, heads, 2)
        setattr(vision, width, total // count * 2)
    _lower(vision, "intermediate_size", 64)
    if hasattr(vision, out):
        setattr(vision, out, text.hidden_size)


def _lower(config: Any, name: str, ceiling: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, list):
        setattr(config, name, [min(entry, ceiling) for entry in value])
    elif isinstance(value, int) and not isinstance(value, bool) and value > ceiling:
        setattr(config, name, ceiling)


def _enough_experts(text: Any) -> int:
    """Number of experts of the copy: twice the experts per token, at least 8, and at least 4 per routing group."""
    experts = max(8, 2 * expert_counts(text)[1])
    groups = getattr(text, "n_group", None) or 1
    return groups * max(4, -(-experts // groups))


def _narrow_heads(text: Any) -> None:
    """Four heads of unchanged width. The ratio of query to key heads stays, and so does the ratio of the widths in
    _WITH_HIDDEN to the hidden width. Without attention, the hidden width is at most 256."""
    heads, hidden = getattr(text, "num_attention_heads", None), int(text.hidden_size)
    if heads is None:
        text.hidden_size = min(hidden, _HIDDEN)
    elif heads > _HEADS:
        width = getattr(text, "head_dim", None) or hidden // heads
        kv = getattr(text, "num_key_value_heads", None)
        text.num_attention_heads = _HEADS
        if isinstance(kv, int):
            text.num_key_value_heads = max(1, kv * _HEADS // heads)
        text.hidden_size = _HEADS * int(width)
    for name in _WITH_HIDDEN if heads is not None else ("num_heads",):
        if isinstance(value := getattr(text, name, None), int):
            setattr(text, name, max(1, value * text.hidden_size // hidden))
