"""Runs of the recipe that are cut short and gone on with, in pooled ranks, and what they leave."""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from tests.support.cases import MESHES, world_of
from tests.support.pool import run
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft.checkpoint.state import tensor_of
from weft.config import schema
from weft.engine.engine import Engine
from weft.launch.options import Device, TrainOptions
from weft.models import hf
from weft.recipes import sft, training
from weft.verify.plants import planted

STEPS = 10
TIMES = ("seconds", "tokens_per_second", "mfu", "memory_gib", "eval/seconds")
Sections = dict[str, dict[str, Any]]
_home = tempfile.TemporaryDirectory(prefix="weft-resume-")


def inputs(family: str = "llama") -> Path:
    """A folder with a model of two layers, its tokenizer, and 20 chats: at 6 to a step, an epoch has 4 steps."""
    return _inputs(family)


@cache
def _inputs(family: str) -> Path:
    path = Path(_home.name) / family
    path.mkdir()
    byte_tokenizer().save_pretrained(path / "model")
    config = tiny_config(family, vocab_size=264)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(path / "model")
    write_jsonl(
        path / "chats.jsonl",
        *(chat(("user", "a" * (i % 5 + 1)), ("assistant", "bcd" * (i % 7 + 1))) for i in range(20)),
    )
    return path


def config_of(home: Path, folder: Path, mesh: str, sections: Sections) -> schema.SftConfig:
    """Ten steps over two and a half epochs, two or more micro-batches in each, a checkpoint after every one."""
    merged: Sections = {
        "model": {"path": str(home / "model")},
        "data": {"path": str(home / "chats.jsonl")},
        "mesh": MESHES[mesh],
        "step": {"documents": 6, "max_tokens_per_device": 64},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 3},
        "train": {"steps": STEPS, "epochs": None, "seed": 3},
        "checkpoint": {"every": 1, "keep": None, "async_": False},
        "run": {"dir": str(folder)},
    }
    for name, keys in sections.items():
        merged[name] = {**merged.get(name, {}), **keys}
    types = {field.name: type_ for field, type_ in zip(_fields(), _types(), strict=True)}
    return schema.SftConfig(**{name: types[name](**keys) for name, keys in merged.items()})


def _fields() -> Any:
    from dataclasses import fields

    return fields(schema.SftConfig)


def _types() -> Any:
    from weft.config.keys import sections

    return sections(schema.SftConfig).values()


class KilledRun(BaseException):
    """Where a process would be gone."""


def process(
    folder: Path,
    mesh: str,
    *,
    resume: bool = False,
    steps: int | None = None,
    sections: Sections | None = None,
    plant: str | None = None,
    family: str = "llama",
) -> list[list[float]]:
    """One process of a run, on every rank of a mesh; what `attempt` returns, by rank."""
    return run(world_of(mesh), attempt, str(inputs(family)), str(folder), mesh, resume, steps, sections or {}, plant)


def attempt(
    home: str, folder: str, mesh: str, resume: bool, steps: int | None, sections: Sections, plant: str | None,
    device: Device = "cpu",
) -> list[float]:  # fmt: skip
    """One process of a run, on one rank: it ends after so many steps of its own, in the next one before the update.

    Returns what the rank drew at random after each step.
    """
    drawn: list[float] = []
    applied = [0]

    def meet(*arguments: Any) -> Any:
        drawn.extend([float(torch.rand(())), random.random(), random.gauss(0.0, 1.0)])
        return original_meet(*arguments)

    def apply(engine: Engine, lr: float) -> Any:
        if applied[0] == steps:
            raise KilledRun
        applied[0] += 1
        return original_apply(engine, lr)

    original_meet, original_apply = training.reduce_after_step, Engine.apply
    config = config_of(Path(home), Path(folder), mesh, sections)
    options = TrainOptions(device=device, resume=folder if resume else None)
    with (
        mock.patch.object(training, "reduce_after_step", meet),
        mock.patch.object(Engine, "apply", apply),
        planted(plant),
        suppress(KilledRun),
    ):
        sft.run(config, options)
    return drawn


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times and memory."""
    text = (folder / "metrics.jsonl").read_text()
    entries = (json.loads(line) for line in text.splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES and not k.startswith("time/")} for line in entries]


def state_of(folder: Path, step: int) -> dict[str, Any]:
    """Every tensor of a checkpoint's trainer state by file and name, and its scalars."""
    state = folder / "checkpoints" / f"step-{step:06d}" / "trainer_state"
    state_tensors: dict[str, Any] = dict(json.loads((state / "state.json").read_text())["scalars"])
    for file in sorted(state.glob("*.safetensors")):
        state_tensors |= {f"{file.name}: {name}": tensor for name, tensor in load_file(file).items()}
    return state_tensors


def _unfilled(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def whole_state(folder: Path, step: int, engine: str = "") -> dict[str, torch.Tensor]:
    """Masters and moments of a checkpoint, put together from the boxes of all ranks; NaN where no rank wrote. engine:
    the folder of one that is saved beside the first."""
    state = folder / "checkpoints" / f"step-{step:06d}" / engine / "trainer_state"
    content = json.loads((state / "state.json").read_text())
    tensors_by_name = {
        name: _unfilled(entry["shape"], getattr(torch, entry["dtype"])) for name, entry in content["tensors"].items()
    }
    written = {name: torch.zeros(entry["shape"], dtype=torch.bool) for name, entry in content["tensors"].items()}
    for file in content["files"]:
        tensors = load_file(state / file["name"])
        for name, (start, size) in file["boxes"].items():
            full, slices = (
                tensors_by_name[tensor_of(name)],
                tuple(slice(a, a + n) for a, n in zip(start, size, strict=True)),
            )
            assert not written[tensor_of(name)][slices].any(), f"{name} is written twice"
            full[slices], written[tensor_of(name)][slices] = tensors[name], True
    return tensors_by_name


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Bit for bit, NaN included (an empty python_gauss)."""
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def _same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8))) if isinstance(a, torch.Tensor) else a == b
