"""An adapter as a folder that peft loads, from a sharded model: the same boxes into shared files as any export."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.checkpoint.boxes import Box, Shard, shard_of
from weft.checkpoint.export import ExportPlan, save_planned
from weft.engine.engine import Engine
from weft.models.adapter_files import CONFIG, WEIGHTS, names_of, to_json
from weft.models.layout import Piece


def plan_adapter(engine: Engine, dtype: torch.dtype | None = None) -> ExportPlan:
    """Names, shapes and dtypes of a saved adapter; dtype: None for the masters'."""
    lora, built = engine.lora, engine.built
    assert lora is not None
    parameters = dict(built.module.named_parameters())
    pieces, manifest = [], {}
    for name, stored in names_of(lora, built.module).items():
        shape = tuple(parameters[name].shape)
        pieces.append(Piece(stored, name, Box.whole(shape), tuple(range(len(shape)))))
        manifest[stored] = torch.empty(shape, dtype=dtype or parameters[name].dtype, device="meta")
    config = to_json(lora, built.path, built.module)
    return ExportPlan(pieces, manifest, {WEIGHTS: list(manifest)}, None, config, built.source, CONFIG)


def shards_of(engine: Engine) -> dict[str, Shard]:
    """What this rank holds of everything that is trained, by the model's names."""
    lora = engine.lora
    assert lora is not None
    return {name: shard_of(parameter) for name, parameter in engine.module.named_parameters() if lora.trains(name)}


def save_adapter(engine: Engine, target: str | Path) -> None:
    """Write the adapter's folder; collective. It appears whole or not at all."""
    save_planned(engine, plan_adapter(engine), shards_of(engine), Path(target))
