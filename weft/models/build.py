"""From a config to a TrainModule: checked on a small copy first, then built or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from weft.config.schema import ModelConfig
from weft.engine.row import Layout
from weft.models import hf
from weft.models.cost import flop_facts
from weft.models.startup import Findings, check_kernel, examine, implementation
from weft.models.train_module import TrainModule
from weft.observe.flops import FlopFacts


@dataclass(frozen=True)
class BuiltModel:
    """The module with what the engine and the export need to know of it."""

    module: TrainModule
    config: PretrainedConfig
    findings: Findings
    flops: FlopFacts
    source: Path | None
    source_dtypes: dict[str, str]
    buffer_dtypes: dict[str, torch.dtype]

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
    """Build the model whole on the CPU, its floating-point weights in `dtype`; without `weights`, on meta.

    compute, device: in what and where it will run, which decides whether model.attention's kernel can serve it.
    """
    hf_config = hf.without_noise(hf.read_config(config.path))
    findings = examine(hf_config)
    check_kernel(hf_config, config.attention, findings, device, compute)
    name = implementation(hf_config, config.attention)
    if not weights:
        model = hf.build_meta(hf_config, dtype=dtype, attention=name)
    elif config.init == "random":
        model = hf.build_random(hf_config, dtype=dtype, attention=name, seed=seed)
    else:
        model = hf.load_pretrained(config.path, hf_config, dtype=dtype, attention=name)
    module = TrainModule(model)
    source = hf.source_folder(config.path)
    buffers = {name: buffer.dtype for name, buffer in module.named_buffers()}
    dtypes = {} if config.init == "random" else hf.source_dtypes(source)
    return BuiltModel(module, hf_config, findings, flop_facts(module), source, dtypes, buffers)
