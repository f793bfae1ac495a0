"""The position of a shard's elements in the full tensor, for optimizers whose updates depend on it.

A full tensor is a parameter of the model as transformers builds it. Its shape and name are equal on every mesh.
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
    """This rank's part of one parameter.

    name: equal on every mesh. shape: of the full tensor. boxes: parts of the full tensor that this rank holds, none for
    an empty shard. number: index of the parameter, which selects the replica that writes it.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[RankBox, ...]
    number: int


@dataclass(frozen=True)
class Placements:
    """The placements of all parameters of a rank's stage. cuts: how tp and ep shard them. among: (this rank's index in
    the stage, number of ranks in the stage). ranks: the ranks of the stage, None if there is one, and in a
    simulation."""

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
    """Consecutive rows of a box: a matrix [count, columns] of elements of a shard. A row runs along the last dimension.

    box: index of the box. local: slices that select the rows in the shard. first: index of the first row in the box.
    row, column: index of the first row and of the first column in the full tensor.
    """

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
    """All rows of a shard, in order, in parts of about `elements` elements at most."""
    for number, rank_box in enumerate(placement.boxes):
        box, shape = rank_box.box, placement.shape
        columns, first = (box.size[-1], 0) if shape else (1, 0)
        if len(shape) < 2:
            yield Rows(number, rank_box.within(box), 1, columns, 0, 0, box.start[0] if shape else 0)
            continue
        # A part has one index of each dimension before `split`, a range of `split`, and all of the dimensions between
        # `split` and the columns. Rows are then consecutive in the full tensor.
        partial = [d for d in range(1, len(shape) - 1) if box.size[d] < shape[d]]
        split = partial[-1] if partial else 0
        inner = math.prod(box.size[split + 1 : -1])
        step = max(1, elements // max(1, inner * columns))
        for index in product(*(range(start, start + size) for start, size in zip(box.start, box.size[:split]))):  # noqa: B905
            for offset in range(0, box.size[split], step):
                size = min(step, box.size[split] - offset)
                part = Box(
                    (*index, box.start[split] + offset, *box.start[split + 1 :]),
                    (*(1 for _ in index), size, *box.size[split + 1 :]),
                )
                row = 0
                for dim in range(len(shape) - 1):
                    row = row * shape[dim] + part.start[dim]
                yield Rows(number, rank_box.within(part), size * inner, columns, first, row, box.start[-1])
                first += size * inner


def random_key(seed: int, name: str, step: int) -> int:
    """A 32-bit hash of seed, tensor name and step, as a signed integer."""
    digest = hashlib.blake2s(f"{seed}/{step}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)
