"""Every mesh and every group is a part of one root mesh."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from weft.config.mesh import MeshSizes
from weft.ops.communicator import GroupCommunicator
from weft.parallel import mesh as parts
from weft.parallel.mesh import build_mesh, cp_axis


def members(communicator: object) -> list[int]:
    assert isinstance(communicator, GroupCommunicator)
    return dist.get_process_group_ranks(communicator.group)


def groups_of(sizes: MeshSizes, ulysses: int) -> dict[str, object]:
    """The ranks of every part, as this one is in it, and how many root meshes there were."""
    with mock.patch.object(parts, "init_device_mesh", wraps=device_mesh.init_device_mesh) as init:
        mesh = build_mesh(sizes, "cpu")
        context = cp_axis(mesh, ulysses)
        halves = mesh.sharded_over(mesh.shards // 2)
    groups: dict[str, object] = {
        "world": dist.get_process_group_ranks(mesh.world_group),
        "loss": (mesh.loss_rank, dist.get_process_group_ranks(mesh.loss_group)),
        "shards": dist.get_process_group_ranks(mesh.dp.get_group(mesh.shard_axis)),
        "halves": dist.get_process_group_ranks(halves.get_group("shards")),
    }
    if mesh.tp is not None:
        groups["tp"] = (mesh.tp.rank, members(mesh.tp.ranks))
    if context is not None:
        of_each = {"cp": context.ranks, "ring": context.ring, "ulysses": context.ulysses}
        groups |= {"place": context.rank} | {name: members(ranks) for name, ranks in of_each.items() if ranks}
    return groups | {
        "roots": init.call_count,
        "own": len({id(m._get_root_mesh()) for m in (mesh.root, mesh.dp, halves)}),
    }


def test_parts_of_cp_and_tp() -> None:
    """Of the last rank: tp is the innermost axis, cp the next; what is sharded goes over dp_shard and cp."""
    actual = run(4, groups_of, MeshSizes(dp_replicate=1, dp_shard=1, cp=2, tp=2), 1)[3]
    assert actual == {
        "world": [0, 1, 2, 3], "loss": (1, [1, 3]), "shards": [1, 3], "halves": [3], "tp": (1, [2, 3]),
        "place": 1, "cp": [1, 3], "ring": [1, 3], "roots": 1, "own": 1,
    }  # fmt: skip


def test_parts_of_cp_alone() -> None:
    actual = run(4, groups_of, MeshSizes(dp_replicate=1, dp_shard=1, cp=4, tp=1), 2)[2]
    assert actual == {
        "world": [0, 1, 2, 3], "loss": (2, [0, 1, 2, 3]), "shards": [0, 1, 2, 3], "halves": [2, 3],
        "place": 2, "cp": [0, 1, 2, 3], "ring": [0, 2], "ulysses": [2, 3], "roots": 1, "own": 1,
    }  # fmt: skip


def test_parts_of_replicas() -> None:
    actual = run(4, groups_of, MeshSizes(dp_replicate=2, dp_shard=1, cp=2, tp=1), 2)[1]
    assert actual == {
        "world": [0, 1, 2, 3], "loss": (1, [0, 1, 2, 3]), "shards": [0, 1], "halves": [1],
        "place": 1, "cp": [0, 1], "ulysses": [0, 1], "roots": 1, "own": 1,
    }  # fmt: skip


def neighbours() -> list[int]:
    mesh = build_mesh(MeshSizes(dp_replicate=1, dp_shard=1, cp=1, tp=4), "cpu")
    assert mesh.tp is not None
    return members(mesh.tp.neighbours(2))


def test_neighbours_on_tp() -> None:
    """Those that hold the same head of keys and values."""
    assert run(4, neighbours) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def expert_groups(sizes: MeshSizes) -> dict[str, object]:
    """The ranks of ep, of those that hold the same experts, and of ep with tp, as this rank is in them."""
    mesh = build_mesh(sizes, "cpu")
    assert mesh.ep is not None and mesh.experts is not None
    groups: dict[str, object] = {"place": mesh.ep.rank, "ep": members(mesh.ep.ranks)}
    groups["same"] = [dist.get_process_group_ranks(group) for group in mesh.experts.get_all_groups()]
    if mesh.ep.with_tp is not None:
        groups["with tp"] = members(mesh.ep.with_tp)
    return groups


def test_ranks_of_ep_are_neighbours_among_the_shards() -> None:
    """Of the last rank. Those that hold the same experts shard them; replicas have them, too."""
    shards = run(4, expert_groups, MeshSizes(dp_replicate=1, dp_shard=2, cp=2, tp=1, ep=2))[3]
    assert shards == {"place": 1, "ep": [2, 3], "same": [[1, 3]]}
    replicas = run(4, expert_groups, MeshSizes(dp_replicate=2, dp_shard=2, ep=2))[3]
    assert replicas == {"place": 1, "ep": [2, 3], "same": [[1, 3], [3]]}
    divided = run(4, expert_groups, MeshSizes(dp_replicate=1, dp_shard=2, cp=1, tp=2, ep=2))[2]
    assert divided == {"place": 1, "ep": [0, 2], "same": [[2]], "with tp": [0, 1, 2, 3]}


# ---------------------------------------------------------------- how long ranks wait for one another


def limits(path: str, mesh: str, sections: dict[str, Any]) -> set[float]:
    """Seconds after which each process group of this rank gives up."""
    open_engine(path, mesh, **sections)
    groups = [group for group in c10d._world.pg_map if group != dist.GroupMember.NON_GROUP_MEMBER]
    assert len(groups) > 1
    backends: list[Any] = [group._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    [
        ("llama", "2xtp2", {}), ("llama", "pp2x2", {}), ("qwen3_moe", "2xep2", {}), ("llama", "cp2xtp2", {}),
        ("llama", "2", {"fsdp": {"overrides": {"model.layers.0": "replicate"}}}),
    ],
)  # fmt: skip
def test_every_group_has_the_limit_of_the_run(family: str, mesh: str, sections: dict[str, Any]) -> None:
    """torch gives groups of a mesh limits of 10 or 30 minutes, whatever train.timeout is."""
    for timeouts in run(world_of(mesh), limits, saved_model(family), mesh, sections, timeout=77.0):
        assert timeouts == {77.0}
