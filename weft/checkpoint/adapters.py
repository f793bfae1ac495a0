"""Saving adapters as a folder that peft loads, from a sharded model, with the same writers as any export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.export import ExportPlan, save_planned
from weft.engine.engine import Engine
from weft.parallel.shards.adapter_files import CONFIG, WEIGHTS, file_names, to_json
from weft.parallel.shards.boxes import Shard
from weft.parallel.shards.cuts import full_shape, shards_of
from weft.parallel.shards.layout import TensorMapping


def plan_adapter(engine: Engine, dtype: torch.dtype | None = None) -> ExportPlan:
    """Names, shapes and dtypes of a saved adapter. dtype: None for the masters'."""
    lora, built = engine.lora, engine.built
    assert lora is not None
    cuts = engine.divided.cuts
    trained = {
        name: torch.empty(full_shape(name, p, cuts), dtype=dtype or p.dtype, device="meta")
        for name, p in engine.whole_parameters().items()
        if lora.trains(name)
    }
    config = built.adapter_config or to_json(lora, built.path, built.module)
    return plan_files(trained, config, built.source)


def plan_files(tensors: Mapping[str, Tensor], config: dict[str, Any], source: Path | None) -> ExportPlan:
    """The files of a saved adapter. tensors: on meta, by the model's names, in file order."""
    mappings, manifest = [], {}
    for name, stored in file_names(tensors).items():
        mappings.append(TensorMapping.whole(stored, name, tuple(tensors[name].shape)))
        manifest[stored] = tensors[name]
    return ExportPlan(mappings, manifest, {WEIGHTS: list(manifest)}, None, config, source, CONFIG)


def adapter_shards(engine: Engine) -> dict[str, list[Shard]]:
    """This rank's shards of all trained parameters, by the model's names."""
    lora = engine.lora
    assert lora is not None
    cuts = engine.divided.cuts
    trained = [(name, p) for name, p in engine.module.named_parameters() if lora.trains(name)]
    return {name: shards_of(parameter, cuts.get(name)) for name, parameter in trained}


def save_adapter(engine: Engine, target: str | Path) -> None:
    """Write the adapter's folder, atomically; collective."""
    save_planned(engine, plan_adapter(engine), adapter_shards(engine), Path(target))
