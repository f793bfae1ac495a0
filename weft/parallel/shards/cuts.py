"""How tensor and expert parallelism shard tensors.

A rank's part is a plain tensor, which FSDP2 shards further. It may be a concatenation of several ranges of the full
tensor, because each segment of a fused projection is split separately. If both axes shard a tensor, its spec is a
NestedShardSpec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from weft.models.segments import Range
from weft.ops.communicator import Communicator
from weft.parallel.shards.boxes import Box, Shard, shard_of


@dataclass(frozen=True)
class ShardSpec:
    """How one mesh axis shards a tensor.

    shape: of the full tensor. dim: the sharded dimension. ranges: for each rank of the axis, the ranges (start, size)
    of `dim` that it holds, in order. copies: for each of these ranges, the number of neighbouring ranks that hold the
    same range; for a replicated tensor, all ranks. rank: this rank's index on the axis. ranks: collectives over the
    axis."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[Range, ...], ...]
    copies: tuple[int, ...]
    rank: int
    ranks: Communicator

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranges)

    @property
    def divides(self) -> bool:
        """Whether the tensor is sharded. If not, every rank holds the full tensor."""
        return any(copies < self.size for copies in self.copies)

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Shape of a rank's part. rank: default this rank."""
        ranges = self.ranges[self.rank if rank is None else rank]
        return (*self.shape[: self.dim], sum(size for _, size in ranges), *self.shape[self.dim + 1 :])

    @property
    def axes(self) -> tuple[Communicator, ...]:
        """Collectives over each axis that shards the tensor."""
        return (self.ranks,)

    def for_rank(self, rank: int) -> ShardSpec:
        """The spec of another rank of the axis."""
        return replace(self, rank=rank)

    def by_blocks(self, sizes: Sequence[int]) -> ShardSpec:
        """The spec of a tensor with one element per block of this tensor. sizes: of a block along each dimension.
        Ranges must start and end between blocks."""
        size = sizes[self.dim]
        ranges = tuple(tuple((first // size, count // size) for first, count in ranges) for ranges in self.ranges)
        return replace(
            self, shape=tuple(-(-length // size) for length, size in zip(self.shape, sizes, strict=True)), ranges=ranges
        )

    def boxes(self, box: Box) -> list[tuple[Box, Box, int]]:
        """The boxes of the full tensor that `box`, a box of this rank's part, consists of: (box of the full tensor, the
        same elements as a box of the part, number of ranks that hold them)."""
        if not self.shape:
            return [(box, box, self.size)]
        result, offset, dim = [], 0, self.dim
        for (first, size), copies in zip(self.ranges[self.rank], self.copies, strict=True):
            start = max(box.start[dim], offset)
            count = min(box.end[dim], offset + size) - start
            if count > 0:
                local = _along(box, dim, start, count)
                result.append((_along(box, dim, first + start - offset, count), local, copies))
            offset += size
        return result

    def take(self, tensor: Tensor) -> Tensor:
        """This rank's part of a full tensor."""
        if not self.divides:
            return tensor
        return torch.cat([tensor.narrow(self.dim, first, size) for first, size in self.ranges[self.rank]], self.dim)

    def join(self, part: Tensor) -> Tensor:
        """The full tensor from all ranks' parts. Collective over the axis. Raises RuntimeError if the parts do not fill
        it."""
        if not self.divides:
            return part
        shapes = [self.local_shape(rank) for rank in range(self.size)]
        longest = max(shape[self.dim] for shape in shapes)
        sent = part.new_zeros((*self.shape[: self.dim], longest, *self.shape[self.dim + 1 :]))
        sent.narrow(self.dim, 0, part.shape[self.dim]).copy_(part)
        # Two ranks' ranges are equal or disjoint, so the distinct ranges must add up to the full dimension.
        filled, total = (
            sum(size for _, size in {range_ for ranges in self.ranges for range_ in ranges}),
            self.shape[self.dim],
        )
        if filled != total:
            raise RuntimeError(f"the ranks together hold only {filled} of {total} indices of dimension {self.dim}")
        out = part.new_empty(self.shape)
        for rank, values in enumerate(self.ranks.all_gather(sent)):
            offset = 0
            for first, size in self.ranges[rank]:
                out.narrow(self.dim, first, size).copy_(values.narrow(self.dim, offset, size))
                offset += size
        return out


@dataclass(frozen=True)
class NestedShardSpec:
    """How two mesh axes shard one tensor, along different dimensions. outer: spec of the full tensor; its ranks hold
    different elements. inner: spec of the outer's part. ranks: collectives over both axes; the inner axis varies
    fastest."""

    outer: ShardSpec
    inner: ShardSpec
    ranks: Communicator

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self.outer.shape

    @property
    def size(self) -> int:
        """Number of ranks of both axes."""
        return self.outer.size * self.inner.size

    @property
    def rank(self) -> int:
        """This rank's index among the ranks of both axes."""
        return self.outer.rank * self.inner.size + self.inner.rank

    @property
    def copies(self) -> tuple[int, ...]:
        """As in ShardSpec."""
        return self.inner.copies

    @property
    def divides(self) -> bool:
        """As in ShardSpec."""
        return self.outer.divides or self.inner.divides

    @property
    def axes(self) -> tuple[Communicator, ...]:
        """As in ShardSpec."""
        return (self.outer.ranks, self.inner.ranks)

    def for_rank(self, rank: int) -> NestedShardSpec:
        """The spec of another rank."""
        outer, inner = divmod(rank, self.inner.size)
        shape = self.outer.local_shape(outer)
        return replace(self, outer=self.outer.for_rank(outer), inner=replace(self.inner, shape=shape, rank=inner))

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """As in ShardSpec."""
        return (self if rank is None else self.for_rank(rank)).inner.local_shape()

    def by_blocks(self, sizes: Sequence[int]) -> NestedShardSpec:
        """As in ShardSpec."""
        return replace(self, outer=self.outer.by_blocks(sizes), inner=self.inner.by_blocks(sizes))

    def boxes(self, box: Box) -> list[tuple[Box, Box, int]]:
        """As in ShardSpec."""
        result = []
        for between, local, copies in self.inner.boxes(box):
            for full_box, within, _ in self.outer.boxes(between):
                moved = zip(local.start, within.start, between.start, strict=True)
                result.append((full_box, Box(tuple(a + b - c for a, b, c in moved), within.size), copies))
        return result

    def take(self, tensor: Tensor) -> Tensor:
        """As in ShardSpec."""
        return self.inner.take(self.outer.take(tensor))

    def join(self, part: Tensor) -> Tensor:
        """As in ShardSpec. Collective over both axes."""
        return self.outer.join(self.inner.join(part))


AnyShardSpec = ShardSpec | NestedShardSpec
ShardSpecs = Mapping[str, AnyShardSpec]


@dataclass(frozen=True)
class RankBox:
    """A box of a full tensor that this rank holds. first: index of its first element in this rank's shard. replicas: as
    in Shard."""

    box: Box
    first: tuple[int, ...]
    replicas: tuple[tuple[int, int], ...]

    def within(self, box: Box) -> tuple[slice, ...]:
        """The slices that select `box`, a part of this box, from this rank's shard."""
        starts = [a - b + c for a, b, c in zip(box.start, self.box.start, self.first, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, box.size, strict=True))

    def is_writer(self, number: int) -> bool:
        """Whether this rank, of all replicas, writes the box. number: as in Shard.is_writer."""
        return all(index == number % size for index, size in self.replicas)


def rank_boxes(tensor: Tensor, spec: AnyShardSpec | None, among: tuple[int, int] | None = None) -> list[RankBox]:
    """The boxes of the full tensor that this rank holds. spec: None if neither tp nor ep shards it. among: see
    shard_of."""
    return _boxes_of_shard(shard_of(tensor, among), spec)


def _boxes_of_shard(shard: Shard, spec: AnyShardSpec | None) -> list[RankBox]:
    if spec is None:
        return [RankBox(shard.box, (0,) * len(shard.box.start), shard.replicas)]
    boxes = []
    for box, part, copies in spec.boxes(shard.box):
        first = tuple(start - begin for start, begin in zip(part.start, shard.box.start, strict=True))
        boxes.append(RankBox(box, first, (*shard.replicas, (spec.rank % copies, copies))))
    return boxes


def shards_of(tensor: Tensor, spec: AnyShardSpec | None, among: tuple[int, int] | None = None) -> list[Shard]:
    """The shards of this rank: `rank_boxes` with their elements. At least one shard, which may be empty. among: see
    shard_of."""
    shard = shard_of(tensor, among)
    boxes = _boxes_of_shard(shard, spec)
    shards = [Shard(b.box, shard.values[b.within(b.box)], b.replicas, shard.groups) for b in boxes]
    empty = Box((0,) * len(shard.box.start), shard.box.size)
    return shards or [Shard(empty, shard.values, shard.replicas, shard.groups)]


def split(parameter: Tensor, values: Tensor, spec: AnyShardSpec) -> list[tuple[int, Tensor]]:
    """(number of ranks that hold the box, its elements of `values`) for each box of a parameter, in the order of
    `shards_of`. values: a tensor with the shard's shape, such as a gradient or optimizer state."""
    shard_box = shard_of(parameter).box
    boxes = [(copies, values[part.within(shard_box)]) for _, part, copies in spec.boxes(shard_box)]
    return boxes or [(spec.copies[0], values)]


def module_shards(module: nn.Module, specs: ShardSpecs, among: tuple[int, int] | None = None) -> dict[str, list[Shard]]:
    """Name -> shards, for every tensor of the state dict. Tied tensors occur under each name. among: see shard_of."""
    return {name: shards_of(t, specs.get(name), among) for name, t in module.state_dict(keep_vars=True).items()}


def full_shape(name: str, tensor: Tensor, specs: ShardSpecs) -> tuple[int, ...]:
    """The shape of a tensor before tp and ep sharded it."""
    return specs[name].shape if name in specs else tuple(tensor.shape)


def _along(box: Box, dim: int, start: int, size: int) -> Box:
    starts, sizes = list(box.start), list(box.size)
    starts[dim], sizes[dim] = start, size
    return Box(tuple(starts), tuple(sizes))
