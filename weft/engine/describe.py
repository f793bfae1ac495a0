"""An engine's facts as plain data. weft prints its first lines, the tables and `--dry-run --json` from them.

Everything here is local to a rank: no collectives, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from weft.config.mesh import AXES
from weft.engine.engine import Engine
from weft.engine.optim.groups import describe_groups
from weft.engine.optim.optimizer import lossy_parts
from weft.models.quantised import is_bytes
from weft.ops.attention import EXACT, choose
from weft.parallel.mesh import Mesh
from weft.parallel.shards.cuts import AnyShardSpec, NestedShardSpec, full_shape
from weft.parallel.units import parameters_by_unit


class AxisRow(TypedDict):
    """A mesh axis. groups: lists of ranks along it, for each position on the other axes."""

    name: str
    size: int
    groups: Sequence[Sequence[int]]
    meaning: str


class DtypeRow(TypedDict):
    """The dtype of one kind of tensor."""

    use: str
    dtype: str
    note: str


class UnitRow(TypedDict):
    """An FSDP unit. parameters: number of elements over all ranks. bytes: of the gathered unit. sharding: the ranks
    that share it, if not all of the mesh."""

    name: str
    parameters: int
    bytes: int
    sharding: str


class ParameterRow(TypedDict):
    """A sharded parameter. axes: the mesh axes it is sharded over. itemsize: bytes per element."""

    name: str
    full_shape: Sequence[int]
    local_shape: Sequence[int]
    axes: Sequence[str]
    dtype: str
    itemsize: int


def describe(engine: Engine, *, parameters: bool = False) -> dict[str, Any]:
    """The facts of an engine, as JSON can hold them. parameters: also a row for each parameter.

    `model`: the trained model. `mesh`, `dtypes`, `units`, `optimizer`, `parameters`: rows as above, and groups of the
    optimizer. `memory`: bytes of a rank (parallel/memory.py:MemoryNeeds), and `room`, the bytes that it has.
    """
    built, memory = engine.built, engine.memory
    named = engine.module.named_parameters(remove_duplicate=False)
    groups = describe_groups(named, engine.config.optimizer, engine.divided.cuts)
    facts = {
        "model": {
            "path": built.path,
            "class": type(built.module.hf_model).__name__,
            "parameters": sum(elements_by_name(engine).values()),
            "layout": built.layout,
            "attention": attention_kernels(engine),
            "checked_on": built.support.copy,
            "logit_error": built.support.error,
            "takes_images": built.vision is not None and not built.support.images,
            "adapters": engine.lora is not None,
        },
        "mesh": {
            "ranks": engine.ranks.world,
            "device": engine.ranks.device.type,
            "axes": axis_rows(engine),
        },
        "dtypes": dtype_rows(engine),
        "units": unit_rows(engine),
        "optimizer": [asdict(group) for group in groups],
        "memory": asdict(memory) | {"resident": memory.resident, "room": engine.room},
    }
    return facts | {"parameters": parameter_rows(engine)} if parameters else facts


def elements_by_name(engine: Engine) -> dict[str, int]:
    """Name of each parameter -> its elements over all ranks."""
    cuts, module = engine.divided.cuts, engine.module
    stored = {
        name: math.prod(full_shape(name, p, cuts))
        for name, p in engine.whole_parameters().items()
        if not is_bytes(module.quantised_shapes, name)
    }
    return stored | {name: math.prod(shape) for name, shape in module.quantised_shapes.items()}


def attention_kernels(engine: Engine) -> dict[str, list[str]]:
    """Kernel -> the kinds of attention calls that it serves. Empty if the model does not use weft's attention."""
    built, config = engine.built, engine.config
    if not built.uses_bounds:
        return {}
    kinds: dict[str, list[str]] = {}
    for traits in built.support.attention:
        kernel = choose(config.model.attention, engine.ranks.device, engine.precision.compute, traits)
        kinds.setdefault(EXACT if config.exact else kernel, []).append(str(traits))
    return kinds


def axis_rows(engine: Engine) -> list[AxisRow]:
    """The axes of the mesh, and the ranks along each."""
    mesh = engine.mesh
    ranks = torch.arange(mesh.sizes.world).reshape(mesh.sizes.all)
    groups = {name: ranks.movedim(n, -1).reshape(-1, ranks.shape[n]).tolist() for n, name in enumerate(AXES)}
    groups["ep"] = ranks.reshape(-1, mesh.ep_size, mesh.tp_size).movedim(1, -1).reshape(-1, mesh.ep_size).tolist()
    meaning = {
        "pp": "the same documents; each stage has consecutive layers",
        "dp_replicate": "different documents; replicas of the shards, whose gradients are summed",
        "dp_shard": "different documents; parameters, gradients and optimizer state are sharded (FSDP2)",
        "cp": "parts of long documents; sharded as over dp_shard",
        "tp": "the same documents; heads, intermediate widths, vocabulary"
        f"{', tokens between blocks' * engine.divided.sequence} split",
        "ep": "ranks of dp_shard x cp; each has a part of the experts, and receives their tokens",
    }
    return [
        AxisRow(name=name, size=size, groups=groups[name], meaning=meaning[name]) for name, size in mesh.axes.items()
    ]


def dtype_rows(engine: Engine) -> list[DtypeRow]:
    """The dtypes of masters, compute, reduction, optimizer state and export."""
    precision = engine.precision
    buffers = sorted({_name(b.dtype) for b in engine.module.buffers() if b.is_floating_point()})
    export = sorted({_name(d) for d in engine.built.source_dtypes.values()} if engine.lora is None else ())
    state = ", ".join(dict.fromkeys(map(_name, engine.moments)))
    rows = [("masters", _name(precision.master), "master weights, which the optimizer updates")]
    if engine.lora is not None:
        rows.append(("base", _name(precision.frozen), "frozen, never cast to fp32"))
    rows.append(("compute", _name(precision.compute), "forward and backward; softmax and loss in float32"))
    if engine.config.fsdp.cast_forward_inputs:
        cast = ", ".join(engine.config.fsdp.cast_forward_inputs)
        rows.append(("inputs", _name(precision.compute), f"cast for {cast}"))
    rows.append(("reduction", _name(precision.reduce), "gradients summed over ranks"))
    lossy = lossy_parts(engine.config.optimizer, precision.master)
    rows.append(("optimizer", state or "-", "; ".join(lossy) or "state"))
    if engine.config.optimizer.ema_decay is not None:
        rows.append(("average", "float32", "of the weights"))
    rows.append(("buffers", ", ".join(buffers) or "-", "rotary tables, router biases: never cast"))
    exported = "each tensor as in the source's files" if engine.lora is None else "the adapter"
    rows.append(("export", ", ".join(export) or _name(precision.master), exported))
    return [DtypeRow(use=use, dtype=dtype, note=note) for use, dtype, note in rows]


def unit_rows(engine: Engine) -> list[UnitRow]:
    """The FSDP units, and the root with the remaining parameters."""
    size = engine.precision.compute.itemsize
    counts = [sum(p.numel() for p in parameters) for parameters in parameters_by_unit(engine.units)]
    named = {"full": "", "experts": "over the ranks of the same experts", "replicate": "replicated"}
    rows = []
    for unit, count in zip(engine.units, counts, strict=True):
        sharding = named[unit.shard] if isinstance(unit.shard, str) else f"groups of {unit.shard}"
        rows.append(UnitRow(name=unit.name, parameters=count, bytes=count * size, sharding=sharding))
    root = sum(parameter.numel() for parameter in engine.module.parameters()) - sum(counts)
    return [*rows, UnitRow(name="root", parameters=root, bytes=root * size, sharding="")]


def parameter_rows(engine: Engine) -> list[ParameterRow]:
    """For each parameter: its full and local shape, and the axes that shard or divide it."""
    sizes = {"dp_replicate": engine.mesh.dp_replicate, engine.mesh.shard_axis: engine.mesh.shards}
    cuts = engine.divided.cuts
    return [
        _parameter_row(name, parameter, sizes, cuts.get(name), engine.mesh)
        for name, parameter in engine.module.named_parameters()
    ]


def _parameter_row(
    name: str, parameter: nn.Parameter, sizes: Mapping[str, int], cut: AnyShardSpec | None, mesh: Mesh
) -> ParameterRow:
    local: torch.Tensor = parameter
    axes: tuple[str, ...] = ()
    if isinstance(parameter, DTensor):
        device_mesh = parameter.device_mesh
        placed = zip(list(sizes)[-device_mesh.ndim :], device_mesh.shape, parameter.placements, strict=True)
        axes = tuple(
            axis if size == sizes[axis] else f"{axis} in groups of {size}"
            for axis, size, placement in placed
            if isinstance(placement, Shard) and (size > 1 or sizes[axis] == 1)
        )
        local = parameter.to_local()
    shape = tuple(parameter.shape)
    if cut is not None:
        # along tp or ep, ranks compute with different parts of the tensor
        specs = (cut.outer, cut.inner) if isinstance(cut, NestedShardSpec) else (cut,)
        divided = ("ep" if mesh.ep is not None and s.ranks is mesh.ep.ranks else "tp" for s in specs if s.divides)
        shape, axes = cut.shape, (*axes, *divided)
    return ParameterRow(
        name=name, full_shape=shape, local_shape=tuple(local.shape), axes=axes, dtype=_name(parameter.dtype),
        itemsize=parameter.element_size(),
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
