"""Counts the collectives of a step, with their ranks and bytes, on a real or a simulated rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.engine import Engine
from weft.ops.communicator import Communicator, GroupCommunicator
from weft.parallel.mesh import Mesh

# torch's operation -> (its name, index of the argument whose bytes are counted).
_OPERATIONS = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
}


@dataclass(frozen=True, order=True)
class Kind:
    """A kind of collective. part: the mesh axes or group whose ranks take part. ranks: their number."""

    part: str
    ranks: int
    operation: str


@dataclass
class Total:
    """Number and bytes of the collectives of one kind. bytes: the input of all ranks for all-gather; the received
    message for receive; the input of this rank for the others."""

    count: int = 0
    bytes: int = 0


@dataclass
class Collectives:
    """The collectives that a rank has called. parts: name of a process group -> group of the mesh."""

    parts: Mapping[str, str]
    totals: dict[Kind, Total] = field(default_factory=dict)

    def add(self, operation: str, args: Iterable[Any]) -> None:
        """Add a call of the torch operation with this name. args: its arguments."""
        called, position = _OPERATIONS[operation]
        arguments = list(args)
        group = next(group for group in map(_group, arguments) if group is not None)
        kind = Kind(self.parts.get(group.group_name, "other"), group.size(), called)
        total = self.totals.setdefault(kind, Total())
        total.count += 1
        total.bytes += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(arguments[position]))


def parts_of(engine: Engine) -> dict[str, str]:
    """Name of a process group -> its group of the mesh; the most specific one, if several have the same ranks."""
    parts: dict[str, str] = {}
    for name, group in (*_of_communicators(engine), *_of_mesh(engine.mesh)):
        parts.setdefault(group.group_name, name)
    return parts


def _of_communicators(engine: Engine) -> Iterator[tuple[str, dist.ProcessGroup]]:
    named: list[tuple[str, Communicator | None]] = []
    if engine.mesh.ep is not None:
        named += [("ep", engine.mesh.ep.ranks), ("ep x tp", engine.mesh.ep.with_tp)]
    if engine.context is not None:
        named += [("cp", ranks) for ranks in (engine.context.ranks, engine.context.ring, engine.context.ulysses)]
    named += [("tp", ranks) for numbers in engine.divided.partial.values() for ranks in numbers.values()]
    yield from ((name, ranks.group) for name, ranks in named if isinstance(ranks, GroupCommunicator))


def _of_mesh(mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """(name, group) of each axis of a mesh. The most specific names come first."""
    if mesh.tp is not None:
        yield "tp", mesh.tp_group
    if mesh.pp is not None:
        yield "pp", mesh.pp.group
        yield from (("pp", group) for group in mesh.pp.channels.values())
    if mesh.dp_replicate > 1:
        yield "dp_replicate", mesh.dp.get_group("dp_replicate")
    yield "fsdp", mesh.dp.get_group(mesh.shard_axis)
    if mesh.experts is not None:
        for name in mesh.experts.mesh_dim_names or ():
            yield name.replace("_", " "), mesh.experts.get_group(name)
    yield "loss", mesh.loss_group
    yield "world", mesh.world_group


def _group(argument: Any) -> dist.ProcessGroup | None:
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # a reduction, such as a sum
        return None
    return group


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for element in argument:
            yield from _tensors(element)
