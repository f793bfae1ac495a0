"""An architecture that transformers does not have, as a user writes one: attention and feed-forward in parallel behind
one norm, a gain on each head, and a rotary table of its own. With `far_from`, a layer has weights that only documents
with more tokens use. Importing this module registers it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class TwinConfig(PretrainedConfig):
    model_type = "twin"

    def __init__(
        self,
        vocab_size: int = 264,
        hidden_size: int = 32,
        intermediate_size: int = 48,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 4,
        max_position_embeddings: int = 512,
        initializer_range: float = 0.2,
        far_from: int = 0,
        **options: Any,
    ) -> None:
        self.far_from = far_from
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_attention_heads
        self.max_position_embeddings, self.initializer_range = max_position_embeddings, initializer_range
        options.setdefault("tie_word_embeddings", False)
        super().__init__(**options)


def rotated(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_BTD[:, None] + torch.cat([-second, first], dim=-1) * sin_BTD[:, None]


class TwinAttention(nn.Module):
    def __init__(self, config: TwinConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling, self.num_key_value_groups, self.attention_dropout = self.head_dim**-0.5, 1, 0.0
        width = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(self.head_dim))

    def forward(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Any, past_key_values: Any,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q * self.gain, *position_embeddings), rotated(k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1))


def eager(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any) -> Any:
    scores = q @ k.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask[..., : k.shape[-2]]
    return (scores.softmax(-1) @ v).transpose(1, 2), None


class TwinFeedForward(nn.Module):
    def __init__(self, config: TwinConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(hidden).tanh())


class TwinLayer(GradientCheckpointingLayer):
    def __init__(self, config: TwinConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attention = TwinAttention(config, layer_idx)
        self.mlp = TwinFeedForward(config)
        self.far_from = config.far_from
        if config.far_from:
            self.far = TwinFeedForward(config)

    def forward(self, hidden: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
        normed = self.norm(hidden)
        if self.far_from:
            is_far = position_ids >= self.far_from
            if is_far.any():
                hidden = hidden + self.far(normed) * is_far[..., None]
        return hidden + self.attention(normed, **kwargs) + self.mlp(normed)


class TwinPreTrainedModel(PreTrainedModel):
    config_class = TwinConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["TwinLayer"]
    _supports_attention_backend = True
    _supports_sdpa = True


class TwinModel(TwinPreTrainedModel):
    def __init__(self, config: TwinConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TwinLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None, **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        from transformers.masking_utils import create_causal_mask

        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past_length, past_length + hidden.shape[1], device=hidden.device)[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, past_key_values=past_key_values,
            position_ids=position_ids,
        )  # fmt: skip
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        speeds = 1.0 / 500.0 ** (torch.arange(half, device=hidden.device).float() / half)
        angles = (position_ids[..., None].float() * speeds).repeat(1, 1, 2)
        embeddings = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(
                hidden, position_ids=position_ids, position_embeddings=embeddings, attention_mask=mask,
                past_key_values=past_key_values, **kwargs,
            )  # fmt: skip
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)


class TwinForCausalLM(TwinPreTrainedModel, GenerationMixin):
    def __init__(self, config: TwinConfig) -> None:
        super().__init__(config)
        self.model = TwinModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, labels: None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        out = self.model(input_ids, **kwargs)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, positions])
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


AutoConfig.register("twin", TwinConfig)
AutoModelForCausalLM.register(TwinConfig, TwinForCausalLM)
