"""Engine.sleep and wake: memory is given up in earnest, and comes back bit for bit."""

from __future__ import annotations

import gc
import random
import resource
import threading
import time
import weakref
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import whole_state
from weft.checkpoint import snapshot
from weft.checkpoint.save import Saver
from weft.checkpoint.state import find_state_shards
from weft.config.schema import CheckpointConfig
from weft.engine import host
from weft.engine.engine import Engine
from weft.engine.host import HostPool, HostTensor
from weft.engine.losses.base import CrossEntropy
from weft.engine.sleep import PARTS, Part
from weft.parallel.memory import HostNeeds, host_bytes, host_shortage
from weft.parallel.mesh import local_shard
from weft.parallel.shards.boxes import Box, shard_of
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

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
    state = {name: part.local for name, part in find_state_shards(engine).items()}
    frozen = {f"frozen/{n}": local_shard(p) for n, p in engine.module.named_parameters() if not p.requires_grad}
    grads = {f"gradient/{n}": local_shard(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
    return {**state, **frozen, **grads}


def copied(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in local(engine).items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@mock.patch.object(host, "CHUNK", 5120)  # most tensors lie over several
def sleeps_and_steps(path: str, mesh: str, sections: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Sleep with a gradient accumulated, wake, go on; beside an engine that never sleeps."""
    napping, steady = (open_engine(path, mesh, **sections) for _ in range(2))
    for engine in (napping, steady):
        gradient(engine, 0)
        engine.apply(1e-3)
        gradient(engine, 2)
    before, storages = copied(napping), [tensor.untyped_storage() for tensor in local(napping).values()]
    total = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    moved = napping.sleep()
    checks = {
        "all bytes are given up": moved == total == sum(napping.asleep.values()),
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


SLEEPING = [
    *((name, "llama", mesh) for name, mesh in zip(SETTINGS, ("2", "2x2", "3", "1"), strict=True)),
    ("adamw and ema", "qwen3_moe", "pp2xep2"),
]


@pytest.mark.parametrize(("setting", "family", "mesh"), SLEEPING)
def test_after_waking_everything_is_as_it_was(setting: str, family: str, mesh: str) -> None:
    for checks in run(world_of(mesh), sleeps_and_steps, saved_model(family), mesh, SETTINGS[setting]):
        assert all(checks.values()), checks


def errors_while(path: str, parts: tuple[Part, ...]) -> list[str]:
    """What each method says while these parts are asleep, and that a readout needs no optimizer."""
    engine, messages = open_engine(path, "1"), []
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
        lambda: find_state_shards(engine),
        lambda: shard_of(next(engine.module.parameters())),  # as export, sync and the walker do
    ):
        try:
            use()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    engine.wake()
    engine.apply(1e-3)
    return messages


def test_what_needs_a_part_that_is_asleep_says_so() -> None:
    path = saved_model("llama")
    (messages,) = run(1, errors_while, path, PARTS)
    assert messages[1] == "the engine's parameters and optimizer and gradients are asleep: call wake() before this"
    assert all("parameters" in text and "call wake()" in text for text in messages[:-1])
    assert messages[-1] == "Engine.sleep() has freed the elements of this tensor: call wake() first"
    (messages,) = run(1, errors_while, path, ("optimizer", "gradients"))
    assert [bool(text) for text in messages] == [True, True, False, False, False, True, False]


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
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    return sizes[1] - sizes[0], reference() is None


def _resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def test_fifty_cycles_leave_nothing_behind() -> None:
    path = saved_model("llama", vocab_size=20_000, hidden_size=128)  # its largest tensors have 10 MB each
    ((growth, freed),) = run(1, fifty_cycles, path)
    assert growth < 8 and freed, growth


# ---------------------------------------------------------------- the host's memory, which saves have, too


@mock.patch.object(host, "CHUNK", 5120)
def sleeps_while_a_checkpoint_is_written(path: str, folder: str) -> dict[str, bool]:
    """Two engines, the second beside the first; both are saved, and both sleep before the disk has everything."""
    engine = open_engine(path, "2", optimizer={"ema_decay": 0.9})
    critic = Engine(replace(engine.config, seed=3), engine.ranks, shares_with=engine)
    for model in (engine, critic):
        gradient(model, 0)
        model.apply(1e-3)
    pool, write, before = engine.offloader.pool, snapshot.write_export, [copied(engine), copied(critic)]

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return write(*arguments, **options)

    further = {"critic": critic}
    with (
        mock.patch.object(snapshot, "write_export", slow),
        Saver(engine, Path(folder), CheckpointConfig(), {"config": {}}, further_engines=further) as saver,
    ):
        saver.save(1, {})
        saved, began = pool.bytes, time.monotonic()
        asleep = engine.sleep() + critic.sleep()
        waited = time.monotonic() - began
        largest, rounding = max(saved, asleep), 6 * 5120 + 512 * 200  # chunks of each part, tensors in them
        checks = {
            "one pool": critic.offloader.pool is pool,
            "no more than the larger of the two": pool.bytes <= largest + rounding,
            "the writer was waited for": waited > 0.9,
        }
        engine.wake()
        critic.wake()
        saver.finish()
        saver.save(2, {})
        saver.finish()
    needs = [
        HostNeeds.estimate(model.memory, adapters=False, state=True, replicas=1, parts=PARTS)
        for model in (engine, critic)
    ]
    checks["as the opening says"] = abs(host_bytes(needs) - pool.bytes) <= rounding
    checks["nothing is added later"] = pool.bytes <= largest + rounding
    checks["bit for bit"] = all(equal(b, local(e)) for b, e in zip(before, (engine, critic), strict=True))
    for step in (1, 2):
        for prefix, index in (("", 0), ("critic", 1)):
            state = whole_state(Path(folder), step, prefix)
            shards = find_state_shards((engine, critic)[index])
            same = [torch.equal(state[n][p.box.within(Box.from_shape(p.shape))], p.local) for n, p in shards.items()]
            checks[f"step {step}, {prefix or 'policy'} as it was"] = all(same) and len(same) > 50
    return checks


def test_sleep_and_saves_take_turns_in_one_pool(tmp_path: Path) -> None:
    for checks in run(2, sleeps_while_a_checkpoint_is_written, saved_model("llama"), str(tmp_path)):
        assert all(checks.values()), checks


@pytest.mark.parametrize("shape", [(), (7,), (5, 300), (4, 3, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensor_over_several_chunks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.arange(prod(shape)).reshape(shape) % 7).to(dtype)
    with mock.patch.object(host, "CHUNK", 512):
        pool = HostPool(torch.device("cpu"))
        allocation = pool.take([100, tensor.nbytes, 3])
        host_tensor = HostTensor(shape, dtype, allocation.pieces[1])
        host_tensor.fill(tensor)
        assert all(len(piece) <= 512 for piece in host_tensor.pieces)
        assert torch.equal(torch.cat(list(host_tensor.flat())), tensor.reshape(-1))
        draw = random.Random(7)
        for _ in range(20):
            starts = [draw.randrange(n) for n in shape]
            box = tuple(slice(start, draw.randint(start + 1, n)) for start, n in zip(starts, shape, strict=True))
            assert torch.equal(host_tensor[box], tensor[box])
        for _ in range(2):  # once is enough
            pool.give(allocation)
        pool_bytes = pool.bytes
        assert len(pool.take([512] * (pool_bytes // 512)).chunks) == pool_bytes // 512 and pool.bytes == pool_bytes


# ---------------------------------------------------------------- pinned memory, without a device to pin it for


class Pinning:
    """In place of HostPool._allocate: pins `most` chunks, each when `go` is set; notes the threads."""

    def __init__(self, limit: int = 1000) -> None:
        self.most, self.threads, self.go = limit, list[str](), threading.Event()

    def __call__(self) -> Tensor:
        in_main = threading.current_thread() is threading.main_thread()
        assert in_main or self.go.wait(10.0)
        if len(self.threads) == self.most:
            raise RuntimeError("CUDA error: out of memory")
        self.threads.append(threading.current_thread().name)
        return torch.empty(host.CHUNK, dtype=torch.uint8)


def pinning_pool(pinning: Pinning) -> HostPool:
    pool = HostPool(torch.device("cuda"))
    pool._allocate = pinning  # type: ignore[method-assign]
    return pool


def test_pinned_memory_of_the_first_save_is_made_beside_training() -> None:
    with mock.patch.object(host, "CHUNK", 512):
        pinning = Pinning()
        pool = pinning_pool(pinning)
        pool.fill(4 * 512)
        assert pool.bytes == 0  # nobody waits for it
        pool.fill(2 * 512 - 7)  # of another engine that shares the pool
        pinning.go.set()
        if pool._filling is not None:
            pool._filling.join(10.0)
        assert pool.bytes == 6 * 512 and pinning.threads == ["weft pinned memory"] * 6
        pool.give(pool.take([6 * 512]))
        assert pool.bytes == 6 * 512 and len(pinning.threads) == 6


def test_a_save_before_the_memory_is_made_does_not_wait_for_the_thread() -> None:
    with mock.patch.object(host, "CHUNK", 512):
        pinning = Pinning()
        pool = pinning_pool(pinning)
        pool.fill(3 * 512)
        filling = pool._filling
        pool.take([2 * 512])
        assert pinning.threads == ["MainThread"] * 2 and pool.bytes == 2 * 512
        pinning.go.set()
        assert filling is not None
        filling.join(10.0)
        assert pool.bytes == 3 * 512


def test_a_host_that_runs_short_ends_the_thread_and_no_run() -> None:
    with mock.patch.object(host, "CHUNK", 512):
        pinning = Pinning(limit=2)
        pinning.go.set()
        pool = pinning_pool(pinning)
        pool.fill(4 * 512)
        assert pool._filling is not None
        pool._filling.join(10.0)
        assert pool.bytes == 2 * 512
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.take([4 * 512])


def filled_for(path: str) -> tuple[int, int]:
    """(bytes that a Saver has memory made for, bytes that its first copy takes, whole chunks)."""
    engine = open_engine(path, "2")
    gradient(engine, 0)
    engine.apply(1e-3)
    contents = snapshot.EngineWriter(engine, CheckpointConfig(), {})
    copies = contents.copy()
    return engine.offloader.pool._target, sum(tensor.nbytes for tensor in copies.copies.values())


def test_as_much_is_made_as_a_save_takes() -> None:
    for estimated, used in run(2, filled_for, saved_model("llama")):
        assert 0.95 * used <= estimated <= 1.05 * used


def test_a_host_without_room_for_copies_is_told_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 << 30))
    assert host_shortage(8 << 30, 16) == ""
    assert host_shortage(48 << 30, 16) == ", and this machine has 8 GiB free for each of its 8 ranks"
