"""Which collectives a step makes: every one with its ranks and bytes, on a real rank as on a simulated one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.engine.engine import Engine
from weft.ops.communicator import GroupCommunicator
from weft.parallel.mesh import Mesh
from weft.telemetry import flight

# torch's operation -> (what it is called, whose bytes are counted: the place among its arguments).
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
    """part: of the mesh, whose ranks take part. ranks: how many. phase: of the step (telemetry/flight.py)."""

    part: str
    ranks: int
    operation: str
    phase: str


@dataclass
class Total:
    """Of collectives of one kind. bytes: of the whole tensor for all-reduce, broadcast, send and receive; of what all
    ranks together give for all-gather; of what this rank gives for reduce-scatter and all-to-all."""

    count: int = 0
    bytes: int = 0


@dataclass
class Collectives:
    """What was recorded. parts: name of a process group -> part of the mesh."""

    parts: Mapping[str, str]
    totals: dict[Kind, Total] = field(default_factory=dict)

    def add(self, operation: str, args: Iterable[Any]) -> None:
        """Add one call of torch's operation of this name."""
        called, place = _OPERATIONS[operation]
        several = list(args)
        group = next(found for found in map(_group, several) if found is not None)
        part = self.parts.get(group.group_name, "other")
        kind = Kind(part, group.size(), called, flight.own.phase)
        total = self.totals.setdefault(kind, Total())
        total.count += 1
        total.bytes += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(several[place]))

    def by_part(self) -> dict[tuple[str, str], Total]:
        """(part, operation) -> its collectives, of all phases."""
        found: dict[tuple[str, str], Total] = {}
        for kind, total in self.totals.items():
            both = found.setdefault((kind.part, kind.operation), Total())
            both.count += total.count
            both.bytes += total.bytes
        return found


class Recording(TorchDispatchMode):
    """Records the collectives of this thread inside."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.collectives = Collectives(parts_of(engine))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # of what it does, its own parts are seen
        if func.namespace == "c10d":
            self.collectives.add(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))


def parts_of(engine: Engine) -> dict[str, str]:
    """Name of a process group -> the part of the mesh that it is; of several parts of the same ranks, the first."""
    found: dict[str, str] = {}
    for name, group in _parts(engine.mesh):
        found.setdefault(group.group_name, name)
    context = engine.context
    for name, ranks in [] if context is None else [("cp", context.ranks), ("cp", context.ring), ("cp", context.ulysses)]:
        if isinstance(ranks, GroupCommunicator):
            found.setdefault(ranks.group.group_name, name)
    for numbers in engine.divided.partial.values():
        for ranks in numbers.values():
            if isinstance(ranks, GroupCommunicator):
                found.setdefault(ranks.group.group_name, "tp")
    return found


def _parts(mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Those that say most come first."""
    if mesh.tp is not None:
        yield "tp", mesh.tp_group
    if mesh.pp is not None:
        yield "pp", mesh.pp.onward
        yield "pp", mesh.pp.back
    if mesh.ep is not None:
        for name, ranks in (("ep", mesh.ep.ranks), ("ep x tp", mesh.ep.with_tp)):
            if isinstance(ranks, GroupCommunicator):
                yield name, ranks.group
    if mesh.dp_replicate > 1:
        yield "dp_replicate", mesh.dp.get_group("dp_replicate")
    yield "fsdp", mesh.dp.get_group(mesh.shard_axis)
    if mesh.experts is not None:
        names = mesh.experts.mesh_dim_names or ()
        for name in names:
            yield name, mesh.experts.get_group(name)
    yield "loss", mesh.loss_group
    yield "world", mesh.world_group


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, torch.ScriptObject):
        try:
            found: dist.ProcessGroup = dist.ProcessGroup.unbox(argument)
        except RuntimeError:  # a reduction, such as a sum
            return None
        return found
    return None


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for one in argument:
            yield from _tensors(one)
