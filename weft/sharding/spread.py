"""How a sharded tensor is spread over ranks, and what each rank sends when it is gathered.

Tensor and expert parallelism divide a tensor first; FSDP2 then shards each part over an axis of a mesh. Either may
leave it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from weft.ops.communicator import Communicator
from weft.sharding.boxes import Box, local_box, overlap
from weft.sharding.cuts import AnyCut, Cuts, full_shape

Place = tuple[int, int]  # of a rank: among those that divide the tensor first, and on FSDP's axis


class GatherGroup(NamedTuple):
    """The ranks that a tensor is gathered from: an axis of a mesh, and the ranks that compute with other parts of it
    (tp, ep); None where there are no others."""

    axis: tuple[DeviceMesh, int] | None = None
    parts: Communicator | None = None


class Share(NamedTuple):
    """A box of the whole tensor. within: where it lies in the shard of the rank that holds it."""

    box: Box
    within: tuple[slice, ...]


@dataclass(frozen=True)
class Spread:
    """The placement of one tensor. shape: of the whole tensor. cut: its division by tp and ep, or None."""

    tensor: Tensor
    shape: tuple[int, ...]
    cut: AnyCut | None
    group: GatherGroup

    @classmethod
    def of(cls, name: str, tensor: Tensor, cuts: Cuts) -> Spread:
        """RuntimeError where a tensor has an unknown placement."""
        cut = cuts.get(name)
        cut = cut if cut is not None and cut.divides else None
        group = GatherGroup(_sharded_axis(name, tensor), None if cut is None else cut.ranks)
        return cls(tensor, full_shape(name, tensor, cuts), cut, group)

    @property
    def values(self) -> Tensor:
        """The elements on this rank."""
        return local_box(self.tensor)[1]

    @property
    def places(self) -> list[Place]:
        """The places of all ranks of the group, in gathering order."""
        along = 1 if self.group.axis is None else self.group.axis[0].size(self.group.axis[1])
        over = 1 if self.cut is None else self.cut.size
        return [(part, fsdp) for part in range(over) for fsdp in range(along)]

    @property
    def own_place(self) -> Place:
        """The place of this rank."""
        along = 0 if self.group.axis is None else self.group.axis[0].get_local_rank(self.group.axis[1])
        return (0 if self.cut is None else self.cut.place), along

    def shares(self, part: Box, place: Place) -> list[Share]:
        """What the rank at `place` sends of `part`, a box of the whole tensor. Where several ranks hold the same,
        the first sends it."""
        held = self._held(place)
        boxes = [(held, held, 1)] if self.cut is None else self.cut.at(place[0]).boxes(held)
        found = []
        for whole, local, copies in boxes:
            box = overlap(part, whole) if place[0] % copies == 0 else None
            if box is not None:
                moved = zip(box.start, whole.start, local.start, strict=True)
                start = tuple(of_box - of_whole + of_local for of_box, of_whole, of_local in moved)
                found.append(Share(box, Box(start, box.size).within(held)))
        return found

    def _held(self, place: Place) -> Box:
        """The box that a rank holds of the part that it computes with."""
        shape = self.shape if self.cut is None else self.cut.local_shape(place[0])  # parts may differ in size
        if self.group.axis is None:
            return Box.whole(shape)
        assert isinstance(self.tensor, DTensor)
        mesh, axis = self.group.axis
        coordinate = list(mesh.get_coordinate() or ())
        coordinate[axis] = place[1]
        size, start = _compute_local_shape_and_global_offset(shape, mesh.shape, coordinate, self.tensor.placements)
        return Box(tuple(start), tuple(size))


def spreads_of(tensors: Mapping[str, Tensor], names: Iterable[str], cuts: Cuts) -> dict[str, Spread]:
    """The Spread of each named tensor."""
    return {name: Spread.of(name, tensors[name], cuts) for name in dict.fromkeys(names)}


def _sharded_axis(name: str, tensor: Tensor) -> tuple[DeviceMesh, int] | None:
    """The mesh axis over which FSDP shards a tensor; None where every rank holds what there is of it."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    axes = [a for a, place in enumerate(tensor.placements) if not isinstance(place, Replicate) and mesh.size(a) > 1]
    if len(axes) > 1 or not all(isinstance(tensor.placements[axis], Shard) for axis in axes):
        raise RuntimeError(f"{name} is placed as {tensor.placements}: weft cannot gather that")
    return (mesh, axes[0]) if axes else None
