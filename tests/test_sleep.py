"""Engine.sleep and wake: memory is given up in earnest, and comes back bit for bit."""

from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.cases import open_engine, saved_model, world_of
from tests.pool import run
from weft.checkpoint.boxes import shard_of
from weft.checkpoint.state import find_parts
from weft.engine import sleep
from weft.engine.engine import Engine
from weft.engine.sleep import PARTS, Part
from weft.objectives.cross_entropy import CrossEntropy
from weft.parallel.mesh import own_part
from weft.verification.documents import awkward_steps
from weft.verification.observed import to_documents

STEPS = awkward_steps(128)
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw and ema": {"optimizer": {"ema_decay": 0.9}},
    "lora": {"lora": {"rank": 4}},
    "uneven shards, kept gathered": {"fsdp": {"reshard_after_forward": False}},
    "by import path": {"optimizer": {"name": "torch.optim.Adagrad", "weight_decay": 0.0}},
}  # fmt: skip


def gradient(engine: Engine, number: int) -> None:
    documents, metas = to_documents(engine, STEPS[number])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())


def local(engine: Engine) -> dict[str, Tensor]:
    """All that this rank keeps, as it is kept: weights, state, average, gradients."""
    found = {name: part.local for name, part in find_parts(engine).items()}
    frozen = {f"frozen/{n}": own_part(p) for n, p in engine.module.named_parameters() if not p.requires_grad}
    grads = {f"gradient/{n}": own_part(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
    return {**found, **frozen, **grads}


def copied(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in local(engine).items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@mock.patch.object(sleep, "CHUNK", 5120)  # most tensors lie over several
def sleeps_and_steps(path: str, mesh: str, sections: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Sleep with a gradient accumulated, wake, go on; beside an engine that never sleeps."""
    napping, steady = (open_engine(path, mesh, **sections) for _ in range(2))
    for engine in (napping, steady):
        gradient(engine, 0)
        engine.apply(1e-3)
        gradient(engine, 2)
    before, storages = copied(napping), [tensor.untyped_storage() for tensor in local(napping).values()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    moved = napping.sleep()
    checks = {
        "all bytes are given up": moved == held == sum(napping.asleep.values()),
        "storages are empty": not any(storage.nbytes() for storage in storages),
        "nothing moves twice": napping.sleep() == 0 and napping.asleep.keys() == set(PARTS),
        "all come back": napping.wake() == moved and not napping.asleep and napping.wake() == 0,
        "bit for bit": equal(before, local(napping)),
    }
    for engine in (napping, steady):
        engine.apply(1e-3)
        gradient(engine, 1)
        engine.apply(1e-3)
    return {**checks, "steps are those without sleep": equal(local(napping), local(steady))}


@pytest.mark.parametrize(("setting", "mesh"), [*zip(SETTINGS, ("2", "2x2", "3", "1"), strict=True)])
def test_after_waking_everything_is_as_it_was(setting: str, mesh: str) -> None:
    for checks in run(world_of(mesh), sleeps_and_steps, saved_model("llama"), mesh, SETTINGS[setting]):
        assert all(checks.values()), checks


def errors_while(path: str, parts: tuple[Part, ...]) -> list[str]:
    """What each method says while these parts are asleep, and that a readout needs no optimizer."""
    engine, said = open_engine(path, "1"), []
    documents, metas = to_documents(engine, STEPS[2])
    plan = engine.plan(metas)
    gradient(engine, 1)
    engine.sleep(*parts)
    for use in (
        lambda: engine.accumulate(plan, documents, CrossEntropy()),
        lambda: engine.apply(1e-3),
        lambda: engine.readout(plan, documents),
        lambda: engine.evaluate(plan, documents, CrossEntropy()),
        lambda: next(engine.tensors()),
        lambda: find_parts(engine),
        lambda: shard_of(next(engine.module.parameters())),  # as export, sync and the walker do
    ):
        try:
            use()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    engine.wake()
    engine.apply(1e-3)
    return said


def test_what_needs_a_part_that_is_asleep_says_so() -> None:
    path = saved_model("llama")
    (said,) = run(1, errors_while, path, PARTS)
    assert said[1] == "the engine's parameters and optimizer and gradients are asleep: call wake() before this"
    assert all("parameters" in text and "call wake()" in text for text in said[:-1])
    assert said[-1] == "the elements of this tensor are asleep (Engine.sleep): call wake() before this"
    (said,) = run(1, errors_while, path, ("optimizer", "gradients"))
    assert [bool(text) for text in said] == [True, True, False, False, False, True, False]


def fifty_cycles(path: str) -> tuple[float, bool]:
    """(growth in MiB of the process over forty cycles, whether an engine that slept can be forgotten)."""
    engine = open_engine(path, "1", optimizer={"ema_decay": 0.9})
    gradient(engine, 1)
    engine.apply(1e-3)
    sizes = []
    for cycle in range(50):
        engine.sleep()
        engine.wake()
        if cycle in (9, 49):
            sizes.append(_resident())
    engine.sleep()
    seen = weakref.ref(engine)
    del engine
    gc.collect()
    return sizes[1] - sizes[0], seen() is None


def _resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def test_fifty_cycles_leave_nothing_behind() -> None:
    path = saved_model("llama", vocab_size=20_000, hidden_size=128)  # its largest tensors have 10 MB each
    ((growth, gone),) = run(1, fifty_cycles, path)
    assert growth < 8 and gone, growth
