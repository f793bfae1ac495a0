"""Builds a TrainModule from a config: checks the architecture on a small copy, builds the model on meta, and plans
where its weights are loaded from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from weft.config.schema import LoraConfig, ModelConfig
from weft.engine.optim.kinds import MatrixBoxes
from weft.engine.score_head import ScoreSpec, score_head_names
from weft.engine.selfcheck.architecture import ModelSupport, check_kernel, compute_exactly, examine, implementation
from weft.engine.selfcheck.device import check_on_device
from weft.engine.selfcheck.score import check_scores
from weft.errors import UserError
from weft.models import hf
from weft.models.cost import flop_facts, with_adapters
from weft.models.experts import group_experts
from weft.models.families.family import Layout
from weft.models.flops import FlopFacts
from weft.models.lora import LoraPlan, attach, untied_for
from weft.models.low_rank import LowRank
from weft.models.mixer_shards import can_share_documents
from weft.models.quantised import is_bytes
from weft.models.train_module import TrainModule
from weft.models.transforms import TRANSFORMS
from weft.models.vision import Vision, find_vision
from weft.parallel.shards.adapter_files import plan_lora
from weft.parallel.shards.dcp_source import open_weights
from weft.parallel.shards.layout import TensorMapping, map_tensors
from weft.parallel.shards.load import LoadPlan, plan_load
from weft.parallel.shards.source import open_model_weights


@dataclass(frozen=True)
class BuiltModel:
    """The module, and the facts about it that the engine and the export need.

    path: model.path. mappings: the position in the module of each tensor of a checkpoint. load: how to fill the module
    from files; None if there are none. lora: its adapters, which mappings do not include. balance: the factor of the
    experts' auxiliary loss, 0 for none. vision: None if the model accepts no images. whole_tensors: for a pipeline
    stage, the whole model's state dict, on meta; else None. adapter_config: for a pipeline stage, adapter_config.json
    of the whole model's adapters, if it has some. matrices: the boxes of the matrices that Muon orthogonalises; {} for
    other optimizers.
    """

    path: str
    module: TrainModule
    config: PretrainedConfig
    support: ModelSupport
    flops: FlopFacts
    source: Path | None
    source_dtypes: dict[str, torch.dtype]
    buffer_dtypes: dict[str, torch.dtype]
    mappings: list[TensorMapping]
    load: LoadPlan | None
    lora: LoraPlan | None = None
    balance: float = 0.0
    vision: Vision | None = None
    whole_tensors: Mapping[str, torch.Tensor] | None = None
    adapter_config: dict[str, Any] | None = None
    matrices: MatrixBoxes = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The whole model's state dict; on meta for a pipeline stage, and for weights of a quantised base."""
        if self.whole_tensors is not None:
            return self.whole_tensors
        shapes, state = self.module.quantised_shapes, self.module.state_dict(keep_vars=True)
        weights = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
        return {name: tensor for name, tensor in state.items() if not is_bytes(shapes, name)} | weights

    @property
    def layout(self) -> Layout:
        return self.support.layout

    @property
    def cuts_documents(self) -> bool:
        """Whether a document may be cut over ranks: documents are packed, and all mixers with state can be divided."""
        mixers = (boundary.mixer for boundary in self.module.mixers.values())
        return self.layout == "packed" and all(can_share_documents(mixer, 1, 1) for mixer in mixers)

    @property
    def uses_bounds(self) -> bool:
        return self.support.uses_bounds


def build_model(
    config: ModelConfig,
    lora: LoraConfig | None = None,
    *,
    dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    weights: bool = True,
    score: ScoreSpec | None = None,
    adapters: Literal["attached", "merged"] = "attached",
) -> BuiltModel:
    """Build the model on the meta device, its floating-point weights in `dtype`.

    compute, device: the dtype and device of forwards; model.attention's kernel must support both. weights: False builds
    shapes only, without opening a file of weights. score: build a score head; files may lack its weights. adapters:
    `attached` adds the adapters of `lora`, not yet filled; `merged` builds the model into which they can be merged.
    """
    examined = _examine(config, dtype=compute, device=device, weights=weights, score=score)
    model = hf.build_meta(examined.config, dtype=dtype, attention=examined.attention)
    planned = _plan(model, config, lora, examined.support, weights=weights, score=score, adapters=adapters)
    module, flops = _wrap(model, planned.lora, attached=adapters == "attached")
    buffers = {name: buffer.dtype for name, buffer in module.named_buffers()}
    folder = hf.source_folder(config.path)
    return BuiltModel(
        config.path, module, examined.config, examined.support, flops, folder, planned.dtypes, buffers,
        planned.mappings, planned.load, planned.lora, vision=find_vision(module.base, module.facts),
    )  # fmt: skip


@dataclass(frozen=True)
class _Examined:
    """config: of the class that is trained. attention: its attn_implementation."""

    config: PretrainedConfig
    support: ModelSupport
    attention: str


def _examine(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, weights: bool, score: ScoreSpec | None
) -> _Examined:
    """Read the model's config and check, on a small copy, that weft computes this architecture exactly."""
    hf.import_architectures(config.imports, config.path)
    hf_config = hf.read_config(config.path)
    noise = hf.noise_of(hf_config)
    hf_config = hf.without_noise(hf_config)
    if score is None and hf.classifies(hf_config):
        raise UserError(
            f"model.path: {config.path} is a {hf_config.architectures[0]}: its head returns scores instead of "
            "logits, so it cannot be trained on text here. Train it with `weft reward`, or use it as a reward with "
            "'rl.reward=[model:PATH]'."
        )
    support = examine(hf_config if score is None else hf.with_logits(hf_config), noise)
    if score is not None:
        hf_config = hf.with_scores(
            hf_config, score.labels, score.task, hf.padding_id(config.path) if score.end_marked else None
        )
        check_scores(hf_config, support)
    check_kernel(hf_config, config.attention, support, device, dtype)
    if device.type == "cuda" and weights:  # `examine` has already tried the CPU's kernel
        check_on_device(hf_config, config.attention, support, device, dtype)
        for name in config.transforms:
            TRANSFORMS[name].check(device, dtype)
    return _Examined(hf_config, support, implementation(hf_config, config.attention))


@dataclass(frozen=True)
class _Planned:
    """Where weights come from and where adapters go; fields as in BuiltModel. dtypes: of the source's tensors."""

    mappings: list[TensorMapping]
    load: LoadPlan | None
    dtypes: dict[str, torch.dtype]
    lora: LoraPlan | None


def _plan(
    model: PreTrainedModel,
    config: ModelConfig,
    lora: LoraConfig | None,
    support: ModelSupport,
    *,
    weights: bool,
    score: ScoreSpec | None,
    adapters: Literal["attached", "merged"],
) -> _Planned:
    """Plan adapters and weights of a model on meta. Unties parameters of the model that will differ."""
    plan = None if lora is None else plan_lora(model, lora, merged=adapters == "merged")
    untied = () if plan is None else untied_for(model, plan, merged=adapters == "merged")
    if weights and config.init == "pretrained":
        source = (
            open_model_weights(config.path) if config.dcp_weights is None else open_weights(config.dcp_weights, model)
        )
        ignore, head = config.ignore_weights, set[str]()
        if score is not None:
            ignore, head = (*ignore, f"{support.head}.*"), score_head_names(model)
        mappings, load = plan_load(model, source, ignore, untied, head)
        return _Planned(mappings, load, source.dtypes, plan)
    for tied in untied:
        hf.untie(model, tied)
    return _Planned(map_tensors(model, None), None, {}, plan)


def _wrap(model: PreTrainedModel, plan: LoraPlan | None, *, attached: bool) -> tuple[TrainModule, FlopFacts]:
    """(the trained module, with the adapters if `attached`; the facts from which its FLOPs are computed)."""
    module = TrainModule(model)
    group_experts(module)
    flops = flop_facts(module)
    if plan is not None and attached:
        attach(module, plan)
        flops = with_adapters(flops, plan, module)
    return module, flops


def make_exact(module: TrainModule, lora: LoraConfig) -> None:
    """Switch layers and readouts to the computation that rl.on_policy=exact requires. Raises UserError for experts that
    have adapters or are quantised: a grouped matmul of several experts depends on the other tokens of the batch."""
    experts = [child for child in module.modules() if hf.is_fused_experts(child)]
    if any(isinstance(child, LowRank) for layer in experts for child in layer.children()):
        raise UserError(
            "rl.on_policy=exact: adapters of fused experts are not exact. Remove experts from lora.targets, or set "
            "rl.on_policy=measured."
        )
    if experts and lora.on and lora.base != "compute":
        raise UserError(
            f"rl.on_policy=exact: experts in lora.base={lora.base} are not exact. Set lora.base=compute or "
            "rl.on_policy=measured."
        )
    compute_exactly(module.hf_model)
    module.head.exact = True


def balance_coefficient(config: ModelConfig, hf_config: PretrainedConfig, module: TrainModule) -> float:
    """The coefficient of the experts' auxiliary loss, 0 for none. Raises UserError if the family has no such loss."""
    if config.router_aux_loss == "none":
        return 0.0
    text = hf_config.get_text_config()
    if not hf.has_auxiliary_loss(module.hf_model):
        raise UserError(
            f"model.router_aux_loss={config.router_aux_loss}: {text.model_type} models have no auxiliary loss in "
            "transformers. Set model.router_aux_loss=none."
        )
    coefficient = config.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(text, "router_aux_loss_coef", None)
    if not coefficient:
        raise UserError("model.router_aux_loss_coef: the model's config has no value. Set it, for example to 0.001.")
    return float(coefficient)
