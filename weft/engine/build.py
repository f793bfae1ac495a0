"""From a config to a TrainModule: checked on a small copy first, then built, with a plan of how to fill it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from weft.config.schema import LoraConfig, ModelConfig
from weft.engine.device_check import check_on_device
from weft.engine.row import Layout
from weft.engine.startup import Findings, check_kernel, compute_exactly, examine, implementation
from weft.engine.value_head import value_head_names
from weft.errors import UserError
from weft.models import hf
from weft.models.cost import flop_facts, with_adapters
from weft.models.flops import FlopFacts
from weft.models.lora import LoraPlan, attach, untied_for
from weft.models.train_module import TrainModule
from weft.sharding.adapter_files import plan_lora
from weft.sharding.layout import Piece, layout_of
from weft.sharding.load import LoadPlan, plan_load
from weft.sharding.source import open_source


@dataclass(frozen=True)
class BuiltModel:
    """The module with what the engine and the export need to know of it.

    path: model.path. pieces: where each tensor of a checkpoint lies in the module. load: how to fill it
    from files; None where there are none. lora: its adapters, which are no pieces.
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
    lora: LoraPlan | None = None

    @property
    def layout(self) -> Layout:
        return self.findings.layout

    @property
    def uses_bounds(self) -> bool:
        return self.findings.uses_bounds


def build_model(
    config: ModelConfig,
    lora: LoraConfig | None = None,
    *,
    dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    weights: bool = True,
    values: bool = False,
    adapters: Literal["attached", "merged"] = "attached",
) -> BuiltModel:
    """Build the model on the meta device, its floating-point weights in `dtype`.

    compute, device: in what and where it will run, which decides whether model.attention's kernel can serve it.
    weights: False for shapes only; then no file of weights is looked at.
    values: with a head that gives one number per token, which is not filled where the files have none.
    adapters: what lora asks for is attached, not yet filled; or the model is one that they could be merged into.
    """
    hf_config = hf.without_noise(hf.read_config(config.path))
    findings = examine(hf.with_logits(hf_config) if values else hf_config)
    if values:
        hf_config = hf.with_values(hf_config)
    check_kernel(hf_config, config.attention, findings, device, compute)
    if device.type == "cuda" and weights:  # on the CPU `examine` has tried the kernel that runs there
        check_on_device(hf_config, config.attention, findings, device, compute)
    name = implementation(hf_config, config.attention)
    dtypes: dict[str, torch.dtype] = {}
    load = None
    model = hf.build_meta(hf_config, dtype=dtype, attention=name)
    plan = None if lora is None else plan_lora(model, lora)
    apart = () if plan is None else untied_for(model, plan, merged=adapters == "merged")
    if weights and config.init == "pretrained":
        source = open_source(config.path)
        ignore, head = config.ignore_weights, set[str]()
        if values:
            ignore, head = (*ignore, f"{findings.head}.*"), value_head_names(model)
        pieces, load = plan_load(model, source, ignore, apart, head)
        dtypes = source.dtypes
    else:
        for tied in apart:
            hf.untie(model, tied)
        pieces = layout_of(model, None)
    module = TrainModule(model, values)
    flops = flop_facts(module)
    if plan is not None and adapters == "attached":
        attach(module, plan)
        flops = with_adapters(flops, plan, module)
    buffers = {name: buffer.dtype for name, buffer in module.named_buffers()}
    folder = hf.source_folder(config.path)
    return BuiltModel(config.path, module, hf_config, findings, flops, folder, dtypes, buffers, pieces, load, plan)


def make_exact(module: TrainModule) -> None:
    """Let layers and readouts be those of rl.on_policy=exact."""
    compute_exactly(module.hf_model)
    module.head.exact = True


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
