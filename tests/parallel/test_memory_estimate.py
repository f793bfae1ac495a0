"""What is said of memory before anything is loaded: counted from shapes, and compared with what is there afterwards."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig

from tests.support.cases import bytes_held, open_engine, saved_model, world_of
from tests.support.pool import run
from weft.config.schema import FsdpConfig, OptimizerConfig
from weft.errors import UserError
from weft.parallel.memory import MemoryNeeds, capacity, check_draws, check_fits, hint, local_ranks
from weft.parallel.shards import load

GIB = 1 << 30


def counted(path: str, mesh: str, sections: dict[str, Any]) -> tuple[MemoryNeeds, MemoryNeeds]:
    """What was foreseen, and what is there."""
    engine = open_engine(path, mesh, **sections)
    return engine.memory, MemoryNeeds(*bytes_held(engine), 0, 0)


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    [
        ("llama", "1", {}),
        ("llama", "2", {"model": {"freeze": ("*.mlp",)}, "optimizer": {"state_dtype": "bf16"}}),
        ("llama", "2", {"optimizer": {"state_dtype": "int8"}}),
        ("llama", "tp2", {"optimizer": {"name": "muon"}}),
        ("qwen3_moe", "2", {"optimizer": {"name": "adafactor"}}),
        ("llama_tied", "2x2", {"optimizer": {"name": "sgd"}}),
        ("qwen3_moe", "4", {"fsdp": {"overrides": {"*.self_attn": "replicate", "*.mlp.gate": 2}}}),
        ("llama", "2", {"lora": {"rank": 4}, "fsdp": {"param_dtype": "bf16"}}),
        ("llama", "2", {"fsdp": {"master_dtype": "bf16"}, "optimizer": {"name": "sgd", "momentum": 0.9}}),
    ],
)
def test_what_is_foreseen_is_what_comes(family: str, mesh: str, sections: dict[str, Any]) -> None:
    ranks = run(world_of(mesh), counted, saved_model(family), mesh, sections)
    (needs,) = {foreseen for foreseen, _ in ranks}  # the same on every rank
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(needs, part) == max(getattr(measured, part) for _, measured in ranks), part


def gathered(path: str) -> tuple[int, int, int]:
    engine = open_engine(path, "2", fsdp={"param_dtype": "bf16"})
    sizes = {name: p.numel() for name, p in engine.module.named_parameters()}
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    return engine.memory.gathered, 2 * (sum(sizes.values()) - 4 * layer + 2 * layer), engine.memory.unsharded


def test_gathered_units_are_the_root_the_head_and_two_layers() -> None:
    path = saved_model("llama", num_hidden_layers=4)
    gathered_bytes, expected, resident = run(2, gathered, path)[0]
    assert gathered_bytes == expected
    assert resident == run(1, counted, path, "1", {})[0][0].resident


# ---------------------------------------------------------------- advice


@dataclass
class FakeDeviceMesh:
    device_type: str


@dataclass
class FakeMesh:
    dp_replicate: int
    dp_shard: int
    dp: FakeDeviceMesh
    cp_size: int = 1

    @property
    def shards(self) -> int:
        return self.dp_shard

    @property
    def loss_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard


def mesh_of(replicate: int, shard: int, kind: str = "cuda") -> Any:
    return FakeMesh(replicate, shard, FakeDeviceMesh(kind))


@pytest.mark.parametrize(
    ("mesh", "fsdp", "optimizer", "keys"),
    [
        (mesh_of(1, 8), {}, {}, ["mesh.dp_shard is 8", "fsdp.cpu_offload=true", "optimizer.state_dtype=int8"]),
        (mesh_of(2, 4), {"cpu_offload": True}, {}, [
            "mesh.dp_replicate=1 mesh.dp_shard=8", "optimizer.state_dtype=int8", "fsdp.master_dtype=bf16"]),
        (mesh_of(1, 2, "cpu"), {}, {"name": "sgd"}, ["mesh.dp_shard is 2", "fsdp.master_dtype=bf16", "model.freeze"]),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_three_keys(mesh: Any, fsdp: Any, optimizer: Any, keys: list[str]) -> None:
    needs = MemoryNeeds(10 * GIB, 10 * GIB, 20 * GIB, 5 * GIB, 80 * GIB)
    check_fits(needs, 40 * GIB, mesh, FsdpConfig(), OptimizerConfig())
    with pytest.raises(UserError) as caught:
        check_fits(needs, 39 * GIB, mesh, FsdpConfig(**fsdp), OptimizerConfig(**optimizer))
    message = str(caught.value)
    assert "weights 10 GiB + gradients 10 GiB + optimizer 20 GiB = 40 GiB a rank" in message
    assert "a rank has 39 GiB" in message
    assert message.count(";") == 2 and all(key in message for key in keys)


def test_a_small_model_is_told_that_sharding_costs_speed() -> None:
    needs = MemoryNeeds(GIB, GIB, 2 * GIB, GIB, 32 * GIB)
    assert "mesh.dp_replicate=8 mesh.dp_shard=1" in (hint(needs, 80 * GIB, mesh_of(1, 8)) or "")
    assert hint(needs, 79 * GIB, mesh_of(1, 8)) is None
    assert hint(needs, 80 * GIB, mesh_of(8, 1)) is None


def refused_unread(path: str) -> None:
    """The refusal comes before any weight is read."""
    with (
        mock.patch("weft.engine.builder.capacity", return_value=1 << 10),
        mock.patch.object(load, "fill_tensors", side_effect=AssertionError("weights were read")),
        pytest.raises(UserError, match="the model does not fit: weights .* a rank has 1 KiB"),
    ):
        open_engine(path, "2")


def test_the_refusal_comes_before_loading() -> None:
    run(2, refused_unread, saved_model("llama"))


def test_the_refusal_comes_before_weights_are_drawn(tmp_path: Path) -> None:
    """Of 70 billion weights nothing is allocated, for no rank."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
    LlamaConfig(**sizes, vocab_size=128256).save_pretrained(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="the model does not fit: weights 297.8 GiB"):
        open_engine(str(tmp_path), "1", model={"init": "random"})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20


def test_each_rank_draws_the_whole_model() -> None:
    check_draws(1 << 20, 4 << 20)
    with pytest.raises(
        UserError, match="model.init=random: each rank draws all weights of the model, 4 MiB, but has 4 MiB"
    ):
        check_draws(1 << 20, (4 << 20) - 1)


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_ranks(16) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_ranks(16) == 8
    assert capacity(torch.device("cpu"), 4) == capacity(torch.device("cpu"), 1) // 4 > 0
