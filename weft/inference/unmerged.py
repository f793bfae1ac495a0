"""Copies of a model with separate base and adapters, as in the trainer (lora.sampling=separate). The base is stored in
the format of lora.base, and each layer dequantises it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.checkpoint.export import HasModel, manifest_of
from weft.models import hf
from weft.models.experts import use_experts_forward
from weft.models.lora import LoraPlan, attach
from weft.models.low_rank import AdapterSwitch, LowRank
from weft.models.quantised import QuantisedWeight, WeightPiece, parts_of, parts_on_meta, replace_weight
from weft.ops.low_bit import Format
from weft.parallel.shards.layout import TensorMapping


def stored_layout(engine: HasModel, dtype: torch.dtype) -> tuple[list[TensorMapping], dict[str, Tensor]]:
    """(mappings, manifest) of the base as the trainer stores it. A quantised weight has its parts
    (models/quantised.py), which no checkpoint names; other weights are as in manifest_of(). dtype: of parameters that
    are not quantised."""
    module, manifest = engine.built.module, manifest_of(engine, dtype)
    mappings = [mapping for mapping in engine.built.mappings if mapping.runtime not in module.quantised_shapes]
    manifest = {mapping.disk: manifest[mapping.disk] for mapping in mappings}
    for name, shape in module.quantised_shapes.items():
        assert module.quantised_form is not None
        for end, part in parts_on_meta(module.quantised_form, shape).items():
            mappings.append(TensorMapping.identity(name + end, name + end, tuple(part.shape)))
            manifest[name + end] = part
    return mappings, manifest


def separate(
    model: PreTrainedModel, plan: LoraPlan, shapes: Mapping[str, tuple[int, ...]], form: Format | None
) -> dict[str, QuantisedWeight]:
    """Attach adapters to a plain model on meta, and replace the weights with these names and shapes by stored bytes.
    Returns the replacements."""
    attach(model, replace(plan, dropout=0.0, switch=AdapterSwitch()))
    weights = {}
    for name, shape in shapes.items():
        assert form is not None
        layer, _, leaf = name.rpartition(".")
        owner, start = model.get_submodule(layer), (0,) * len(shape)
        if hf.is_fused_experts(owner):
            use_experts_forward(owner)
        weights[name] = replace_weight(owner, leaf, form, shape, [WeightPiece(start, shape, start)])
    return weights


def destinations(model: PreTrainedModel, weights: Mapping[str, QuantisedWeight]) -> dict[str, Tensor]:
    """Name -> tensor of the state dict and of the parts of quantised weights. Allocates parts without memory. The model
    must have storage."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    for name, weight in weights.items():
        if weight.shared is None:
            shapes = weight.form.shared(weight.whole_shape)
            weight.shared = tuple(torch.empty(shape, device=weight.codes.device) for shape in shapes)
        tensors |= {name + end: part.detach() for end, part in parts_of(weight).items()}
    return tensors


def keep_norms(model: PreTrainedModel) -> None:
    """Compute the norms of DoRA once for all forwards until the adapters change."""
    for layer in model.modules():
        adapter = getattr(layer, "lora", None)
        if isinstance(adapter, LowRank) and adapter.magnitude is not None:
            adapter.kept_norm = None
            adapter.kept_norm = adapter.norm(layer.weight.T if hf.is_transposed(layer) else layer.weight)
