"""FLOPs of one document, forward and backward, from the model's own parameters and config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.models.train_module import TrainModule

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelFlops:
    """linear: FLOPs per token; quadratic: FLOPs per token squared of a document, the causal half counted."""

    linear: float
    quadratic: float


def flops_of(module: TrainModule) -> ModelFlops:
    """6 FLOPs per token for each weight that multiplies it (of experts, the share that a token visits), the embedding
    aside; attention 12 x layers x heads x width x T^2, halved because it is causal (Kaplan et al. 2020, section 2.1)."""
    config: Any = module.hf_model.config.get_text_config()
    share = active_share(config)
    active = float(module.head.weight.numel())
    for _, layer in module.layers:
        for name, parameter in layer.named_parameters():
            if parameter.ndim >= 2:
                active += parameter.numel() * (share if ".experts." in f".{name}" else 1.0)
    heads = getattr(config, "num_attention_heads", 0) or 0
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return ModelFlops(6.0 * active, 6.0 * len(module.layers) * heads * width)


def active_share(config: Any) -> float:
    """The share of a layer's experts that one token visits; 1 for a dense model."""
    chosen = next((v for name in _TOP_K if (v := getattr(config, name, None))), None)
    experts = next((v for name in _EXPERTS if (v := getattr(config, name, None))), None)
    return float(chosen) / float(experts) if chosen and experts else 1.0
