"""The device mesh: which ranks share what.

One root mesh has the axes dp_replicate, dp_shard x cp and tp, outermost first. Every group is a named part of it, or of
the same ranks arranged as data x ring x ulysses x tp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from weft.config.mesh import MeshSizes
from weft.ops.communicator import Communicator, ContextAxis, GroupCommunicator
from weft.sharding.cuts import Cut


@dataclass(frozen=True)
class Axis:
    """A rank's place on one axis of the mesh, and the ranks along it."""

    place: int
    size: int
    ranks: Communicator
    neighbours: Callable[[int], Communicator]


@dataclass(frozen=True)
class Mesh:
    """dp: the mesh given to fully_shard, (dp_replicate, dp_shard x cp) or the latter. tp: None for one rank; its ranks
    have the same documents. loss_group: all ranks with different documents, or parts of them."""

    dp_replicate: int
    dp_shard: int
    root: DeviceMesh
    dp: DeviceMesh
    cp_size: int
    tp: Axis | None
    loss_group: dist.ProcessGroup

    @property
    def shards(self) -> int:
        """Ranks over which parameters, gradients and optimizer state are sharded."""
        return self.dp_shard * self.cp_size

    @property
    def shard_axis(self) -> str:
        """The name of the axis that these ranks are in the root mesh."""
        return _shard_axis(self.cp_size)

    @property
    def loss_ranks(self) -> int:
        """Ranks with different documents, or parts of them."""
        return self.dp_replicate * self.shards

    @property
    def loss_rank(self) -> int:
        """This rank's index among them."""
        return dist.get_rank(self.loss_group)

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks of the mesh, for what concerns processes and not documents: failures, memory, stops."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def sharded_over(self, size: int) -> DeviceMesh:
        """The same ranks, sharded over groups of `size` (a divisor of `shards`) and replicated across them."""
        if size == self.shards:
            return self.dp
        name = self.shard_axis
        root = _root(self.dp.device_type, name, (self.loss_ranks // size, size, self.tp_size), copies=True)
        return root["dp_replicate", name]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.root.get_group("tp")

    @property
    def tp_size(self) -> int:
        return 1 if self.tp is None else self.tp.size

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of dp_replicate, dp_shard, cp and tp."""
        return self.dp_replicate, self.dp_shard, self.cp_size, self.tp_size

    @property
    def axes(self) -> dict[str, int]:
        """Those that there are: dp_replicate and dp_shard always, cp and tp where they have several ranks."""
        axes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp_size, "tp": self.tp_size}
        return {axis: size for axis, size in axes.items() if size > 1 or axis.startswith("dp")}


def build_mesh(sizes: MeshSizes, device_type: str) -> Mesh:
    """A mesh over all ranks, which must be as many as `sizes` has (config/mesh.py has checked that)."""
    assert sizes.world == dist.get_world_size()
    assert dist.group.WORLD is not None
    copies = sizes.dp_replicate > 1
    name = _shard_axis(sizes.cp)
    root = _root(device_type, name, (sizes.dp_replicate, sizes.shards, sizes.tp), copies=copies)
    if sizes.tp == 1:
        return Mesh(sizes.dp_replicate, sizes.dp_shard, root, root, sizes.cp, None, dist.group.WORLD)
    dp = root["dp_replicate", name] if copies else root[name]
    loss = dp._flatten("loss") if copies else dp

    def neighbours(size: int) -> GroupCommunicator:
        if size == sizes.tp:
            return GroupCommunicator(root.get_group("tp"))
        shape = (sizes.dp_replicate * sizes.shards, sizes.tp // size, size)
        return GroupCommunicator(
            init_device_mesh(device_type, shape, mesh_dim_names=("loss", "tp", "same")).get_group("same")
        )

    axis = Axis(root.get_local_rank("tp"), sizes.tp, neighbours(sizes.tp), neighbours)
    return Mesh(sizes.dp_replicate, sizes.dp_shard, root, dp, sizes.cp, axis, loss.get_group())


def context_axis(mesh: Mesh, ulysses: int) -> ContextAxis | None:
    """The ranks of cp; None for one. ulysses: how many exchange heads for tokens, a divisor of cp."""
    if mesh.cp_size == 1:
        return None
    ring, data, kind = mesh.cp_size // ulysses, mesh.dp_replicate * mesh.dp_shard, mesh.dp.device_type
    whole = init_device_mesh(kind, (data, mesh.cp_size, mesh.tp_size), mesh_dim_names=("data", "cp", "tp"))
    ranks, place = GroupCommunicator(whole.get_group("cp")), whole.get_local_rank("cp")
    if ulysses == 1:
        return ContextAxis(place, ring, ulysses, ranks, ranks, None)
    if ring == 1:
        return ContextAxis(place, ring, ulysses, ranks, None, ranks)
    shape, names = (data, ring, ulysses, mesh.tp_size), ("data", "ring", "ulysses", "tp")
    parts = init_device_mesh(kind, shape, mesh_dim_names=names)
    over_ring, over_ulysses = (GroupCommunicator(parts.get_group(name)) for name in ("ring", "ulysses"))
    return ContextAxis(place, ring, ulysses, ranks, over_ring, over_ulysses)


def _shard_axis(cp: int) -> str:
    return "dp_shard" if cp == 1 else "dp_shard x cp"


def _root(device_type: str, shard_axis: str, shape: tuple[int, int, int], *, copies: bool) -> DeviceMesh:
    """shape: dp_replicate, shards, tp. copies: with an axis dp_replicate, whatever its size. An axis of size 1 would
    cost a group for nothing."""
    sizes = dict(zip(("dp_replicate", shard_axis, "tp"), shape, strict=True))
    kept = {shard_axis, *(["dp_replicate"] if copies else [])}
    named = {axis: size for axis, size in sizes.items() if size > 1 or axis in kept}
    return init_device_mesh(device_type, tuple(named.values()), mesh_dim_names=tuple(named))


def own_part(tensor: Tensor) -> Tensor:
    """The elements of a tensor on this rank: the local shard of a DTensor, or all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor, cut: Cut | None = None) -> Tensor:
    """The full tensor behind a shard, detached; collective for a DTensor. cut: how tp divides it."""
    detached = tensor.detach()
    part = detached.full_tensor() if isinstance(detached, DTensor) else detached
    return part if cut is None else cut.join(part)
