"""Where the elements of a rank's shard lie in the whole tensor, for optimizers whose steps depend on it.

Whole tensors are those of the model that transformers builds, which are the same on every mesh.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch import Tensor, nn

from weft.launch.simulated import on_host
from weft.launch.timing import waiting
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.cuts import RankBox, ShardSpecs, rank_boxes


@dataclass(frozen=True)
class ParameterPlacement:
    """This rank's part of one parameter. name: the same on every mesh. shape: of the whole tensor. boxes: of the whole
    tensor; none for an empty shard. number: the parameter's index, by which writing is dealt to replicas."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[RankBox, ...]
    number: int


@dataclass(frozen=True)
class Placements:
    """The placements of all parameters of a rank's stage. cuts: how tp and ep divide them. among: (this rank, ranks) of
    the stage. ranks: the ranks of the stage; None for one rank, and in a simulation."""

    cuts: ShardSpecs
    among: tuple[int, int] = (0, 1)
    ranks: dist.ProcessGroup | None = None

    def placement_of(self, name: str, parameter: nn.Parameter, number: int) -> ParameterPlacement:
        """The placement of a parameter."""
        cut = self.cuts.get(name)
        shape = tuple(parameter.shape) if cut is None else cut.shape
        with on_host():
            boxes = tuple(box for box in rank_boxes(parameter.detach(), cut, self.among) if box.box.numel)
        return ParameterPlacement(name, shape, boxes, number)

    def gather(self, value: object) -> list[object]:
        """Every rank's value; collective."""
        if self.ranks is None:
            return [value]
        values: list[object] = [None] * dist.get_world_size(self.ranks)
        dist.all_gather_object(values, value, group=self.ranks)
        return values

    def sum_(self, x: Tensor) -> None:
        """Replace x with the sum over the ranks of the stage. Collective."""
        if self.ranks is not None:
            with waiting():
                dist.all_reduce(x, group=self.ranks)

    def max_(self, x: Tensor) -> None:
        """Replace x with the maximum over the ranks of the stage. Collective."""
        if self.ranks is not None:
            with waiting():
                dist.all_reduce(x, dist.ReduceOp.MAX, group=self.ranks)


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a box: a matrix [count, columns] of elements of a shard. A row is what one index of the last
    dimension runs over. box: index of the box. local: where they are in the shard. first: number of the first row in
    the box. row: number of the first row in the whole tensor. column: the first column in the whole tensor."""

    box: int
    local: tuple[slice, ...]
    count: int
    columns: int
    first: int
    row: int
    column: int

    def matrix_in(self, shard: Tensor) -> Tensor:
        """The rows as a matrix, a view of the shard."""
        return shard[self.local].view(self.count, self.columns)


def rows_of(placement: ParameterPlacement, elements: int) -> Iterator[Rows]:
    """All rows of a shard, in order, in parts of at most about `elements` elements."""
    for number, rank_box in enumerate(placement.boxes):
        box, shape = rank_box.box, placement.shape
        columns, done = (box.size[-1], 0) if shape else (1, 0)
        if len(shape) < 2:
            yield Rows(number, rank_box.within(box), 1, columns, 0, 0, box.start[0] if shape else 0)
            continue
        # Dimensions before `axis` are taken one index at a time; those between it and the columns are whole.
        partial = [d for d in range(1, len(shape) - 1) if box.size[d] < shape[d]]
        axis = partial[-1] if partial else 0
        inner = math.prod(box.size[axis + 1 : -1])
        step = max(1, elements // max(1, inner * columns))
        for index in product(*(range(start, start + size) for start, size in zip(box.start, box.size[:axis]))):  # noqa: B905
            for offset in range(0, box.size[axis], step):
                size = min(step, box.size[axis] - offset)
                part = Box(
                    (*index, box.start[axis] + offset, *box.start[axis + 1 :]),
                    (*(1 for _ in index), size, *box.size[axis + 1 :]),
                )
                row = 0
                for dim in range(len(shape) - 1):
                    row = row * shape[dim] + part.start[dim]
                yield Rows(number, rank_box.within(part), size * inner, columns, done, row, box.start[-1])
                done += size * inner


def random_key(seed: int, name: str, step: int) -> int:
    """32 bits, as a signed number, that differ between runs, tensors and steps."""
    digest = hashlib.blake2s(f"{seed}/{step}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)
