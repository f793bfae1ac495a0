"""Boxes: rectangular parts of a full tensor, which a rank or a file holds.

Shards are read and written as overlaps of boxes. So a mesh can read files that another mesh wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weft.launch.process import rank_and_world
from weft.launch.simulated import on_host


@dataclass(frozen=True, slots=True)
class Box:
    """A range in every dimension of a full tensor. The box of a scalar has no dimensions."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def from_shape(shape: tuple[int, ...]) -> Box:
        """The box of a full tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.start, self.size, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that select this box from a tensor with the elements of the larger box `outer`."""
        starts = [a - b for a, b in zip(self.start, outer.start, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))


def overlap(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes of one tensor. None if it is empty."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    end = tuple(min(x, y) for x, y in zip(a.end, b.end, strict=True))
    size = tuple(y - x for x, y in zip(start, end, strict=True))
    return Box(start, size) if all(n > 0 for n in size) else None


def slabs(box: Box, max_elements: int) -> Iterator[Box]:
    """The box, split along its first dimension into boxes of about `max_elements` elements at most."""
    if not box.size:
        yield box
        return
    rows = max(1, max_elements // max(1, box.numel // box.size[0]))
    for first in range(0, box.size[0], rows):
        count = min(rows, box.size[0] - first)
        yield Box((box.start[0] + first, *box.start[1:]), (count, *box.size[1:]))


def local_box(tensor: Tensor) -> tuple[Box, Tensor]:
    """(box that this rank holds, its elements). For a plain tensor, the box of the full tensor."""
    local = local_values(tensor)
    if not isinstance(tensor, DTensor):
        return Box.from_shape(tuple(tensor.shape)), local
    with on_host():
        size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(local.shape) == tuple(size), (local.shape, size)
    return Box(tuple(start), tuple(size)), local


@torch.no_grad()  # without autograd, to_local does not dispatch an operation
def _local(tensor: DTensor) -> Tensor:
    return tensor.to_local()


def local_values(tensor: Tensor) -> Tensor:
    """The elements on this rank. Raises RuntimeError if Engine.sleep has freed them."""
    local = (_local(tensor) if isinstance(tensor, DTensor) else tensor).detach()
    if local.numel() and not local.untyped_storage().nbytes():
        raise RuntimeError("Engine.sleep() has freed the elements of this tensor: call wake() first")
    return local


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor.

    replicas: for each mesh axis whose ranks hold the same box, (this rank's index, number of ranks). groups: process
    groups of the first len(groups) of these axes, for broadcasts; none for a plain tensor.
    """

    box: Box
    values: Tensor
    replicas: tuple[tuple[int, int], ...] = ()
    groups: tuple[dist.ProcessGroup, ...] = ()

    def read(self, box: Box) -> Tensor:
        """The elements of `box`, which must be inside this shard's box."""
        return self.values[box.within(self.box)]

    def is_writer(self, number: int) -> bool:
        """Whether this rank, of all replicas, writes the box. number: index of the tensor, which distributes tensors
        over the replicas."""
        return all(index == number % size for index, size in self.replicas)

    def is_reader(self, number: int) -> bool:
        """Whether this rank reads the box from a file and broadcasts it to `groups`. number: as in is_writer."""
        return all(index == number % size for index, size in self.replicas[: len(self.groups)])


class ReadableShard(Protocol):
    """The interface of a shard that an export uses. The elements may be on a device, on the host, or on disk."""

    @property
    def box(self) -> Box: ...

    def read(self, box: Box) -> Tensor: ...

    def is_writer(self, number: int) -> bool: ...


def shard_of(tensor: Tensor, among: tuple[int, int] | None = None) -> Shard:
    """This rank's shard. among: (this rank's index, number of ranks) of the ranks that hold a plain tensor; default:
    all ranks."""
    box, values = local_box(tensor)
    if not isinstance(tensor, DTensor):
        return Shard(box, values, (among or rank_and_world(),))
    mesh = tensor.device_mesh
    replicated_axes = [
        axis
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate) and mesh.size(axis) > 1
    ]
    replicas = tuple((mesh.get_local_rank(axis), mesh.size(axis)) for axis in replicated_axes)
    return Shard(box, values, replicas, tuple(mesh.get_group(axis) for axis in replicated_axes))
