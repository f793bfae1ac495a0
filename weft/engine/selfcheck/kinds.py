"""The kinds of layers of a model, read from the built modules instead of from config fields.

Two layers are of one kind if they run the same code: equal classes of modules, the same parameters and buffers, and
equal attributes (a window or none, a flag, the name of a type). Numbers count as equal if both are zero or both are
nonzero.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from weft.models import hf
from weft.models.facts import find_facts

Kind = frozenset[tuple[str, object]]  # (path of a module, attribute or tensor in the layer, class or value)
_PLAIN = (bool, int, float, str)
_NUMBERS = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class LayerKinds:
    """layers: the kind of each decoder layer, in order. other_classes: of all other modules. numbering: attributes that
    hold the layer's index, which are ignored."""

    layers: tuple[Kind, ...]
    other_classes: frozenset[str]
    numbering: frozenset[str]

    def are_those_of(self, copy: PreTrainedModel) -> bool:
        """Whether a copy with other layers and sizes has exactly these kinds."""
        kinds_of_copy = _kinds(copy, self.numbering)
        return set(self.layers) == set(kinds_of_copy.layers) and self.other_classes == kinds_of_copy.other_classes


def kinds_of(config: PretrainedConfig) -> LayerKinds:
    """The kinds of the model that this config describes. Raises UserError if its decoder layers cannot be found."""
    return _kinds(meta_model(config), None)


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device; takes 0.1 s for 80 layers."""
    return hf.build_meta(copy.deepcopy(config), dtype=torch.float32, attention="eager")


def _kinds(model: PreTrainedModel, numbering: frozenset[str] | None) -> LayerKinds:
    path = find_facts(model).layers
    facts_by_layer = [_facts(layer) for layer in model.get_submodule(path).children()]
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for statements, kind in zip(facts_by_layer, types, strict=False):
        statements["layer_types"] = kind
    numbering = _numbering(facts_by_layer) if numbering is None else numbering
    layers = tuple(
        frozenset((name, _meaning(value, name in numbering)) for name, value in statements.items())
        for statements in facts_by_layer
    )
    outside = (type(module).__name__ for name, module in model.named_modules() if not f"{name}.".startswith(f"{path}."))
    return LayerKinds(layers, frozenset(outside), numbering)


def _facts(layer: nn.Module) -> dict[str, Any]:
    """Name -> value of everything that distinguishes layers. Members of a list, such as experts, are merged."""
    facts: dict[str, Any] = {}
    for path, module in layer.named_modules():
        pattern = _NUMBERS.sub(".*", f".{path}")
        facts[pattern] = type(module).__name__
        tensors = (*module._parameters.items(), *module._buffers.items())
        facts.update((f"{pattern}:{name}", tensor is not None) for name, tensor in tensors)
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training" and (value is None or isinstance(value, _PLAIN)):
                facts[f"{pattern}:{name}"] = value
    return facts


def _numbering(layers: list[dict[str, Any]]) -> frozenset[str]:
    """Attributes that equal the layer's index in every layer that has them."""
    names = set[str]().union(*layers)
    for number, facts in enumerate(layers):
        names -= {name for name, value in facts.items() if isinstance(value, bool) or value != number}
    return frozenset(names)


def _meaning(value: Any, numbers: bool) -> object:
    if isinstance(value, int | float):
        return numbers or value != 0
    return value
