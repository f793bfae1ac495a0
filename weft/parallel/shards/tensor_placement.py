"""The placement of a sharded tensor over ranks, and what each rank sends when it is gathered.

Tensor and expert parallelism divide a tensor first; FSDP2 then shards each part over an axis of a mesh. Either may
leave it whole. Each rank of a pipeline stage first sends its shares to the ranks at its place in the other stages,
which then gather as if they had held the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from weft.ops.communicator import Communicator
from weft.parallel.shards.boxes import Box, local_box, overlap
from weft.parallel.shards.cuts import AnyShardSpec, ShardSpecs, full_shape

RankIndex = tuple[int, int]  # of a rank: (among the ranks of tp and ep that divide the tensor, on FSDP's axis)


class GatherGroup(NamedTuple):
    """The ranks that a tensor is gathered from. axis: (mesh, dimension) over which FSDP shards it. parts: ranks that
    compute with other parts of it (tp, ep). source: (ranks at this one's place in each stage, the stage that sends);
    None if every stage holds it. axis and parts are None if no other ranks have elements of it."""

    axis: tuple[DeviceMesh, int] | None = None
    parts: Communicator | None = None
    source: tuple[dist.ProcessGroup, int] | None = None


@dataclass(frozen=True)
class StagePeers:
    """The ranks at this one's place in each pipeline stage. place: of this rank on mesh.pp. holders: for each tensor of
    the model, the places on mesh.pp that hold it, ascending. meshes: meshes that FSDP shards over; equal in all stages.
    """

    group: dist.ProcessGroup
    place: int
    holders: Mapping[str, Sequence[int]]
    meshes: Sequence[DeviceMesh]


class ShardSlice(NamedTuple):
    """A box of the whole tensor. within: its slices in the shard of the rank that holds it."""

    box: Box
    within: tuple[slice, ...]


@dataclass(frozen=True)
class TensorPlacement:
    """The placement of one tensor. shape: of the whole tensor. cut: its division by tp and ep, or None. mesh,
    placements: FSDP's; None and () for a plain tensor. tensor: None if another stage holds it."""

    shape: tuple[int, ...]
    cut: AnyShardSpec | None
    group: GatherGroup
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    device: torch.device
    tensor: Tensor | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor, cuts: ShardSpecs) -> TensorPlacement:
        """The placement of a tensor of this rank. Raises RuntimeError if weft cannot gather such a placement."""
        mesh, placements = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())
        shape = full_shape(name, tensor, cuts)
        return cls._placed(name, shape, cuts, mesh, tuple(placements), tensor.device, tensor)

    @classmethod
    def _placed(
        cls,
        name: str,
        shape: tuple[int, ...],
        cuts: ShardSpecs,
        mesh: DeviceMesh | None,
        placements: tuple[Placement, ...],
        device: torch.device,
        tensor: Tensor | None = None,
    ) -> TensorPlacement:
        cut = cuts.get(name)
        cut = cut if cut is not None and cut.divides else None
        group = GatherGroup(_sharded_axis(name, mesh, placements), None if cut is None else cut.ranks)
        return cls(shape, cut, group, mesh, placements, device, tensor)

    @property
    def values(self) -> Tensor:
        """The elements on this rank; its stage must hold the tensor."""
        assert self.tensor is not None
        return local_box(self.tensor)[1]

    @property
    def places(self) -> list[RankIndex]:
        """The places of all ranks of the group, in gathering order."""
        along = 1 if self.group.axis is None else self.group.axis[0].size(self.group.axis[1])
        over = 1 if self.cut is None else self.cut.size
        return [(part, fsdp) for part in range(over) for fsdp in range(along)]

    @property
    def own_place(self) -> RankIndex:
        """The place of this rank."""
        along = 0 if self.group.axis is None else self.group.axis[0].get_local_rank(self.group.axis[1])
        return (0 if self.cut is None else self.cut.place), along

    @property
    def is_by_rows(self) -> bool:
        """Whether FSDP shards by rows, so that the ranks' shards, end to end, are their part of the tensor."""
        if self.group.axis is None:
            return False
        placement = self.placements[self.group.axis[1]]
        return isinstance(placement, Shard) and placement.dim == 0

    def shares(self, part: Box, place: RankIndex) -> list[ShardSlice]:
        """The shares of `part`, a box of the whole tensor, that the rank at `place` sends. If several ranks hold the
        same elements, the first sends them."""
        held = self._held(place)
        boxes = [(held, held, 1)] if self.cut is None else self.cut.at(place[0]).boxes(held)
        found = []
        for whole, local, copies in boxes:
            box = overlap(part, whole) if place[0] % copies == 0 else None
            if box is not None:
                moved = zip(box.start, whole.start, local.start, strict=True)
                start = tuple(of_box - of_whole + of_local for of_box, of_whole, of_local in moved)
                found.append(ShardSlice(box, Box(start, box.size).within(held)))
        return found

    def _held(self, place: RankIndex) -> Box:
        """The box that the rank at `place` holds, within the part that it computes with."""
        shape = self.shape if self.cut is None else self.cut.local_shape(place[0])  # parts may differ in size
        if self.group.axis is None:
            return Box.whole(shape)
        mesh, axis = self.group.axis
        coordinate = list(mesh.get_coordinate() or ())
        coordinate[axis] = place[1]
        size, start = _compute_local_shape_and_global_offset(shape, mesh.shape, coordinate, self.placements)
        return Box(tuple(start), tuple(size))


def placements_of(
    tensors: Mapping[str, Tensor], names: Iterable[str], cuts: ShardSpecs, lane: StagePeers | None = None
) -> dict[str, TensorPlacement]:
    """The TensorPlacement of each named tensor. lane: for names of all pipeline stages; then collective over it."""
    wanted = list(dict.fromkeys(names))
    found = {name: TensorPlacement.of(name, tensors[name], cuts) for name in wanted if name in tensors}
    return found if lane is None else _of_all_stages(found, wanted, cuts, lane)


def _of_all_stages(
    own: Mapping[str, TensorPlacement], names: Sequence[str], cuts: ShardSpecs, lane: StagePeers
) -> dict[str, TensorPlacement]:
    """Add the placements of other stages' tensors, each described by the first stage that holds it."""
    sent = {name: _described(s, lane) for name, s in own.items() if lane.holders[name][0] == lane.place}
    said: list[Any] = [None] * dist.get_world_size(lane.group)
    dist.all_gather_object(said, sent, group=lane.group)
    found = {}
    for name in names:
        stages = lane.holders[name]
        placement = own.get(name) or _as_described(name, cuts, lane, *said[stages[0]][name])
        if len(stages) < len(said):
            placement = replace(placement, group=placement.group._replace(source=(lane.group, stages[0])))
        found[name] = placement
    return found


_Described = tuple[tuple[int, ...], int | None, tuple[Placement, ...], str]  # shape, mesh's index, placements, device


def _described(placement: TensorPlacement, lane: StagePeers) -> _Described:
    mesh = None if placement.mesh is None else list(lane.meshes).index(placement.mesh)
    return placement.shape, mesh, placement.placements, placement.device.type


def _as_described(
    name: str,
    cuts: ShardSpecs,
    lane: StagePeers,
    shape: tuple[int, ...],
    mesh: int | None,
    placements: Any,
    device: str,
) -> TensorPlacement:
    own = None if mesh is None else lane.meshes[mesh]
    return TensorPlacement._placed(name, shape, cuts, own, placements, torch.device(device))


def _sharded_axis(name: str, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> tuple[DeviceMesh, int] | None:
    """(mesh, dimension) over which FSDP shards a tensor; None if it does not. Raises RuntimeError for placements that
    weft cannot gather."""
    if mesh is None:
        return None
    axes = [a for a, place in enumerate(placements) if not isinstance(place, Replicate) and mesh.size(a) > 1]
    if len(axes) > 1 or not all(isinstance(placements[axis], Shard) for axis in axes):
        raise RuntimeError(f"{name} is placed as {tuple(placements)}: weft cannot gather that")
    return (mesh, axes[0]) if axes else None
