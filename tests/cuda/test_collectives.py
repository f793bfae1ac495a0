"""What weft asks of process groups, of NCCL with one rank: every collective, of every dtype and kind of tensor.

With one rank nothing is sent, but each must be there, take these tensors, and leave the values what they were.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.cuda.cases import BF16, FP32, gradient, kind
from tests.support.cases import open_engine, saved_model
from weft.config.mesh import MeshSizes
from weft.engine.contract import check_contract
from weft.inference.weight_sync.protocol import broadcast, join_group, open_store
from weft.launch.machine import free_port
from weft.launch.process import Ranks
from weft.parallel.mesh import build_mesh
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.walker import walk
from weft.versions import all_gather_single, reduce_scatter_single

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8)


def group_of(device: torch.device) -> dist.ProcessGroup:
    group = build_mesh(MeshSizes(1, 1), device.type).dp.get_group()
    assert group is not None
    return group


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_collective_takes_tensors_of_the_device(device: torch.device, ranks: Ranks, dtype: torch.dtype) -> None:
    group, values = group_of(device), torch.arange(24, device=device).to(dtype)
    gathered, scattered = torch.zeros_like(values), torch.zeros_like(values)
    work = all_gather_single(gathered, values, group=group, async_op=True)
    work.wait()
    reduce_scatter_single(scattered, values.clone(), op=dist.ReduceOp.SUM, group=group)
    copied = values.clone()
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        dist.all_reduce(copied, op=operation, group=group)
    dist.broadcast(copied, group=group, group_src=0)
    for result in (gathered, scattered, copied):
        assert torch.equal(result, values)


def test_host_tensors_and_objects_go_beside_them(device: torch.device, ranks: Ranks) -> None:
    """As a sync agrees on errors, as a run agrees on its config."""
    flags = torch.tensor(3, dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True).wait()
    objects: list[object] = [None]
    dist.all_gather_object(objects, {"a": (1, "b")})
    shared = ["words"]
    dist.broadcast_object_list(shared, src=0)
    dist.barrier()
    assert (int(flags), objects, shared) == (3, [{"a": (1, "b")}], ["words"])


@pytest.mark.parametrize(
    "fsdp",
    [
        {},
        {"reduce": "last"},
        {"reshard_after_forward": False},
        {"prefetch": 2},
        {"wrap": ("embedding", "layers", "LlamaMLP")},
    ],
    ids=str,
)
def test_fsdp_trains_over_it(device: torch.device, ranks: Ranks, fsdp: dict[str, object]) -> None:
    """However units gather and reduce, it is the same step."""
    losses = []
    for setting in ({}, fsdp):
        engine = open_engine(saved_model("llama"), "1", device=kind(device), fsdp={**FP32["fsdp"], **setting})
        for number in range(3):
            loss = gradient(engine, number)
            assert not engine.apply(1e-3).skipped
        check_contract(engine)
        losses.append(loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_the_walker_gathers_what_the_engine_has(device: torch.device, ranks: Ranks) -> None:
    engine = open_engine(saved_model("qwen3_moe"), "1", device=kind(device), **BF16)
    weights = dict(engine.tensors())
    manifest = {mapping.disk: torch.empty(mapping.shape, device="meta") for mapping in engine.built.mappings}
    walked = {
        n: t.clone() for n, t in walk(engine.local_tensors(), engine.built.mappings, manifest, {}, bucket_bytes=30_000)
    }
    for mapping in engine.built.mappings:
        actual = walked[mapping.disk]
        assert actual.device.type == device.type
        weight = weights[mapping.runtime]
        expected = weight[mapping.box.within(Box.from_shape(tuple(weight.shape)))]
        assert torch.equal(mapping.to_runtime(actual, mapping.box), expected), mapping.disk


def test_a_group_of_its_own_beside_torchs(device: torch.device, ranks: Ranks) -> None:
    """As weight sync makes it: rollout.transport=group."""
    store = open_store("127.0.0.1", free_port(), 30.0, serve=True)
    group = join_group(store, "a", 0, 1, "nccl" if device.type == "cuda" else "gloo", 30.0)
    memory = torch.arange(1000, device=device).to(torch.uint8)
    before = memory.clone()
    broadcast(group, memory).wait()
    assert torch.equal(memory, before)
