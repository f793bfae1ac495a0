"""Tiny configs of vision-language families. Hidden 64, 2 layers of text, vocabulary 128; images of a few patches."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from weft.models import hf

IMAGE = 120  # the placeholder
_TEXT: dict[str, Any] = dict(
    vocab_size=128, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {**_MROPE, "mrope_interleaved": True}
_QWEN: dict[str, Any] = dict(
    image_token_id=IMAGE, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123
)
_PATCHES: dict[str, Any] = dict(depth=2, num_heads=2, patch_size=4, temporal_patch_size=2, spatial_merge_size=2)
_QWEN3: dict[str, Any] = dict(
    _PATCHES, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_position_embeddings=64,
    deepstack_visual_indexes=[0],
)  # fmt: skip
_TOWER: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
)

# name -> (config class, model class, config)
_ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", dict(
        text_config=dict(_TEXT, rope_parameters=_MROPE), **_QWEN,
        vision_config=dict(_PATCHES, embed_dim=32, hidden_size=64, mlp_ratio=2))),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", dict(
        text_config=dict(_TEXT, rope_parameters=_MROPE), **_QWEN,
        vision_config=dict(
            _PATCHES, hidden_size=32, out_hidden_size=64, intermediate_size=48, window_size=16,
            fullatt_block_indexes=[1]))),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", dict(
        text_config=dict(_TEXT, head_dim=16, rope_parameters=_INTERLEAVED), **_QWEN, vision_config=_QWEN3)),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", dict(
        text_config=dict(
            _TEXT, head_dim=16, rope_parameters=_INTERLEAVED, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=40),
        **_QWEN, vision_config=_QWEN3)),
    "glm4v": ("Glm4vConfig", "Glm4vForConditionalGeneration", dict(
        text_config=dict(_TEXT, head_dim=16, rope_parameters={**_MROPE, "partial_rotary_factor": 1.0}),
        vision_config=dict(_PATCHES, hidden_size=32, out_hidden_size=64, intermediate_size=48, image_size=32),
        image_token_id=IMAGE, video_token_id=121, image_start_token_id=122, image_end_token_id=123,
        video_start_token_id=124, video_end_token_id=125)),
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration", dict(
        text_config=dict(
            _TEXT, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=16),
        vision_config=_TOWER, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=122,
        eoi_token_index=123)),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", dict(
        text_config=dict(_TEXT, model_type="llama"),
        vision_config=dict(_TOWER, model_type="clip_vision_model", num_hidden_layers=3, projection_dim=16),
        image_token_index=IMAGE, image_seq_length=16)),
    "internvl": ("InternVLConfig", "InternVLForConditionalGeneration", dict(
        text_config=dict(_TEXT, model_type="qwen2"),
        vision_config=dict(_TOWER, image_size=[16, 16], patch_size=[4, 4]),
        image_token_id=IMAGE, image_seq_length=4, downsample_ratio=0.5)),
    "smolvlm": ("SmolVLMConfig", "SmolVLMForConditionalGeneration", dict(
        text_config=dict(_TEXT, model_type="llama"), vision_config=_TOWER, image_token_id=IMAGE, scale_factor=2)),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration", dict(
        text_config=dict(_TEXT, model_type="mistral", head_dim=16, sliding_window=None),
        vision_config=dict(_TOWER, model_type="pixtral", image_size=32, head_dim=16),
        image_token_index=IMAGE, spatial_merge_size=2, vision_feature_layer=-1)),
}  # fmt: skip

VISION_FAMILIES = tuple(_ZOO)


def vision_config(name: str, **text: Any) -> PretrainedConfig:
    """The tiny config of a family, with its `architectures` set. text: changes of the text config."""
    config_class, model_class, own = _ZOO[name]
    config: PretrainedConfig = getattr(transformers, config_class)(
        **{**own, "text_config": {**own["text_config"], **text}}
    )
    config.architectures = [model_class]
    return config


_folder = tempfile.TemporaryDirectory(prefix="weft-tests-")


@cache
def saved_vision_model(family: str, **text: Any) -> str:
    """A directory with a tiny random model of this family, as save_pretrained writes it."""
    path = Path(_folder.name) / "-".join([family, *(f"{k}={v}" for k, v in sorted(text.items()))])
    model = hf.build_random(
        vision_config(family, initializer_range=0.2, **text), dtype=torch.float32, attention="eager", seed=0
    )
    with torch.no_grad():  # gemma3's projector begins as zeros, and would hide its images
        for parameter in model.parameters():
            if not parameter.any():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    model.save_pretrained(path)
    return str(path)
