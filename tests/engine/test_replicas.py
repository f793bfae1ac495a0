"""What ranks hold alike is compared at the end of every step, and what differs is named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.replicas import _number
from weft.errors import RanksDisagreeError
from weft.parallel.mesh import local_shard


def documents(lengths: tuple[int, ...] = (60, 9, 30)) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    return [
        Document(torch.randint(3, 120, (n,), generator=generator), torch.ones(n), source=f"chat.jsonl:{i + 1}")
        for i, n in enumerate(lengths)
    ]


def step(engine: Engine, documents: list[Document]) -> None:
    plan, local = engine.plan_step(documents)
    engine.accumulate(plan, local, CrossEntropy())
    engine.apply(1e-3)


def error_of(engine: Engine, batch: list[Document]) -> str:
    with pytest.raises(RanksDisagreeError) as raised:
        step(engine, batch)
    return str(raised.value)


def with_another_weight(path: str, mesh: str, name: str, rank: int, index: int) -> str:
    """The message of the second step, before which one rank changed the lowest bit of one element."""
    engine = open_engine(path, mesh)
    step(engine, documents())
    if dist.get_rank() == rank:
        shard = local_shard(dict(engine.module.named_parameters())[name].detach()).reshape(-1)
        shard.view(torch.int32)[index] ^= 1
    return error_of(engine, documents())


@pytest.mark.parametrize("elements", [1, 65_534, 65_535, 65_536, 65_537, 131_072, 131_073])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_bit_of_a_tensor_of_any_size_is_seen(elements: int, dtype: torch.dtype) -> None:
    small = SimpleNamespace(values=torch.ones(3, dtype=dtype))
    for changed in {0, elements // 2, elements - 1}:
        values = torch.ones(elements, dtype=dtype)
        before = _number([small, SimpleNamespace(values=values)])  # type: ignore[list-item]
        values.view(torch.uint8)[changed * dtype.itemsize] ^= 1
        assert int(_number([small, SimpleNamespace(values=values)])) != int(before)  # type: ignore[list-item]


PARAMETERS = [
    # mesh, parameter, rank, element of its shard, what the message says
    ("tp2", "model.norm.weight", 1, 3, "model.norm.weight[0:64]: "),
    ("2xtp2", "model.layers.1.input_layernorm.weight", 2, 0, "model.layers.1.input_layernorm.weight[32:64]: "),
    ("2x1xtp2", "model.norm.weight", 2, 3, "model.norm.weight[0:64]: "),
    ("2x2", "model.layers.0.mlp.up_proj.weight", 1, 8, "model.layers.0.mlp.up_proj.weight["),
    ("tp4", "model.layers.0.self_attn.k_proj.weight", 3, 5, "model.layers.0.self_attn.k_proj.weight["),
]


@pytest.mark.parametrize(("mesh", "name", "rank", "index", "message"), PARAMETERS, ids=lambda value: str(value))
def test_a_weight_that_differs(mesh: str, name: str, rank: int, index: int, message: str) -> None:
    """Whole on ranks of tp, sharded and whole, of replicas, and a head of keys that two ranks of tp have."""
    messages = run(world_of(mesh), with_another_weight, saved_model("qwen3"), mesh, name, rank, index)
    assert len(set(messages)) == 1
    title, *lines = messages[0].splitlines()
    assert title == "ranks that should hold equal weights have different weights:"
    assert len(lines) == 1 and lines[0].startswith(f"  {message}") and f"on rank {rank}" in lines[0]


def with_another_token(path: str, mesh: str, rank: int, weights: bool) -> str:
    engine = open_engine(path, mesh, step={"max_tokens_per_device": 40})
    batch = documents() if "cp" in mesh else documents((30, 9))
    if dist.get_rank() == rank and weights:
        batch[0].weights[5:7] = torch.tensor([0.5, 1.5])  # the same sum: the plans agree
    elif dist.get_rank() == rank:
        batch[0] = replace(batch[0], tokens=batch[0].tokens.clone())
        batch[0].tokens[5] += 1
    return error_of(engine, batch)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("mesh", "rank"), [("tp2", 1), ("cp2", 0), ("cp2xtp2", 3)])
def test_a_document_that_differs(mesh: str, rank: int, weights: bool) -> None:
    messages = run(world_of(mesh), with_another_token, saved_model("llama"), mesh, rank, weights)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ranks that train the same documents have different tokens or weights:\n")
    assert "chat.jsonl:1" in messages[0]
    assert f"on rank {rank}" in messages[0]
