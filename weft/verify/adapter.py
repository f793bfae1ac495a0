"""Adapters in the parity harness: gives them random values, saves them for peft, and renames tensors to the names in
adapter files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from weft.checkpoint.export import save_adapter
from weft.config.schema import OptimizerConfig
from weft.engine.engine import Engine
from weft.launch.scratch import scratch_folder
from weft.models.lora import is_adapters
from weft.models.patterns import matches
from weft.parallel.shards.adapter_files import PREFIX, file_names
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.cuts import full_shape, shards_of
from weft.verify.observed import Observed, Tensors
from weft.verify.reference_muon import Part


@torch.no_grad()
def randomize_adapters(engine: Engine) -> None:
    """Give new adapters random values. With B = 0, A has no gradient, and errors in A would be invisible."""
    if engine.lora is None or engine.lora.path is not None:
        return
    cuts = engine.divided.cuts
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        if is_adapters(name) and not name.endswith(".magnitude"):  # magnitudes stay, so they are not the norm any more
            shape = full_shape(name, parameter, cuts)
            values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            values *= 0.1 if name.endswith(".B") else shape[1] ** -0.5  # ten times larger values make a model chaotic
            for shard in shards_of(parameter, cuts.get(name)):
                shard.values.copy_(values[shard.box.within(Box.from_shape(shape))])


@contextmanager
def saved_adapter(engine: Engine) -> Iterator[str | None]:
    """Inside, a folder with the engine's current adapter; None if it has no adapter. Collective."""
    if engine.lora is None:
        yield None
        return
    with scratch_folder("adapter-") as scratch:
        shared = [str(scratch)]
        dist.broadcast_object_list(shared, src=0, group=engine.ranks.group)
        folder = f"{shared[0]}/adapter"
        save_adapter(engine, folder)
        yield folder
        dist.barrier(engine.ranks.group)


def _names(engine: Engine) -> dict[str, str]:
    """Name of a trained tensor -> its name in the reference: the name in the adapter's file, without prefix."""
    if engine.lora is None:
        return {}
    trained = (tensor for tensor in engine.whole_parameters() if engine.lora.trains(tensor))
    return {name: stored.removeprefix(PREFIX) for name, stored in file_names(trained).items()}


def engine_names(engine: Engine) -> dict[str, str]:
    """Name in the reference -> the engine's name, if they differ."""
    return {stored: name for name, stored in _names(engine).items()}


def matrix_parts(engine: Engine) -> dict[str, list[Part]]:
    """Name in the reference -> start and size of each matrix that Muon orthogonalises."""
    names = _names(engine)
    return {names.get(name, name): [(b.start, b.size) for b in boxes] for name, boxes in engine.built.matrices.items()}


def as_in_files(engine: Engine, tensors: Tensors) -> Tensors:
    """The tensors with the reference's names."""
    names = _names(engine)
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def optimizer_by_files(engine: Engine) -> OptimizerConfig:
    """The engine's optimizer config, with the reference's names in optimizer.groups."""
    config = engine.config.optimizer
    if engine.lora is None:
        return config
    groups = [
        replace(
            group, match=tuple(file_name for name, file_name in _names(engine).items() if _is_named(group.match, name))
        )
        for group in config.groups
    ]
    return replace(config, groups=tuple(groups))


def _is_named(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def renamed(engine: Engine, observed: Observed) -> Observed:
    """The observations with the reference's names."""
    return replace(
        observed,
        gradients=[as_in_files(engine, gradients) for gradients in observed.gradients],
        micro_gradients=as_in_files(engine, observed.micro_gradients),
        image_step=None
        if observed.image_step is None
        else (observed.image_step[0], as_in_files(engine, observed.image_step[1])),
        weights=as_in_files(engine, observed.weights),
    )
