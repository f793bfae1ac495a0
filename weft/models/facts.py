"""Locates the parts of a causal LM, by one rule for every family of transformers 5.

decoder: the parent of the input embedding. base: the root's child that contains the decoder. layers: the decoder's
ModuleList of num_hidden_layers modules. head: the output embedding. logits = transform(head(last_hidden_state)).
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from weft.errors import UserError
from weft.models import hf
from weft.ops.head import LogitTransform

_FINAL_NORM = re.compile(r"^(?!.*embed).*(norm|ln_f|layernorm)|^embedding_norm$", re.IGNORECASE)


@dataclass(frozen=True)
class Facts:
    """Paths of the parts, relative to the HuggingFace model."""

    model_type: str
    base: str
    decoder: str
    embedding: str
    layers: str
    head: str
    final_norm: str | None
    transform: LogitTransform


def find_facts(model: PreTrainedModel) -> Facts:
    """Locate the parts of a model. Raises UserError, with the model's class, if they are not found.

    The head of a classifier has config.num_labels outputs per token instead of logits.
    """
    names = {id(module): name for name, module in model.named_modules()}
    config = model.config.get_text_config()
    embedding = names.get(id(model.get_input_embeddings()))
    head_module = _score_head(model) if hf.classifies(model.config) else model.get_output_embeddings()
    if embedding is None or "." not in embedding or not isinstance(head_module, nn.Linear):
        raise _refusal(model, "it has no token embedding inside a base model, or no linear head")
    if names[id(head_module)] in ("base", "head", "layers"):  # names that TrainModule uses itself
        raise _refusal(model, f"its head is named `{names[id(head_module)]}`")
    decoder = embedding.rsplit(".", 1)[0]
    module = model.get_submodule(decoder)
    count = config.num_hidden_layers
    layers = [n for n, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(layers) != 1:
        raise _refusal(model, f"{decoder} has {len(layers)} lists of {count} layers, expected one")
    return Facts(
        model_type=config.model_type,
        base=embedding.split(".", 1)[0],
        decoder=decoder,
        embedding=embedding,
        layers=f"{decoder}.{layers[0]}",
        head=names[id(head_module)],
        final_norm=_final_norm(module, decoder),
        transform=logit_transform(model.config, type(model)),
    )


def _score_head(model: PreTrainedModel) -> nn.Module | None:
    """The root's only linear layer with an output per label (score or classifier in transformers), if there is one."""
    labels = model.config.num_labels
    candidates = [child for child in model.children() if isinstance(child, nn.Linear) and child.out_features == labels]
    return candidates[0] if len(candidates) == 1 else None


def _final_norm(decoder: nn.Module, path: str) -> str | None:
    """Path of the norm before the head: the decoder's child with a norm's name and 1-D parameters only; None if there
    is not exactly one."""
    names = [
        name
        for name, child in decoder.named_children()
        if _FINAL_NORM.search(name)
        and any(True for _ in child.parameters())
        and all(p.ndim == 1 for p in child.parameters())
    ]
    return f"{path}.{names[0]}" if len(names) == 1 else None


def logit_transform(config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None) -> LogitTransform:
    """The soft-cap or factor that the family applies to head(hidden), from its config's keys. The start-up check
    verifies it. config: of the whole model. model_class: None for the class that the config names.

    A class around a text model has another forward, which may omit the text model's factor
    (Cohere2VisionForConditionalGeneration of transformers 5.19): the forward's code must name the key.
    """
    text = config.get_text_config()
    names: tuple[str, ...] | None = None
    if text is not config:
        forward = inspect.unwrap((model_class or hf.model_class(config)).forward)
        names = (*forward.__code__.co_names, *(c for c in forward.__code__.co_consts if isinstance(c, str)))

    def number(key: str) -> float | None:
        value = getattr(text, key, None)
        return float(value) if isinstance(value, (int, float)) and (names is None or key in names) else None

    softcap = number("final_logit_softcapping") or number("logits_soft_cap")
    if softcap is not None:
        return LogitTransform(softcap=softcap)
    if (scaling := number("logits_scaling")) is not None:
        return LogitTransform(scale=scaling if text.model_type == "hyperclovax" else 1.0 / scaling)
    scale = number("logit_scale") or number("lm_head_multiplier")
    return LogitTransform() if scale is None else LogitTransform(scale=scale)


def position_limit(config: PretrainedConfig) -> int | None:
    """The length above which the rotary table depends on the document's length, so that the document needs a separate
    row; None for other models.

    longrope has one table up to original_max_position_embeddings and another above. `dynamic` has a state between
    calls, so the engine refuses documents above the limit.
    """
    for rope in rope_parameters(config):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            return int(original or config.max_position_embeddings)
    return None


def rope_is_dynamic(config: PretrainedConfig) -> bool:
    """Whether the rotary table depends on the longest sequence so far."""
    return any(rope.get("rope_type") == "dynamic" for rope in rope_parameters(config))


def rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The parameters of the rotary embedding, and of each kind of layer or part of a head with separate parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def _refusal(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(
        f"model.path: weft cannot train {type(model).__name__} (model_type {model.config.model_type!r}): {reason}."
    )
