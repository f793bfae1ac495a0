"""How tensor and expert parallelism divide tensors: the part of a whole tensor that a rank of the axis computes with.

A part is a plain tensor, which FSDP2 shards like any other. It may be several ranges of the whole tensor, concatenated,
because a fused projection is cut part by part. Both axes may divide one tensor: that is a NestedShardSpec.
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
    """The division of one tensor. shape: of the whole tensor. dim: the divided dimension. ranges: for each rank of the
    axis, the ranges of `dim` that it holds, in order. copies: for each of these ranges, the number of neighbouring
    ranks that hold the same; all ranks for an undivided tensor. rank: this rank's index on the axis. ranks: of the
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
        """Whether any rank lacks a part of the tensor."""
        return any(copies < self.size for copies in self.copies)

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Shape of a rank's part; default: this rank's."""
        ranges = self.ranges[self.rank if rank is None else rank]
        return (*self.shape[: self.dim], sum(size for _, size in ranges), *self.shape[self.dim + 1 :])

    @property
    def axes(self) -> tuple[Communicator, ...]:
        """The ranks of each axis of the division."""
        return (self.ranks,)

    def for_rank(self, rank: int) -> ShardSpec:
        """The spec of another rank of the axis."""
        return replace(self, rank=rank)

    def by_blocks(self, sizes: Sequence[int]) -> ShardSpec:
        """The division of a tensor with one element for each block of this one. sizes: of a block along each
        dimension; ranges begin and end between blocks."""
        size = sizes[self.dim]
        ranges = tuple(tuple((first // size, count // size) for first, count in ranges) for ranges in self.ranges)
        return replace(
            self, shape=tuple(-(-length // size) for length, size in zip(self.shape, sizes, strict=True)), ranges=ranges
        )

    def boxes(self, box: Box) -> list[tuple[Box, Box, int]]:
        """The content of `box`, a box of this rank's part, as boxes of the whole tensor: (box of the whole tensor, the
        same box in the part, number of ranks that hold it)."""
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
        """This rank's part of a whole tensor."""
        if not self.divides:
            return tensor
        return torch.cat([tensor.narrow(self.dim, first, size) for first, size in self.ranges[self.rank]], self.dim)

    def join(self, part: Tensor) -> Tensor:
        """The whole tensor from all ranks' parts. Collective over the axis. Raises RuntimeError if the parts do not
        fill it."""
        if not self.divides:
            return part
        shapes = [self.local_shape(rank) for rank in range(self.size)]
        longest = max(shape[self.dim] for shape in shapes)
        sent = part.new_zeros((*self.shape[: self.dim], longest, *self.shape[self.dim + 1 :]))
        sent.narrow(self.dim, 0, part.shape[self.dim]).copy_(part)
        # Ranges of two ranks are either equal or disjoint.
        filled, total = (
            sum(size for _, size in {range_ for ranges in self.ranges for range_ in ranges}),
            self.shape[self.dim],
        )
        if filled != total:
            raise RuntimeError(f"ranks hold {filled} of {total} along dim {self.dim}")
        out = part.new_empty(self.shape)
        for rank, values in enumerate(self.ranks.all_gather(sent)):
            offset = 0
            for first, size in self.ranges[rank]:
                out.narrow(self.dim, first, size).copy_(values.narrow(self.dim, offset, size))
                offset += size
        return out


@dataclass(frozen=True)
class NestedShardSpec:
    """The division of one tensor by two axes, along different dimensions. outer: of the whole tensor, with different
    elements on each rank. inner: of the outer's part. ranks: of both axes together, the inner one varying fastest."""

    outer: ShardSpec
    inner: ShardSpec
    ranks: Communicator

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.outer.shape

    @property
    def size(self) -> int:
        """Number of ranks of both axes."""
        return self.outer.size * self.inner.size

    @property
    def rank(self) -> int:
        """This rank's index among them."""
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
            for whole_box, within, _ in self.outer.boxes(between):
                moved = zip(local.start, within.start, between.start, strict=True)
                result.append((whole_box, Box(tuple(a + b - c for a, b, c in moved), within.size), copies))
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
    """A box of a whole tensor that this rank holds. first: where its elements start in this rank's shard. replicas: as
    in Shard."""

    box: Box
    first: tuple[int, ...]
    replicas: tuple[tuple[int, int], ...]

    def within(self, box: Box) -> tuple[slice, ...]:
        """The slices that cut `box`, a part of this box, out of this rank's shard."""
        starts = [a - b + c for a, b, c in zip(box.start, self.box.start, self.first, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, box.size, strict=True))

    def is_writer(self, number: int) -> bool:
        """Whether this rank writes the box for all its replicas; `number` spreads tensors over them."""
        return all(index == number % size for index, size in self.replicas)


def rank_boxes(tensor: Tensor, spec: AnyShardSpec | None, among: tuple[int, int] | None = None) -> list[RankBox]:
    """The boxes of the whole tensor that this rank holds. spec: None if no axis divides it. among: see shard_of."""
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
    """As `rank_boxes`, with the elements. At least one shard, which may be empty. among: see shard_of."""
    shard = shard_of(tensor, among)
    boxes = _boxes_of_shard(shard, spec)
    shards = [Shard(b.box, shard.values[b.within(b.box)], b.replicas, shard.groups) for b in boxes]
    empty = Box((0,) * len(shard.box.start), shard.box.size)
    return shards or [Shard(empty, shard.values, shard.replicas, shard.groups)]


def split(parameter: Tensor, values: Tensor, spec: AnyShardSpec) -> list[tuple[int, Tensor]]:
    """(number of ranks that hold the box, its elements in `values`) for each box of a parameter, in the order of
    `shards_of`. values: of the shard's shape, such as a gradient or optimizer state."""
    shard_box = shard_of(parameter).box
    boxes = [(copies, values[part.within(shard_box)]) for _, part, copies in spec.boxes(shard_box)]
    return boxes or [(spec.copies[0], values)]


def module_shards(module: nn.Module, specs: ShardSpecs, among: tuple[int, int] | None = None) -> dict[str, list[Shard]]:
    """The shards of every tensor of the state dict, tied ones under each name. among: see shard_of."""
    return {name: shards_of(t, specs.get(name), among) for name, t in module.state_dict(keep_vars=True).items()}


def full_shape(name: str, tensor: Tensor, specs: ShardSpecs) -> tuple[int, ...]:
    """The shape of a tensor before mesh axes divided it."""
    return specs[name].shape if name in specs else tuple(tensor.shape)


def _along(box: Box, dim: int, start: int, size: int) -> Box:
    starts, sizes = list(box.start), list(box.size)
    starts[dim], sizes[dim] = start, size
    return Box(tuple(starts), tuple(sizes))
