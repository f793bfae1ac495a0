"""Compares replicated content of ranks in the all-reduce that ends a step: replicated parameters, parameters that
mesh.tp does not divide, and shared documents.

Each rank adds a term to a sum that is 0 if all holders agree (launch/consistency.py). Parameters are compared as they
are after the previous step's update, so optimizer state is compared through its effect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from weft.engine.metrics import MetricSums
from weft.launch.consistency import ReplicaChecksum, checksum_term, raise_mismatch
from weft.parallel.mesh import Mesh
from weft.parallel.shards.boxes import local_values
from weft.parallel.shards.cuts import RankBox, ShardSpecs, rank_boxes

_PARAMETERS, _DOCUMENTS = "_parameters", "_documents"  # names of their sums in the step's reduction
_BITS = 0xFFFFFF

Groups = tuple[tuple[int, int], ...]  # as Shard.replicas: the ranks that hold the same elements


@dataclass(frozen=True)
class _Copy:
    """Elements of a trained parameter that other ranks also hold."""

    name: str
    parameter: nn.Parameter
    box: RankBox

    @property
    def values(self) -> Tensor:
        return local_values(self.parameter)[self.box.within(self.box.box)]

    def __str__(self) -> str:
        box = self.box.box
        return f"{self.name}[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.end, strict=True))}]"


class ReplicaCheck:
    """Compares the trained parameters of one engine."""

    def __init__(self, module: nn.Module, cuts: ShardSpecs, tied: Mapping[str, tuple[int, int]]) -> None:
        """tied: parameter -> (this rank's index among the pipeline stages that hold it, their number)."""
        self._copies: dict[Groups, list[_Copy]] = defaultdict(list)
        for name, parameter in module.named_parameters():
            for box in rank_boxes(parameter, cuts.get(name)) if parameter.requires_grad else ():
                if name in tied:
                    box = replace(box, replicas=(*box.replicas, tied[name]))
                if _index_of(box.replicas)[1] > 1 and box.box.numel:
                    self._copies[box.replicas].append(_Copy(name, parameter, box))

    def add_to(self, sums: MetricSums, documents: Sequence[ReplicaChecksum], device: torch.device) -> None:
        """Add this rank's terms, without waiting for the device. documents: the shared documents of its rows."""
        sums.add(_PARAMETERS, self._term(device), 1.0)
        sums.add(
            _DOCUMENTS, sum(checksum_term(shared.checksum, shared.index, shared.size) for shared in documents), 1.0
        )

    @torch.no_grad()
    def _term(self, device: torch.device) -> Tensor | float:
        total: Tensor | float = 0.0
        for groups, copies in self._copies.items():
            total = total + checksum_term(_number(copies), *_index_of(groups)).double().to(device, non_blocking=True)
        return total

    def check(self, metrics: dict[str, float | None], documents: Sequence[ReplicaChecksum], mesh: Mesh) -> None:
        """Take the sums out of `metrics`. Raises RanksDisagreeError on all ranks, with the parameters or documents that
        differ, and the ranks."""
        unlike, weights = metrics.pop(_DOCUMENTS), metrics.pop(_PARAMETERS)
        if unlike:
            checksums = {shared.name: f"{shared.checksum:06x}" for shared in documents}
            raise_mismatch(
                "ranks that train the same documents have different tokens or weights",
                checksums,
                mesh.world_group,
            )
        if weights:
            checksums = {
                str(copy): f"{int(_number([copy])):06x}" for copies in self._copies.values() for copy in copies
            }
            raise_mismatch("ranks that should hold equal weights have different weights", checksums, mesh.world_group)


def _index_of(groups: Groups) -> tuple[int, int]:
    """(this rank's index among the ranks that hold a copy, their number)."""
    position, count = 0, 1
    for index, size in groups:
        position, count = position * size + index, count * size
    return position, count


def _number(copies: Sequence[_Copy]) -> Tensor:
    """A checksum below 2**24: the bits of all elements as integers, summed. Small tensors are joined for one kernel."""
    values = [_integers(copy.values) for copy in copies]
    small = [v for v in values if v.numel() < 65536]
    by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for value in small:
        by_type[value.dtype].append(value)
    parts = [*(v for v in values if v.numel() >= 65536), *(torch.cat(group) for group in by_type.values())]
    total = sum((part.sum(dtype=torch.int64) for part in parts), torch.zeros((), dtype=torch.int64))
    return (total ^ (total >> 24) ^ (total >> 48)) & _BITS


def _integers(values: Tensor) -> Tensor:
    """The bits of a tensor, flat, as the widest integers that fit: fewer integers are faster to add."""
    flat = values.reshape(-1)
    for dtype in (torch.int64, torch.int32, torch.int16):
        factor = dtype.itemsize // flat.element_size()
        if factor and flat.numel() % factor == 0 and flat.storage_offset() % factor == 0:
            return flat.view(dtype)
    return flat.view(torch.uint8)
