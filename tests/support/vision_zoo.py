"""Tiny vision models: folders with config, tokenizer, chat template and processor, as the families lay them out.

Tokenizers are byte by byte. Images are processed into few patches: 8 pixels each where a family has patches.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from weft.models import hf

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACE{% elif c['type'] == 'video' %}VIDEO{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=4096,
)  # fmt: skip
_QWEN_VISION: dict[str, Any] = dict(
    depth=2, num_heads=2, patch_size=8, spatial_merge_size=2, temporal_patch_size=2, in_channels=3
)
_QWEN_IMAGES = dict(
    patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 256, "longest_edge": 64 * 64}
)
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# A layer that carries a state, and one of attention.
_STATES: dict[str, Any] = dict(
    rope_parameters=_SECTIONS | {"partial_rotary_factor": 1.0}, head_dim=16,
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip


@dataclass(frozen=True)
class Vision:
    """A family. tokens: special tokens; named: those that the tokenizer has as attributes. place: what the template
    writes for an image. text, vision: of its configs. own: of the config itself. images: preprocessor_config.json.
    processor: processor_config.json. ids: of the config, by token."""

    config: str
    model: str
    place: str
    tokens: tuple[str, ...]
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    images: Mapping[str, Any]
    named: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    type: str = ""


_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_IDS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
_QWEN = dict(place="<|vision_start|><|image_pad|><|vision_end|>", tokens=_QWEN_TOKENS, ids=_QWEN_IDS)
_SIGLIP: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
)
_GLM_TOKENS = (
    "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>"
)  # fmt: skip
_IDEFICS_TOKENS = (
    "<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)),
)  # fmt: skip
_IDEFICS: dict[str, Any] = dict(
    place="<image>", tokens=_IDEFICS_TOKENS, text=_TEXT | {"model_type": "llama", "pad_token_id": 0}, vision=_SIGLIP,
    own={"scale_factor": 2}, ids={"image_token_id": "<image>"},
    images={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}, processor={"image_seq_len": 4},
)  # fmt: skip
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_PIXTRAL: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8,
    head_dim=16,
)  # fmt: skip

FAMILIES: dict[str, Vision] = {
    "qwen2_vl": Vision(
        "Qwen2VLConfig", "Qwen2VLForConditionalGeneration", **_QWEN, text=_TEXT | {"rope_parameters": _SECTIONS},
        vision=_QWEN_VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, type="Qwen2VLImageProcessor",
        images=_QWEN_IMAGES,
    ),
    "qwen2_5_vl": Vision(
        "Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", **_QWEN, text=_TEXT | {"rope_parameters": _SECTIONS},
        vision=_QWEN_VISION | {
            "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 32,
            "fullatt_block_indexes": [1],
        }, type="Qwen2VLImageProcessor", images=_QWEN_IMAGES,
    ),
    "qwen3_vl": Vision(
        "Qwen3VLConfig", "Qwen3VLForConditionalGeneration", **_QWEN,
        text=_TEXT | {"rope_parameters": _SECTIONS, "head_dim": 16},
        vision=_QWEN_VISION | {
            "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        }, type="Qwen2VLImageProcessor", images=_QWEN_IMAGES,
    ),
    "qwen3_vl_moe": Vision(
        "Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", **_QWEN,
        text=_TEXT | {
            "rope_parameters": _SECTIONS, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
        vision=_QWEN_VISION | {
            "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        }, type="Qwen2VLImageProcessor", images=_QWEN_IMAGES,
    ),
    "qwen3_5": Vision(
        "Qwen3_5Config", "Qwen3_5ForConditionalGeneration", **_QWEN, text=_TEXT | _STATES,
        vision=_QWEN_VISION | {
            "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64,
        }, type="Qwen2VLImageProcessor", images=_QWEN_IMAGES,
    ),
    "glm4v": Vision(
        "Glm4vConfig", "Glm4vForConditionalGeneration", place="<|begin_of_image|><|image|><|end_of_image|>",
        tokens=_GLM_TOKENS, text=_TEXT | {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}},
        vision={"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64,
                "intermediate_size": 48, "image_size": 32},
        type="Glm4vImageProcessor", images=_QWEN_IMAGES | {"size": {"shortest_edge": 512, "longest_edge": 2 * 64 * 64}},
        ids={"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
             "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
             "video_end_token_id": "<|end_of_video|>"},
    ),
    "gemma3": Vision(
        "Gemma3Config", "Gemma3ForConditionalGeneration", place="<start_of_image>",
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        text=_TEXT | {"head_dim": 16, "sliding_window": 16}, vision=_SIGLIP, own={"mm_tokens_per_image": 4},
        type="Gemma3ImageProcessor", images={"size": {"height": 32, "width": 32}}, processor={"image_seq_length": 4},
        ids={"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
             "eoi_token_index": "<end_of_image>", "image_token_id": "<image_soft_token>"},
    ),
    "llava": Vision(
        "LlavaConfig", "LlavaForConditionalGeneration", place="<image>\n", tokens=("<image>",),
        text=_TEXT | {"model_type": "llama"},
        vision=_SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 32}, type="LlavaImageProcessor",
        images={"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        processor={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ids={"image_token_id": "<image>"},
    ),
    "llava_next": Vision(
        "LlavaNextConfig", "LlavaNextForConditionalGeneration", place="<image>\n", tokens=("<image>",),
        text=_TEXT | {"model_type": "llama"},
        vision=_SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 32},
        own={"image_grid_pinpoints": [[32, 64], [64, 32]]}, type="LlavaNextImageProcessor",
        images={"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
                "image_grid_pinpoints": [[32, 64], [64, 32]]},
        processor={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ids={"image_token_index": "<image>"},
    ),
    "internvl": Vision(
        "InternVLConfig", "InternVLForConditionalGeneration", place="<IMG_CONTEXT>\n",
        tokens=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
               "video_token": "<video>"},
        text=_TEXT | {"model_type": "qwen2"},
        vision=_SIGLIP | {"image_size": [32, 32], "patch_size": [8, 8]}, own={"image_seq_length": 4},
        type="GotOcr2ImageProcessor",
        images={"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        processor={"image_seq_length": 4}, ids={"image_token_id": "<IMG_CONTEXT>"},
    ),
    "idefics3": Vision(
        "Idefics3Config", "Idefics3ForConditionalGeneration", **_IDEFICS, type="Idefics3ImageProcessor"
    ),
    "smolvlm": Vision("SmolVLMConfig", "SmolVLMForConditionalGeneration", **_IDEFICS, type="SmolVLMImageProcessor"),
    "mistral3": Vision(
        "Mistral3Config", "Mistral3ForConditionalGeneration", place="[IMG]", tokens=_PIXTRAL_TOKENS,
        text=_TEXT | {"model_type": "mistral"}, vision=_PIXTRAL | {"model_type": "pixtral"},
        own={"spatial_merge_size": 2}, type="PixtralImageProcessor",
        images={"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        processor={"patch_size": 8, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"},
        ids={"image_token_id": "[IMG]", "image_token_index": "[IMG]"},
    ),
}  # fmt: skip
# Chosen once all of the above passed, and tried as they are: weft has nothing that is theirs. Without processors.
OTHER_FAMILIES: dict[str, Vision] = {
    "qwen3_5_moe": Vision(
        "Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", **_QWEN,
        text=_TEXT | _STATES | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 40,
        },
        vision=FAMILIES["qwen3_5"].vision, images={},
    ),
    "glm4v_moe": Vision(
        "Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration", place="<|image|>", tokens=_GLM_TOKENS,
        text=FAMILIES["glm4v"].text | {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
        },
        vision=FAMILIES["glm4v"].vision, images={}, ids=FAMILIES["glm4v"].ids,
    ),
    "vipllava": Vision(
        "VipLlavaConfig", "VipLlavaForConditionalGeneration", place="<image>", tokens=("<image>",),
        text=_TEXT | {"model_type": "llama"},
        vision=_SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 32},
        own={"vision_feature_layers": [-1, -2]}, images={}, ids={"image_token_id": "<image>"},
    ),
}  # fmt: skip
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _traits_of(family: str) -> Vision:
    return FAMILIES.get(family) or OTHER_FAMILIES[family]


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, with a chat template that writes the placeholder of an image."""
    traits = _traits_of(family)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (*_SPECIAL, *traits.tokens)]
    )
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **named, extra_special_tokens=dict(traits.named))
    placeholder = traits.place.replace("\n", "\\n")
    fast.chat_template = _CHATML.replace("PLACE", placeholder).replace("VIDEO", placeholder.replace("image", "video"))
    return fast


def vision_config(family: str, tokenizer: PreTrainedTokenizerFast, **text: Any) -> PretrainedConfig:
    """The config of a tiny model of a family. text: changes of its text config."""
    traits = _traits_of(family)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in traits.ids.items()}
    text = {**traits.text, "vocab_size": len(tokenizer), **text}
    config = getattr(transformers, traits.config)(
        text_config=text, vision_config=dict(traits.vision), **traits.own, **ids
    )
    config.architectures = [traits.model]
    return config


def vision_folder(folder: Path, family: str, *, weights: bool = False) -> str:
    """Writes a model's folder and returns its path. weights: with random ones."""
    traits, tokenizer = FAMILIES[family], vision_tokenizer(family)
    config = vision_config(family, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        getattr(transformers, traits.model)._from_config(config).save_pretrained(folder)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": traits.type, **traits.images}))
    if traits.processor:
        (folder / "processor_config.json").write_text(json.dumps(dict(traits.processor)))
    return str(folder)


_folder = tempfile.TemporaryDirectory(prefix="weft-tests-")


@cache
def saved_vision_model(family: str, layers: int = 2, deep: int = 1) -> str:
    """A directory with a tiny random model of this family, without a processor; weights as large as in saved_model.
    deep: decoder layers that take features of the tower, where the family has such."""
    # qwen3_5 amplifies rounding: with 0.2, beyond the tolerance on a CPU without AVX-512.
    size = 0.1 if family == "qwen3_5" else 0.2
    config = vision_config(family, vision_tokenizer(family), initializer_range=size, num_hidden_layers=layers)
    if hasattr(config.vision_config, "deepstack_visual_indexes"):
        config.vision_config.deepstack_visual_indexes = list(range(deep))
    model = hf.build_random(config, dtype=torch.float32, attention="eager", seed=0)
    with torch.no_grad():  # gemma3's projector begins as zeros, and would hide its images
        for parameter in model.parameters():
            if not parameter.any():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    path = Path(_folder.name) / f"{family}-{layers}-{deep}"
    model.save_pretrained(path)
    return str(path)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image in which every pixel differs from its neighbours."""
    step = 7 + 2 * seed
    return Image.frombytes("RGB", (width, height), bytes((i * step + i // 3) % 256 for i in range(height * width * 3)))


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    """The bytes of an image's file."""
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def question(text: str, answer: str, images: Sequence[Any], **columns: Any) -> dict[str, Any]:
    """A row: images, then a text, then the answer."""
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}], **columns}
