"""Trainer state goes from mesh to mesh, through the files of each, and stays what it was, bit for bit, and so does the
model that is exported. tests/checkpoint/test_resume.py and tests/parallel/test_pipeline.py go on with training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import Sections, equal, whole_state
from weft.checkpoint.retention import step_folder
from weft.checkpoint.save import Saver
from weft.checkpoint.state import load_state, read_state
from weft.config.schema import CheckpointConfig, ParameterGroup
from weft.engine.losses.base import CrossEntropy
from weft.verify.adapter import randomize_adapters
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

EMA: Sections = {"optimizer": {"ema_decay": 0.9}}
CHAINS: dict[str, tuple[str, Sections, tuple[str, ...]]] = {
    "an average of a tied model": ("llama_tied", EMA, ("pp2x2", "cp2xtp2", "2x1", "pp2v", "pp2xcp2", "1")),
    "experts, moments in bf16": (
        "qwen3_moe", {"optimizer": {"state_dtype": "bf16"}}, ("ep2xtp2", "pp2xep2", "2xep2", "pp2x2x1", "cp2ep2"),
    ),
    "adapters, a head that is trained whole": (
        "qwen3", {"lora": {"rank": 3, "modules_to_save": ("lm_head",)}}, ("2xtp2", "pp2ix2", "cp2", "1"),
    ),
    "an optimizer by import path, offloaded": (
        "gpt2", {"optimizer": {"name": "tests.support.optimizers:Lion"}, "fsdp": {"cpu_offload": True}},
        ("2xtp2", "pp2x2", "1"),
    ),
}  # fmt: skip


def train_or_load(path: str, mesh: str, sections: dict[str, Any], source: str | None, target: str) -> None:
    """Save what this mesh has after two steps, or what it has read from the checkpoint at `source`."""
    engine = open_engine(path, mesh, **sections)
    if source is not None:
        load_state(engine, read_state(Path(source)))
    else:
        randomize_adapters(engine)
        for step in awkward_steps(128)[:2]:
            documents, metas = to_documents(engine, step)
            engine.accumulate(engine.plan(metas), documents, CrossEntropy())
            assert not engine.apply(1e-3).skipped
    weights = "ema" if engine.ema is not None else "last"
    with Saver(engine, Path(target), CheckpointConfig(async_=False, weights=weights), {"config": {}}) as saver:
        saver.save(1, {"epoch": 1, "updates": 1, "summary": {}})


def saved(folder: Path) -> dict[str, Any]:
    """Masters, moments, averages, numbers of the optimizer, and what was exported."""
    checkpoint = step_folder(folder / "checkpoints", 1)
    state = json.loads((checkpoint / "trainer_state/state.json").read_text())
    state_tensors: dict[str, Any] = {**whole_state(folder, 1), "scalars": state["scalars"]}
    for file in checkpoint.glob("*.safetensors"):
        state_tensors |= {f"{file.name}: {name}": tensor for name, tensor in load_file(file).items()}
    return state_tensors


TABLE = ("adapters, a head that is trained whole", "an optimizer by import path, offloaded")


@pytest.mark.parametrize("name", pairs([(name,) for name in CHAINS if name not in TABLE], [(name,) for name in TABLE]))
def test_every_mesh_reads_what_another_wrote(name: str, tmp_path: Path) -> None:
    family, sections, meshes = CHAINS[name]
    path = saved_model(family, num_hidden_layers=4)  # as many as any of them has stages
    source, expected = None, dict[str, Any]()
    for mesh in meshes:
        target = tmp_path / mesh
        target.mkdir()
        run(world_of(mesh), train_or_load, path, mesh, sections, source, str(target))
        actual, source = saved(target), str(step_folder(target / "checkpoints", 1))
        expected = expected or actual
        assert equal(actual, expected), mesh
        assert not any(isinstance(t, torch.Tensor) and t.isnan().any() for t in actual.values())


def test_numbers_of_groups_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Stages have some of the groups each, and other ones first."""
    groups = (ParameterGroup(match=("transformer.h.1",), lr_scale=0.5),)
    sections: Sections = {"optimizer": {"name": "tests.support.optimizers:Summed", "groups": groups}}
    scalars = {}
    for mesh in ("1", "pp2"):
        (tmp_path / mesh).mkdir()
        run(world_of(mesh), train_or_load, saved_model("gpt2"), mesh, sections, None, str(tmp_path / mesh))
        scalars[mesh] = saved(tmp_path / mesh)["scalars"]
    assert scalars["pp2"] == scalars["1"] and len({n["value"] for n in scalars["1"].values()}) == 2
