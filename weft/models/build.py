"""From a config to a TrainModule: checked on a small copy first, then built, with a plan of how to fill it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from weft.config.schema import ModelConfig
from weft.engine.row import Layout
from weft.errors import UserError
from weft.models import hf
from weft.models.cost import flop_facts
from weft.models.layout import Piece, layout_of
from weft.models.load import LoadPlan, plan_load
from weft.models.source import open_source
from weft.models.startup import Findings, check_kernel, examine, implementation
from weft.models.train_module import TrainModule
from weft.observe.flops import FlopFacts


@dataclass(frozen=True)
class BuiltModel:
    """The module with what the engine and the export need to know of it.

    path: model.path. pieces: where each tensor of a checkpoint lies in the module. load: how to fill a module that is
    on meta; None where it has its weights already, or will never have any.
    """

    path: str
    module: TrainModule
    config: PretrainedConfig
    findings: Findings
    flops: FlopFacts
    source: Path | None
    source_dtypes: dict[str, torch.dtype]
    buffer_dtypes: dict[str, torch.dtype]
    pieces: list[Piece]
    load: LoadPlan | None

    @property
    def layout(self) -> Layout:
        return self.findings.layout

    @property
    def uses_bounds(self) -> bool:
        return self.findings.uses_bounds


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    seed: int,
    weights: bool = True,
) -> BuiltModel:
    """Build the model, its floating-point weights in `dtype`: on meta, or whole on the CPU where they are drawn.

    compute, device: in what and where it will run, which decides whether model.attention's kernel can serve it.
    weights: False for shapes only; then no file of weights is looked at.
    """
    hf_config = hf.without_noise(hf.read_config(config.path))
    findings = examine(hf_config)
    check_kernel(hf_config, config.attention, findings, device, compute)
    name = implementation(hf_config, config.attention)
    dtypes: dict[str, torch.dtype] = {}
    load = None
    if weights and config.init == "random":
        model = hf.build_random(hf_config, dtype=dtype, attention=name, seed=seed)
        pieces = layout_of(model, None)
    elif weights:
        model = hf.build_meta(hf_config, dtype=dtype, attention=name)
        source = open_source(config.path)
        pieces, load = plan_load(model, source, config.ignore_weights)
        dtypes = source.dtypes
    else:
        model = hf.build_meta(hf_config, dtype=dtype, attention=name)
        pieces = layout_of(model, None)
    module = TrainModule(model)
    buffers = {name: buffer.dtype for name, buffer in module.named_buffers()}
    folder = hf.source_folder(config.path)
    return BuiltModel(
        config.path, module, hf_config, findings, flop_facts(module), folder, dtypes, buffers, pieces, load
    )


def balance_coefficient(config: ModelConfig, hf_config: PretrainedConfig, module: TrainModule) -> float:
    """Factor of the experts' auxiliary loss, 0 for none. UserError where the family has no such loss."""
    if config.router_aux_loss == "none":
        return 0.0
    text = hf_config.get_text_config()
    if not hf.has_auxiliary_loss(module.hf_model):
        raise UserError(
            f"model.router_aux_loss={config.router_aux_loss}: {text.model_type} has no auxiliary loss in transformers. "
            "Set model.router_aux_loss=none."
        )
    coefficient = config.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(text, "router_aux_loss_coef", None)
    if not coefficient:
        raise UserError("model.router_aux_loss_coef: the model's config names none: set it, for example to 0.001.")
    return float(coefficient)
