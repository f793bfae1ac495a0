"""Weights that tensor parallelism divides come whole out of the walker on every rank, whatever is cut. What engines
make of them is in tests/inference/test_embedded.py and tests/inference/test_weight_sync.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import Sections, process
from weft.checkpoint import export
from weft.parallel.shards.cuts import ShardSpec
from weft.parallel.shards.safetensors_files import TensorFile
from weft.parallel.shards.walker import TensorPlacement, walk

# Heads that are repeated (qwen3, gpt_oss), fused projections (phi3, gpt2, falcon), widths that do not divide evenly
# (all of those on 4), experts, MLA, norms over all heads; mixers that carry state, layers that share a block (zamba2),
# buffers that files have (minimax); experts dealt to ranks (ep), with tp inside.
CASES = [
    ("llama_tied", "tp2"), ("gpt_oss", "tp4"), ("phi3_longrope", "tp4"), ("gpt2", "2xtp2"), ("falcon", "tp2"),
    ("deepseek_v3", "2xtp2"), ("gpt_oss", "ep2xtp2"), ("qwen3_moe", "3ep3"), ("llama4_text", "ep2"),
    ("llama_tied", "pp2x2x1"),
    ("kimi_linear", "tp2"), ("zamba2", "tp2"), ("minimax", "tp2"),
]  # fmt: skip
TABLE = [
    ("qwen3", "2xtp2"), ("qwen3_moe", "2xtp2"), ("gpt_oss", "pp2xep2"), ("gpt2", "pp2xtp2"),
    ("qwen3", "tp4"), ("olmo2", "tp4"), ("qwen3_moe", "4ep2"), ("qwen3", "pp2x2"), ("deepseek_v3", "pp2"),
    ("nemotron_h", "2xtp2"),
]  # fmt: skip


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with TensorFile.open(path) as file:
            tensors |= {name: file.read(name).clone() for name in file.entries}
    return tensors


def wrong_tensors(path: str, mesh: str, **sections: dict[str, Any]) -> list[str]:
    """Names of what the walker gives otherwise than the files have it, times 1.5; in small buckets and in one."""
    engine = open_engine(path, mesh, **sections)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.5)
    stored, manifest, wrong = tensors_of(Path(path)), export.manifest_of(engine), list[str]()
    for bucket in (2_000, 40_000, 10**9):
        stream = engine.walk(engine.built.mappings, manifest, bucket_bytes=bucket)
        walked = {name: tensor.clone() for name, tensor in stream}
        wrong += [name for name, tensor in walked.items() if not torch.equal(tensor, _times(stored[name], tensor))]
    return wrong


def _times(stored: Tensor, walked: Tensor) -> Tensor:
    """Buffers (routers' biases) were not multiplied."""
    return stored if torch.equal(stored, walked) else stored * 1.5


@pytest.mark.parametrize(("family", "mesh"), pairs(CASES, TABLE))
def test_what_is_divided_is_walked_whole(family: str, mesh: str) -> None:
    assert run(world_of(mesh), wrong_tensors, saved_model(family), mesh) == [[]] * world_of(mesh)


def overridden(path: str) -> list[str]:
    return wrong_tensors(path, "2xtp2", fsdp={"overrides": {"*.self_attn": "replicate"}, "cpu_offload": True})


def test_what_is_divided_and_replicated_is_walked_whole() -> None:
    assert run(4, overridden, saved_model("qwen3")) == [[]] * 4


# ---------------------------------------------------------------- answers of a run


ANSWERING: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "whole": ({}, ("2xtp2", "pp2x2")),
    "adapters": ({"rank": 2, "targets": ("all-linear", "lm_head")}, ("2xtp2", "tp2")),
    "adapters in layers": ({"rank": 2}, ("pp2xtp2",)),
}


@pytest.mark.parametrize("name", ANSWERING)
def test_prompts_are_answered_as_by_one_process(name: str, tmp_path: Path) -> None:
    """Dealt to all ranks: those of a tp group, or of other stages, answer different ones."""
    lora, meshes = ANSWERING[name]
    eval_section = {"prompts": tuple("abcdefg"), "max_new_tokens": 6, "every": 2}
    sections: Sections = {"eval": eval_section, "train": {"steps": 4, "epochs": None, "seed": 3}, "lora": lora}
    for mesh in ("1", *meshes):
        process(tmp_path / mesh, mesh, sections=sections)
    expected, *answers = [(tmp_path / mesh / "samples.jsonl").read_text() for mesh in ("1", *meshes)]
    assert expected.count("prompt") == 2 * len("abcdefg")
    assert answers == [expected] * len(meshes)


# ---------------------------------------------------------------- bugs, planted


def all_send(self: ShardSpec, source: Any) -> Any:
    return [(box, part, 1) for box, part, _ in BOXES(self, source)]


def of_another(self: ShardSpec, source: Any) -> Any:
    return BOXES(replace(self, rank=self.size - 1 - self.rank), source)


BOXES = ShardSpec.boxes
PLANTS = {
    "repeated heads are counted twice": ("qwen3", "tp4", all_send),
    "the part of another rank": ("phi3_longrope", "tp4", of_another),
}


def with_a_bug(path: str, mesh: str, name: str) -> str:
    """What is said, or which tensors are wrong."""
    engine = open_engine(path, mesh)
    manifest = export.manifest_of(engine)
    with mock.patch.object(ShardSpec, "boxes", PLANTS[name][2]):
        try:
            stream = walk(engine.local_tensors(), engine.built.mappings, manifest, engine.divided.cuts)
            walked = {tensor_name: tensor.clone() for tensor_name, tensor in stream}
        except RuntimeError as error:
            return str(error)
    stored = tensors_of(Path(path))
    return ", ".join(differing for differing, tensor in walked.items() if not torch.equal(tensor, stored[differing]))


@pytest.mark.parametrize("name", PLANTS)
def test_a_bug_is_seen(name: str) -> None:
    family, mesh, _ = PLANTS[name]
    assert all(run(world_of(mesh), with_a_bug, saved_model(family), mesh, name))


def placed_as_nobody_knows() -> None:
    """torch has placements for what is sharded that are no Shard; memory that nothing fills would be handed out."""
    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), (Partial(),))
    with pytest.raises(RuntimeError, match="w has the placements .*, which weft cannot gather"):
        TensorPlacement.from_tensor("w", tensor, {})


def test_a_placement_that_nobody_knows_is_an_error() -> None:
    run(2, placed_as_nobody_knows)


def lacking(path: str) -> str:
    """A rank's share is forgotten."""
    engine = open_engine(path, "2")
    manifest, shares = export.manifest_of(engine), TensorPlacement.shares

    def forget(self: TensorPlacement, part: Any, coordinates: Any) -> Any:
        return [] if coordinates == (0, 1) else shares(self, part, coordinates)

    with mock.patch.object(TensorPlacement, "shares", forget), pytest.raises(RuntimeError) as caught:
        list(walk(engine.local_tensors(), engine.built.mappings, manifest, {}))
    return str(caught.value)


def test_what_nobody_sends_is_an_error() -> None:
    first, second = run(2, lacking, saved_model("llama"))
    assert first == second and "the ranks hold" in first
