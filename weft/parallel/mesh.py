"""The device mesh: which ranks share parameters, documents, heads or experts.

One root mesh has the axes pp, dp_replicate, dp_shard, cp and tp, outermost first. Every other mesh and group is derived
from it by selecting axes, flattening several axes into one, or splitting an axis (ep is a part of dp_shard x cp). All
meshes but `root` and `world` are within one stage of pp. This file uses the private methods `_flatten`, `_unflatten`
and `_concatenate` of DeviceMesh, as in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from weft.config.mesh import AXES, MeshSizes
from weft.launch.process import world_group
from weft.launch.simulated import is_simulated
from weft.ops.communicator import Communicator, CPAxis, GroupCommunicator
from weft.parallel.shards.cuts import AnyShardSpec

T = TypeVar("T")


@dataclass(frozen=True)
class TPAxis:
    """This rank's position on mesh.tp. ranks: all ranks of the axis. neighbours: size -> the group of `size`
    neighbouring ranks that contains this rank."""

    rank: int
    size: int
    ranks: Communicator
    neighbours: Callable[[int], Communicator]


@dataclass(frozen=True)
class EPAxis:
    """This rank's position on mesh.ep. ranks: all ranks of the axis, which hold different experts. with_tp: the ranks
    of ep and tp together; None without tp."""

    rank: int
    size: int
    ranks: Communicator
    with_tp: Communicator | None


class P2PChannel(NamedTuple):
    """The key of a process group for messages between stages.

    onward: hidden states, else their gradients. later: to a later rank, else to an earlier rank. odd: from ranks with
    an odd index, else from ranks with an even index.

    NCCL runs sends and receives of one group in the order in which a rank posts them. So a rank must not send and
    receive on the same channel: a send would wait for the arrival of every message requested before it.
    """

    onward: bool
    later: bool
    odd: bool

    @classmethod
    def between(cls, onward: bool, source: int, target: int) -> P2PChannel:
        """The channel from rank `source` to its neighbour `target` in the order of stages. The last and the first rank
        are also neighbours."""
        return cls(onward, source < target, source % 2 == 1)


@dataclass(frozen=True)
class PPAxis:
    """This rank's position on mesh.pp. Its ranks have the same documents. group: for collectives. channels: groups of
    the same ranks, for messages between two ranks."""

    rank: int
    size: int
    group: dist.ProcessGroup
    channels: Mapping[P2PChannel, dist.ProcessGroup]

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks. Collective."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, source: int, value: T) -> T:
        """The value of rank `source`, on all ranks. In a simulation, this rank's value. Collective."""
        if is_simulated():
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=source)
        return values[0]


@dataclass(frozen=True)
class Mesh:
    """The meshes of a run.

    root: all ranks, with all axes of more than one rank. world: all ranks on one axis. dp: the mesh for fully_shard,
    (dp_replicate, dp_shard x cp), or (dp_shard x cp) without replicas. loss: all ranks of a stage with different
    documents, or different parts of documents. tp: None for one rank. pp: None for one stage. ep: None for one rank;
    its ranks are neighbours in dp_shard x cp. experts: like dp, for the ranks that hold the same experts."""

    dp_replicate: int
    dp_shard: int
    root: DeviceMesh
    dp: DeviceMesh
    loss: DeviceMesh
    world: DeviceMesh
    cp_size: int
    tp: TPAxis | None
    pp: PPAxis | None = None
    ep: EPAxis | None = None
    experts: DeviceMesh | None = None

    @property
    def shards(self) -> int:
        """Number of ranks over which parameters, gradients and optimizer state are sharded."""
        return self.dp_shard * self.cp_size

    @property
    def shard_axis(self) -> str:
        """The name of the axis of `dp` over which parameters are sharded."""
        names = self.dp.mesh_dim_names
        assert names is not None
        return names[-1]

    @property
    def loss_ranks(self) -> int:
        """Number of ranks with different documents, or parts of documents."""
        return self.dp_replicate * self.shards

    @property
    def loss_rank(self) -> int:
        """This rank's index among `loss_ranks`."""
        return self.loss.get_local_rank()

    @property
    def loss_group(self) -> dist.ProcessGroup:
        return self.loss.get_group()

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks, for communication about processes instead of documents: failures, memory, stops."""
        return self.world.get_group()

    def sharded_over(self, size: int) -> DeviceMesh:
        """A mesh of the ranks of `loss` that shards over groups of `size` ranks and replicates across the groups. size:
        a divisor of `shards`."""
        if size == self.shards:
            return self.dp
        # The names must differ from the root's, because `get_group` returns the root's group for a name of the root.
        return self.loss._unflatten(0, (self.loss_ranks // size, size), ("copies", "shards"))

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Name for messages -> group, for every group of several ranks over which tensors are reduced."""
        names: dict[dist.ProcessGroup, str] = {}
        for mesh in (self.root, self.loss, self.dp, self.experts):
            for axis in () if mesh is None else mesh.mesh_dim_names or ():
                if mesh is not None and mesh[axis].size() > 1:
                    names.setdefault(mesh.get_group(axis), axis)
        return {name: group for group, name in names.items()}

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.root.get_group("tp")

    @property
    def tp_size(self) -> int:
        return 1 if self.tp is None else self.tp.size

    @property
    def ep_size(self) -> int:
        return 1 if self.ep is None else self.ep.size

    @property
    def pp_size(self) -> int:
        return 1 if self.pp is None else self.pp.size

    @property
    def stage_rank(self) -> tuple[int, int]:
        """(this rank's index in its stage, number of ranks of the stage)."""
        size = self.world.size() // self.pp_size
        return self.world.get_local_rank() % size, size

    @property
    def model_parallel_rank(self) -> tuple[int, int]:
        """(this rank's index, number of ranks) among the ranks with the same documents: all stages x all ranks of
        tp."""
        rank = 0 if self.tp is None else self.tp.rank
        if self.pp is not None:
            rank += self.pp.rank * self.tp_size
        return rank, self.pp_size * self.tp_size

    @property
    def sizes(self) -> MeshSizes:
        return MeshSizes(self.dp_replicate, self.dp_shard, self.cp_size, self.tp_size, self.ep_size, self.pp_size)

    @property
    def axes(self) -> dict[str, int]:
        """Axis -> size, for dp_replicate, dp_shard, and every other axis of several ranks."""
        return self.sizes.named


def build_mesh(sizes: MeshSizes, device_type: str) -> Mesh:
    """Build the meshes over all ranks. Their number must be sizes.world, as config/mesh.py has checked. Collective."""
    assert sizes.world == dist.get_world_size(world_group())
    # Axes of one rank are omitted, because each would create a process group. FSDP2 always needs dp_shard.
    named = {axis: size for axis, size in zip(AXES, sizes.all, strict=True) if size > 1 or axis == "dp_shard"}
    root = init_device_mesh(device_type, tuple(named.values()), mesh_dim_names=tuple(named))
    fsdp = _flatten_axes(root, ("dp_shard", "cp"), "dp_shard x cp")
    dp = DeviceMesh._concatenate([root["dp_replicate"], fsdp]) if sizes.dp_replicate > 1 else fsdp
    loss = _flatten_axes(root, ("dp_replicate", "dp_shard", "cp"), "loss")
    world = _flatten_axes(root, AXES, "world")
    pp = _pipeline_axis(root, sizes)
    mesh = Mesh(sizes.dp_replicate, sizes.dp_shard, root, dp, loss, world, sizes.cp, _tp_axis(root), pp)
    return mesh if sizes.ep == 1 else _with_experts(mesh, sizes)


def _flatten_axes(root: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    """The mesh of those `axes` that the root has: a single axis unchanged, several axes flattened under `name`."""
    present = tuple(axis for axis in root.mesh_dim_names or () if axis in axes)
    return root[present] if len(present) == 1 else root[present]._flatten(name)


def _with_experts(mesh: Mesh, sizes: MeshSizes) -> Mesh:
    """Add ep to the mesh. Its ranks are neighbours, so that tokens stay within a host if possible."""
    ep, shards = sizes.ep, sizes.shards // sizes.ep
    split = mesh.loss._unflatten(0, (sizes.dp_replicate, shards, ep), ("expert_copies", "expert_shards", "ep"))
    experts = split["expert_copies", "expert_shards"] if sizes.dp_replicate > 1 else split["expert_shards"]
    with_tp = None
    if sizes.tp > 1:
        size = ep * sizes.tp
        pairs = mesh.world._unflatten(0, (sizes.world // size, size), ("other", "ep x tp"))
        with_tp = GroupCommunicator(pairs.get_group("ep x tp"))
    axis = EPAxis(split.get_local_rank("ep"), ep, GroupCommunicator(split.get_group("ep")), with_tp)
    return replace(mesh, ep=axis, experts=experts)


def _pipeline_axis(root: DeviceMesh, sizes: MeshSizes) -> PPAxis | None:
    if sizes.pp == 1:
        return None
    rank_lists = torch.arange(sizes.world).reshape(sizes.pp, -1).T.tolist()
    pairs = [(a, b) for a in range(sizes.pp) for b in range(sizes.pp) if abs(a - b) in (1, sizes.pp - 1)]
    # dict.fromkeys keeps the order, which must be equal on all ranks, because creating a group is collective.
    channel_keys = dict.fromkeys(P2PChannel.between(onward, *pair) for onward in (True, False) for pair in pairs)
    channels = {channel: dist.new_subgroups_by_enumeration(rank_lists)[0] for channel in channel_keys}
    return PPAxis(root["pp"].get_local_rank(), sizes.pp, root.get_group("pp"), channels)


def stage_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """The group of all ranks of this rank's stage; None for one rank. With several stages this is collective over all
    ranks, because it creates groups."""
    size = mesh.stage_rank[1]
    if size == 1 or mesh.pp is None:
        return None if size == 1 else mesh.world_group
    return mesh.world._unflatten(0, (mesh.pp_size, size), ("stages", "stage")).get_group("stage")


def _tp_axis(root: DeviceMesh) -> TPAxis | None:
    if "tp" not in (root.mesh_dim_names or ()):
        return None
    tp = root["tp"]

    def neighbours(size: int) -> GroupCommunicator:
        if size == tp.size():
            return GroupCommunicator(tp.get_group())
        return GroupCommunicator(tp._unflatten(0, (tp.size() // size, size), ("apart", "same")).get_group("same"))

    return TPAxis(tp.get_local_rank(), tp.size(), neighbours(tp.size()), neighbours)


def cp_axis(mesh: Mesh, ulysses: int) -> CPAxis | None:
    """This rank's position on mesh.cp; None for one rank. ulysses: number of ranks that exchange heads for tokens, a
    divisor of cp. Creates groups, so it is collective over all ranks."""
    if mesh.cp_size == 1:
        return None
    ring, cp = mesh.cp_size // ulysses, mesh.root["cp"]
    ranks, rank = GroupCommunicator(cp.get_group()), cp.get_local_rank()
    if ulysses == 1:
        return CPAxis(rank, ring, ulysses, ranks, ranks, None)
    if ring == 1:
        return CPAxis(rank, ring, ulysses, ranks, None, ranks)
    split = cp._unflatten(0, (ring, ulysses), ("ring", "ulysses"))
    over_ring, over_ulysses = (GroupCommunicator(split.get_group(name)) for name in ("ring", "ulysses"))
    return CPAxis(rank, ring, ulysses, ranks, over_ring, over_ulysses)


def local_shard(tensor: Tensor) -> Tensor:
    """The elements of a tensor on this rank: the local shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor, cut: AnyShardSpec | None = None) -> Tensor:
    """The full tensor of a shard, detached. cut: how tp and ep shard it. Collective for a DTensor, and with `cut`."""
    detached = tensor.detach()
    without_fsdp = detached.full_tensor() if isinstance(detached, DTensor) else detached
    return without_fsdp if cut is None else cut.join(without_fsdp)
