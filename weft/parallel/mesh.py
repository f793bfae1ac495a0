"""The device mesh: which ranks share what.

One root mesh has the axes dp_replicate, dp_shard and tp, outermost first; every group is a named part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from weft.ops.communicator import Communicator, OverGroup
from weft.sharding.cuts import Cut

DATA = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Axis:
    """A rank's place on one axis of the mesh, and the ranks along it."""

    place: int
    size: int
    ranks: Communicator
    neighbours: Callable[[int], Communicator]


@dataclass(frozen=True)
class Mesh:
    """dp: the mesh given to fully_shard, (dp_replicate, dp_shard) or (dp_shard,). tp: None for one rank; its ranks have
    the same documents. data_group: all ranks with different documents; metrics are reduced over it, once."""

    dp_replicate: int
    dp_shard: int
    root: DeviceMesh
    dp: DeviceMesh
    tp: Axis | None
    data_group: dist.ProcessGroup

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks with different documents."""
        return dist.get_rank(self.data_group)

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks of the mesh, for what concerns processes and not documents: failures, memory, stops."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def sharded_over(self, size: int) -> DeviceMesh:
        """The same ranks, sharded over groups of `size` (a divisor of dp_shard) and replicated across them."""
        if size == self.dp_shard:
            return self.dp
        return _root(self.dp.device_type, self.data_ranks // size, size, self.tp_size, copies=True)[DATA]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.root.get_group("tp")

    @property
    def tp_size(self) -> int:
        return 1 if self.tp is None else self.tp.size

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of dp_replicate, dp_shard and tp."""
        return self.dp_replicate, self.dp_shard, self.tp_size

    @property
    def axes(self) -> dict[str, int]:
        """Those that there are: dp_replicate and dp_shard always, tp where it has several ranks."""
        data = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        return data if self.tp is None else {**data, "tp": self.tp.size}


def build_mesh(dp_replicate: int, dp_shard: int, tp: int, device_type: str) -> Mesh:
    """A mesh over all ranks, which must be dp_replicate x dp_shard x tp (config/mesh.py has checked that)."""
    assert dp_replicate * dp_shard * tp == dist.get_world_size()
    assert dist.group.WORLD is not None
    root = _root(device_type, dp_replicate, dp_shard, tp, copies=dp_replicate > 1)
    if tp == 1:
        return Mesh(dp_replicate, dp_shard, root, root, None, dist.group.WORLD)
    dp = root[DATA] if dp_replicate > 1 else root["dp_shard"]
    data = dp._flatten("data") if dp_replicate > 1 else dp

    def neighbours(size: int) -> OverGroup:
        if size == tp:
            return OverGroup(root.get_group("tp"))
        shape = (dp_replicate * dp_shard, tp // size, size)
        return OverGroup(init_device_mesh(device_type, shape, mesh_dim_names=("data", "tp", "same")).get_group("same"))

    axis = Axis(root.get_local_rank("tp"), tp, neighbours(tp), neighbours)
    return Mesh(dp_replicate, dp_shard, root, dp, axis, data.get_group())


def _root(device_type: str, dp_replicate: int, dp_shard: int, tp: int, *, copies: bool) -> DeviceMesh:
    """copies: with an axis dp_replicate, whatever its size. An axis of size 1 would cost a group for nothing."""
    sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
    named = {axis: n for axis, n in sizes.items() if n > 1 or axis == "dp_shard" or (axis == "dp_replicate" and copies)}
    return init_device_mesh(device_type, tuple(named.values()), mesh_dim_names=tuple(named))


def own_part(tensor: Tensor) -> Tensor:
    """The elements of a tensor on this rank: the local shard of a DTensor, or all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, cut: Cut | None = None) -> Tensor:
    """The full tensor behind a shard, detached; collective for a DTensor. cut: how tp divides it."""
    detached = tensor.detach()
    part = detached.full_tensor() if isinstance(detached, DTensor) else detached
    return part if cut is None else cut.join(part)
