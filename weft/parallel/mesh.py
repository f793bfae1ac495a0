"""The device mesh: one source of truth for which ranks share what."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Mesh:
    """dp: the mesh given to fully_shard, (dp_replicate, dp_shard) or (dp_shard,). Every rank has its own documents."""

    dp_replicate: int
    dp_shard: int
    dp: DeviceMesh

    @property
    def data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        """This rank's place among those that hold different documents."""
        return dist.get_rank()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """All ranks that hold different documents: metrics are summed over it, once."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def sharded_over(self, size: int) -> DeviceMesh:
        """The same ranks, in groups of `size` to shard over (a divisor of dp_shard), with copies over the rest."""
        if size == self.dp_shard:
            return self.dp
        shape = (self.data_ranks // size, size)
        return init_device_mesh(self.dp.device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))

    @property
    def axes(self) -> dict[str, int]:
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}


def build_mesh(dp_replicate: int, dp_shard: int, device_type: str) -> Mesh:
    """A mesh over all ranks, which must be dp_replicate x dp_shard (config/mesh.py has checked that)."""
    assert dp_replicate * dp_shard == dist.get_world_size()
    if dp_replicate == 1:
        dp = init_device_mesh(device_type, (dp_shard,), mesh_dim_names=("dp_shard",))
    else:
        dp = init_device_mesh(device_type, (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    return Mesh(dp_replicate, dp_shard, dp)


def own_part(tensor: Tensor) -> Tensor:
    """The elements of a tensor that this rank holds; of a plain one, all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
