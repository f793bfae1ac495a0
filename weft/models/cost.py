"""Facts from which a built model's FLOPs are estimated: the weights that multiply each token, and its attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from weft.models import hf
from weft.models.flops import AttentionFacts, FlopFacts, document_flops
from weft.models.lora import LoraPlan, is_adapters
from weft.models.train_module import TrainModule
from weft.models.vision import tower_layers

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def flop_facts(module: TrainModule) -> FlopFacts:
    """FlopFacts of a module: weights from its parameters, attention from its config."""
    config: Any = module.hf_model.config.get_text_config()
    dense, expert = module.head.weight.numel(), 0
    for _, layer in module.layers:
        layer_dense, layer_expert = _matrices(layer)
        dense, expert = dense + layer_dense, expert + layer_expert
    experts, experts_per_token = expert_counts(config)
    facts = FlopFacts(dense, _attention(config), expert, experts, experts_per_token)
    return _with_tower(facts, module, config)


def costs_of_layers(module: TrainModule, length: int) -> tuple[list[float], float]:
    """(training FLOPs per token of each decoder layer, of the head), in documents of `length` tokens."""
    config: Any = module.hf_model.config.get_text_config()
    experts, chosen = expert_counts(config)
    costs = []
    for (_, layer), attention in zip(module.layers, _attention_by_layer(config), strict=True):
        dense, expert = _matrices(layer)
        single = FlopFacts(0, () if attention is None else (attention,))
        costs.append(6.0 * (dense + expert * chosen / experts) + document_flops(single, length) / length)
    return costs, 6.0 * module.head.weight.numel()


def _matrices(layer: nn.Module) -> tuple[int, int]:
    """(Weights of a layer that multiply every token, weights of its routed experts)."""
    dense = expert = 0
    for name, parameter in layer.named_parameters():
        if parameter.ndim >= 2 and not name.endswith("bias"):
            routed = ".experts." in f".{name}"
            dense, expert = dense + parameter.numel() * (not routed), expert + parameter.numel() * routed
    return dense, expert


def _with_tower(facts: FlopFacts, module: TrainModule, text: Any) -> FlopFacts:
    """Adds the vision tower's weights and attention, if the model has a tower."""
    layers = [layer for _, layer in tower_layers(module.base, module.facts)]
    if not layers:
        return facts
    weights = sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim >= 2)
    width = next((p.shape[0] for p in layers[0].parameters() if p.ndim == 1), 0)  # the first norm's width
    vision: Any = module.base.config.vision_config
    full_attention_layers = getattr(vision, "fullatt_block_indexes", None)  # Qwen2.5-VL: all other layers have windows
    window = None if full_attention_layers is None else (vision.window_size // vision.patch_size) ** 2
    attention = tuple(
        AttentionFacts(1, width, None if full_attention_layers is None or index in full_attention_layers else window)
        for index in range(len(layers))
    )
    memory = len(layers) * width / (text.num_hidden_layers * text.hidden_size)
    return replace(facts, tower=weights, tower_attention=attention, tower_memory=memory)


def expert_counts(config: Any) -> tuple[int, int]:
    """(routed experts per layer, experts per token); (1, 1) if the config has none."""
    experts, chosen = (next((v for n in names if (v := getattr(config, n, None))), 1) for names in (EXPERTS, _TOP_K))
    return experts, min(chosen, experts)


def _attention(config: Any) -> tuple[AttentionFacts, ...]:
    return tuple(facts for facts in _attention_by_layer(config) if facts is not None)


def _attention_by_layer(config: Any) -> list[AttentionFacts | None]:
    layer_configs = hf.layer_configs(config)
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(layer_configs)
    return [_attention_of(kind, layer_config) for kind, layer_config in zip(types, layer_configs, strict=True)]


def _attention_of(kind: str, config: Any) -> AttentionFacts | None:
    """The attention of a layer of type `kind`; None for layers without softmax attention (linear, recurrent)."""
    windows = {
        "full_attention": None,
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
    }
    heads = getattr(config, "num_attention_heads", 0) or 0
    if not heads or kind not in windows:
        return None
    name = windows[kind]
    # MLA's configs have the parts of its keys; head_dim is at most the rotated part.
    keys: float = getattr(config, "head_dim", None) or config.hidden_size / heads
    plain, values = getattr(config, "qk_nope_head_dim", None), getattr(config, "v_head_dim", None)
    if plain is not None:
        keys = plain + config.qk_rope_head_dim
    return AttentionFacts(heads, (keys + (values or keys)) / 2, getattr(config, name, None) if name else None)


def with_adapters(facts: FlopFacts, plan: LoraPlan, module: TrainModule) -> FlopFacts:
    """The facts of a base that is frozen under adapters. For a fully trained module, the weight gradient (a third of a
    trained weight's cost) is added to its cost as a frozen module."""
    trained = 0.0
    for target in plan.targets:
        inputs = 0 if target.kind == "embedding" else target.inputs  # a look-up
        visited = facts.experts_per_token if target.kind == "experts" else 1
        trained += plan.rank * visited * (inputs + target.outputs)
    full_parameters = (
        p for name, p in module.named_parameters() if plan.trains(name) and not is_adapters(name) and p.ndim == 2
    )
    trained += sum(p.numel() for p in full_parameters) / 3
    return replace(facts, frozen=True, trained=trained)
