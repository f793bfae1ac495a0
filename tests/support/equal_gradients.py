"""Optimizer steps with gradients that are bitwise equal on every mesh, and what a checkpoint holds after them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.cases import open_engine, world_of
from tests.support.pool import run
from tests.support.resuming import equal, whole_state
from weft.checkpoint.retention import step_folder
from weft.checkpoint.save import Saver
from weft.checkpoint.state import load_state, read_state
from weft.config.schema import CheckpointConfig
from weft.engine.engine import Engine
from weft.engine.optim.optimizer import set_learning_rate
from weft.parallel.shards.boxes import local_box
from weft.parallel.shards.cuts import full_shape


def gradient(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """A gradient whose elements differ in size by orders of magnitude; the same for the same name and step."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


@torch.no_grad()
def give_gradients(engine: Engine, step: int) -> None:
    """Set every trained parameter's gradient to this rank's shard of `gradient`."""
    cuts = engine.divided.cuts
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        full = gradient(name, full_shape(name, parameter, cuts), step)
        part = cuts[name].take(full) if name in cuts else full
        box, local = local_box(parameter)
        values = part[tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))].to(local.dtype).clone()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shape, stride = parameter.shape, parameter.stride()
            parameter.grad = DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)
        else:
            parameter.grad = values


def step_and_save(path: str, mesh: str, sections: dict[str, Any], resumed: str | None, target: str, last: int) -> None:
    """Take steps on a mesh, and save after the last two. resumed: begin before the last step, from this checkpoint."""
    engine = open_engine(path, mesh, **sections)
    assert engine.optimizer is not None
    if resumed is not None:
        load_state(engine, read_state(Path(resumed)))
    with Saver(engine, Path(target), CheckpointConfig(async_=False), {"config": {}}) as saver:
        for step in range(1 if resumed is None else last, last + 1):
            give_gradients(engine, step)
            set_learning_rate(engine.optimizer, 1e-2 / step)
            engine.optimizer.step()
            engine.drop_gradients()
            if step >= last - 1:
                saver.save(step, {"epoch": 1, "updates": 1, "summary": {}})


def same_on_every_mesh(
    path: str, sections: dict[str, Any], meshes: Sequence[str], folder: Path, tolerance: float = 0.0, last: int = 3
) -> dict[str, Any]:
    """Assert that masters and state after `last` steps are bitwise equal on all meshes, and after the last step on each
    from what the mesh before it has written. tolerance: the largest difference; 0: bitwise. Returns what was saved."""
    expected, source = dict[str, Any](), None
    for mesh in meshes:
        for resumed in (None, source) if source is not None else (None,):
            target = folder / f"{mesh} {resumed is not None}"
            target.mkdir()
            run(world_of(mesh), step_and_save, path, mesh, sections, resumed, str(target), last)
            saved = whole_state(target, last)
            expected = expected or saved
            assert saved.keys() == expected.keys()
            differing = [name for name in saved if not _near(saved[name], expected[name], tolerance)]
            assert not differing, (mesh, resumed, differing)
        source = str(step_folder(folder / f"{mesh} False" / "checkpoints", last - 1))
    return expected


def _near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return equal({"": a}, {"": b}) or bool((a.double() - b.double()).abs().max() <= tolerance)
