"""Delta sync: an engine that gets changed elements alone has the trainer's weights to the last bit, or is sent all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import local_rl, pool
from tests.support.cases import open_engine, saved_model, world_of
from tests.support.local_rl import lines_of, rollouts_of
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.inference.base import Synced
from weft.inference.standalone import Standalone
from weft.inference.vllm.receiver import VllmSyncWorker
from weft.inference.weight_sync import delta, protocol
from weft.inference.weight_sync.buckets import BucketTensor, entry_of
from weft.inference.weight_sync.delta import DeltaBase
from weft.inference.weight_sync.sender import EngineTarget, Sender, SyncOptions
from weft.launch.machine import free_port

KEY = "a key"


class Receiver:
    """A standalone engine in a thread of the sending process."""

    def __init__(self, path: str, dtype: torch.dtype, sender: Sender | None, port: int) -> None:
        self.engine = Standalone(path, dtype=dtype)
        ticket = protocol.Ticket("127.0.0.1", port, KEY, "it", 0, 60.0)
        self.ticket = ticket if sender is None else sender.tickets["it"][0]

    @contextmanager
    def receiving(self, version: int) -> Iterator[None]:
        errors: list[BaseException] = []

        def receive() -> None:
            try:
                self.engine.receive(self.ticket, version)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        yield
        thread.join(60)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    def weights(self) -> dict[str, Tensor]:
        assert self.engine._weights is not None
        return {name: tensor.clone() for name, tensor in self.engine._weights.state.items()}

    def spoil(self) -> None:
        """Change weights behind the sender's back."""
        assert self.engine._weights is not None
        next(iter(self.engine._weights.state.values())).view(torch.int16).flatten()[:50] ^= 1

    def miss_a_version(self) -> None:
        """As if the last sync had not reached the engine."""
        self.engine._had = 1


class PatchedWorker(VllmSyncWorker):
    """The worker of vLLM without vLLM: what it would load is kept."""

    rank = 0

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.loads = 0

    def _weft_load(self, tensors: Iterator[tuple[str, Tensor]], verify: bool) -> None:
        self.loaded, self.loads = dict(tensors), self.loads + 1


class VllmReceiver(Receiver):
    """The same with a worker of vLLM, which takes weights between two calls of the server."""

    def __init__(self, path: str, dtype: torch.dtype, sender: Sender, port: int) -> None:
        self.worker, self.ticket, self.had = PatchedWorker(), sender.tickets["it"][0], None
        self.engine = self  # type: ignore[assignment]

    def receive(self, ticket: protocol.Ticket, version: int) -> None:
        loads = self.worker.loads
        answer = self.worker.weft_receive(json.dumps(asdict(ticket)), version, self.had, True, "")
        assert "error" not in answer and self.worker.loads == loads + 1, answer  # no patch that did not fit
        self.had = version

    def weights(self) -> dict[str, Tensor]:
        return self.worker.loaded

    def spoil(self) -> None:
        assert self.worker._weft_sent is not None
        next(iter(self.worker._weft_sent.values())).view(np.int16)[:50] ^= 1

    def miss_a_version(self) -> None:
        self.worker._weft_holds = 1


def adam_steps(engine: Any, generator: torch.Generator, lr: float) -> None:
    """About what one step of Adam does: each weight moves by up to lr."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.add_(lr * (2 * torch.rand(local.shape, generator=generator) - 1))


def follow_deltas(path: str, mesh: str, transport: Any, syncs: int, port: int) -> list[Any]:
    """(synced, bytes that could have been sent as patches) of each; the engine is compared with a full sync's."""
    trainer, dtype = open_engine(path, mesh), torch.bfloat16
    with torch.no_grad():  # of the size of real weights, whose bf16 does not change with each step at this lr
        for parameter in trainer.module.parameters():
            parameter.mul_(0.2)
    options = SyncOptions(transport, 30_000, 7, 60.0, None, dtype, "delta")
    sender = Sender(trainer, [EngineTarget("it")], options, port=port, key=KEY)
    receiver = Receiver(path, dtype, sender, port) if trainer.ranks.is_first else None
    generator, synced = torch.Generator().manual_seed(3), list[Synced]()
    for version in range(1, syncs + 1):
        adam_steps(trainer, generator, 1e-6)
        if receiver is None:
            sender.send(version)
            continue
        with receiver.receiving(version):
            synced.append(sender.send(version))
        if trainer.ranks.world == 1:
            state = {name: t.detach().to(dtype) for name, t in trainer.tensors()}
            has = receiver.weights()
            assert all(torch.equal(value, has[name]) for name, value in state.items() if name in has) and state
    sender.close()
    return synced


@pytest.mark.covers("rollout.sync")
@pytest.mark.parametrize(
    ("family", "mesh", "transport", "syncs"),
    [("qwen3", "1", "shared", 50), ("gpt_oss", "2", "group", 3), ("qwen3_moe", "2xtp2", "shared", 3)],
)
def test_deltas_lead_to_the_weights_of_the_trainer(family: str, mesh: str, transport: str, syncs: int) -> None:
    """50 syncs at lr 1e-6, bit for bit; at most 6 bytes a changed element of bf16. Every 7th sync is verified by the
    checksums of a full one, as is the first."""
    first, *_ = pool.run(world_of(mesh), follow_deltas, saved_model(family), mesh, transport, syncs, free_port())
    assert len(first) == syncs and not any(synced.note for synced in first)
    assert first[0].extra["sync/sent_gb"] * 1e9 == pytest.approx(first[0].bytes)
    for synced in first[1:]:
        sent = synced.extra["sync/sent_gb"] * 1e9
        assert synced.extra["sync/changed"] > 0 and sent <= 6 * synced.extra["sync/changed"] + 0.5
        assert sent < 0.6 * synced.bytes


def drop_position(patched: np.ndarray) -> np.ndarray:
    width = 6 if patched.size % 6 == 0 else 8
    count = patched.size // width
    positions, values = patched[: 4 * count].reshape(count, 4), patched[4 * count :].reshape(count, width - 4)
    return np.concatenate([np.delete(positions, 0, 0).reshape(-1), np.delete(values, 0, 0).reshape(-1)])


def shift_slots(patched: np.ndarray) -> np.ndarray:
    width = 6 if patched.size % 6 == 0 else 8
    count = patched.size // width
    positions = patched[: 4 * count].view(np.int32)
    return np.concatenate([np.roll(positions, 1).view(np.uint8), patched[4 * count :]])


def follow_planted(path: str, plant: str, kind: type[Receiver], port: int) -> list[Any]:
    """(note, share of the bytes that was sent, whether the engine is right) of four syncs; the third has the plant."""
    trainer, dtype = open_engine(path, "1"), torch.bfloat16
    options = SyncOptions("shared", 30_000, 0, 60.0, None, dtype, "delta")
    sender = Sender(trainer, [EngineTarget("it")], options, port=port, key=KEY)
    receiver = kind(path, dtype, sender, port)
    generator, results = torch.Generator().manual_seed(3), list[Any]()
    make = delta._patch
    spoil = {"dropped position": drop_position, "wrong slot": shift_slots}.get(plant)

    def spoiled(*args: Any) -> Any:
        patched = make(*args)
        return patched if patched is None or patched.size < 24 or spoil is None else spoil(patched)

    for version in range(1, 5):
        adam_steps(trainer, generator, 1e-4)
        if plant == "stale base" and version == 3:
            receiver.spoil()
        if plant == "restart" and version == 3:
            receiver = kind(path, dtype, sender, port)
        if plant == "missed version" and version == 3:
            receiver.miss_a_version()
        with patch.object(delta, "_patch", spoiled if version == 3 else make), receiver.receiving(version):
            synced = sender.send(version)
        has = receiver.weights()
        state = {name: tensor.detach().to(dtype) for name, tensor in trainer.tensors()}
        right = bool(has) and all(torch.equal(value, has[name]) for name, value in state.items() if name in has)
        results.append((synced.note, synced.extra["sync/sent_gb"] * 1e9 / synced.bytes, right))
    sender.close()
    return results


@pytest.mark.parametrize("kind", [Receiver, VllmReceiver])
@pytest.mark.parametrize(
    ("plant", "note"),
    [
        ("dropped position", "sync     all tensors of version 3 were sent again: it: "),
        ("wrong slot", "sync     all tensors of version 3 were sent again: it: "),
        ("stale base", "sync     all tensors of version 3 were sent again: it: 1 patched tensors differ from the"),
        ("restart", "sync     all tensors of version 3: it has no version, not 2"),
        ("missed version", "sync     all tensors of version 3: it has version 1, not 2"),
    ],
)
def test_what_does_not_fit_is_sent_in_full_and_said(plant: str, note: str, kind: type[Receiver]) -> None:
    ((first, second, third, fourth),) = pool.run(1, follow_planted, saved_model("qwen3"), plant, kind, free_port())
    assert third[0].startswith(note) and not (first[0] or second[0] or fourth[0])
    assert first[1] == third[1] == pytest.approx(1.0) and second[1] < 1 and fourth[1] < 1
    assert all(right for *_, right in (first, second, third, fourth))


def test_patches_of_wide_and_of_dense_changes() -> None:
    """Elements of every width; a tensor that has changed in most is sent as it is, and one without a change is free."""
    base, generator = DeltaBase(), np.random.default_rng(1)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int64):
        tensor = torch.from_numpy(generator.integers(0, 255, 4096, np.uint8)).view(dtype)
        rows = [BucketTensor(entry_of(f"{dtype}", tensor), 0), BucketTensor(entry_of(f"{dtype} 2", tensor), 4096)]
        memory = np.concatenate([tensor.view(torch.uint8).numpy()] * 2)
        base.begin()
        base.write(rows, memory.copy(), dense=True)
        base.confirm(1)
        changed = memory.copy()
        changed[[0, 17, 4095]] ^= 1
        assert base.begin() == 1
        sent = changed.copy()
        some, none = base.write(rows, sent, dense=False)
        assert (some.changed, none.changed, none.length) == (3, 0, 0)
        assert base.sent == 3 * some.entry.patch_width
        width = protocol.WIDTHS[some.entry.dtype]
        result = protocol.patched(memory[:4096].copy(), sent[some.offset : some.end], width)
        assert result is not None and (result == changed[:4096]).all()
        base.begin()
        dense, _ = base.write(rows, ~changed, dense=False)
        assert dense.changed is None and dense.length == 4096
    outside = np.concatenate([np.array([4096], np.int32).view(np.uint8), np.zeros(1, np.uint8)])
    assert protocol.patched(np.zeros(4096, np.uint8), outside, 1) is None


def refuse(path: str) -> str:
    with pytest.raises(UserError) as error:
        Sender(open_engine(path, "1"), [EngineTarget("it")], SyncOptions("files", sync="delta"))
    return str(error.value)


def test_a_transport_without_memory_of_the_host_is_refused() -> None:
    (text,) = pool.run(1, refuse, saved_model("llama"))
    assert "rollout.sync=delta: weights of it are sent by transport files" in text


def test_a_run_with_deltas_is_the_run_without(tmp_path: Path) -> None:
    """Its samples, metrics and weights, bit for bit."""
    task, words = local_rl.make_task(tmp_path), ["rollout.engine=hf", "cluster.placement=disaggregated"]
    words += ["rl.on_policy=exact", "train.steps=3", "optimizer.lr=1e-5", "rollout.dtype=fp32"]
    for sync in ("full", "delta"):
        local_rl.start(task, tmp_path / sync, *words, f"rollout.sync={sync}")
    full, patched = (lines_of(tmp_path / sync) for sync in ("full", "delta"))
    counts = [(line.pop("sync/changed"), line.pop("sync/sent_gb")) for line in patched]
    assert patched == full and counts[0] == (0, 0) and counts[-1][0] > 0  # the first step has no gradient
    assert rollouts_of(tmp_path / "full") == rollouts_of(tmp_path / "delta")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout.engine=sglang", "rollout.python=/p"],
            "rollout.sync would have no effect: only the engines hf and vllm",
        ),
        (["rollout.engine=hf", "lora.rank=4"], "with lora weft sends only adapters: set rollout.sync=full"),
        (["rollout.engine=hf", "rollout.transport=files"], "rollout.transport=files does not use host memory"),
        (["rollout.engine=hf", "cluster.placement=colocated"], "engines free their weights while trainers train"),
    ],
)
def test_where_there_are_no_deltas(words: list[str], message: str) -> None:
    needed = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]", "rollout.sync=delta"]
    with pytest.raises(UserError, match=message):
        load_config([], [*needed, *words], RlConfig)
