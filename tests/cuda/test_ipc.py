"""Weights from a trainer to an engine in another process on the same device, through memory that both map (CUDA IPC).

On a CPU the same bodies run through shared memory of the host.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.cuda.cases import busy, kind
from tests.support.cases import open_engine, saved_model
from weft.config.schema import LoraConfig
from weft.engine.engine import Engine
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.embedded import EmbeddedEngine
from weft.inference.standalone import Standalone
from weft.inference.weight_sync import protocol
from weft.inference.weight_sync.protocol import SyncError, Ticket
from weft.inference.weight_sync.sender import EngineTarget, Sender, SyncOptions
from weft.launch.machine import free_port
from weft.launch.process import Ranks
from weft.verify.adapter import randomize_adapters

KEY = "a key"
REQUESTS = [
    Request(f"{i}", p, (7, 8), SamplingParams(8, temperature=i)) for i, p in enumerate([(5, 9, 100), (3, 100, 50, 7)])
]
pytestmark = pytest.mark.timeout(180)

# ---------------------------------------------------------------- the engine's process

_engine: list[Standalone] = []  # of that process


def devices_of(device: str) -> list[str]:
    return protocol.device_memory.devices(device)


def begin(path: str, dtype: torch.dtype, device: str, lora: LoraConfig | None) -> None:
    _engine[:] = [Standalone(path, lora, dtype=dtype, device=device)]


def receive(ticket: Ticket, version: int) -> tuple[dict[str, Tensor], list[list[Completion]]]:
    """The weights in place, and what it answers."""
    (engine,) = _engine
    engine.receive(ticket, version)
    assert engine._weights is not None
    state = {name: tensor.to("cpu", copy=True) for name, tensor in engine._weights.state.items()}
    return state, engine.generate(REQUESTS)


def sleep_and_report() -> int:
    """Bytes that this process keeps of the device while its engine sleeps, but for the workspaces of cuBLAS (32 MiB a
    handle), which torch allocates as it does tensors and never frees."""
    (engine,) = _engine
    engine.sleep()
    if not torch.cuda.is_initialized():
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def new_process() -> ProcessPoolExecutor:
    """With a Python of its own: a fork has no device."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    pool = new_process()
    yield pool
    pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- the trainer's


def options(device: torch.device, dtype: torch.dtype, bucket_bytes: int, timeout: float = 60.0) -> SyncOptions:
    transport: Any = "ipc" if device.type == "cuda" else "shared"
    return SyncOptions(transport, bucket_bytes, 1, timeout, dtype=dtype)


def received_state(pool: ProcessPoolExecutor, sender: Sender, version: int, device: torch.device) -> Any:
    """A sync while the device has other work; what the engine says then. Values are compared by both ends, too."""
    (ticket,) = sender.tickets["it"]
    received: Future[Any] = pool.submit(receive, ticket, version)
    with busy(device):
        sender.send(version)
        with torch.no_grad():  # at once, as the next step would: the engine has all it needs
            for parameter in sender.engine.module.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.02)
    return received.result(120)


def answers(engine: Engine, version: int) -> list[list[Completion]]:
    embedded = EmbeddedEngine(engine)
    embedded.wake(version=version)
    completions = embedded.generate(REQUESTS)
    embedded.sleep()
    return completions


CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], int]] = {
    "dense, slots used many times": ("llama", {}, "fp32", {}, 30_000),
    "tied, bf16": ("qwen3", {}, "bf16", {}, 30_000),
    "experts": ("qwen3_moe", {}, "fp32", {}, 60_000),
    "adapters": ("llama", {}, "fp32", {"rank": 4}, 30_000),
    "offloaded": ("llama", {}, "fp32", {}, 60_000),
    "large": ("llama", {"vocab_size": 50_000, "hidden_size": 512, "intermediate_size": 2048}, "bf16", {}, 64 << 20),
}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_of_another_process_has_every_version(
    name: str, process: ProcessPoolExecutor, device: torch.device, ranks: Ranks
) -> None:
    family, changes, compute, lora, bucket_bytes = CASES[name]
    changes = changes if device.type == "cuda" else {}
    path, dtype = saved_model(family, **changes), torch.float32 if compute == "fp32" else torch.bfloat16
    fsdp = {"param_dtype": compute, "cpu_offload": name == "offloaded"}
    engine = open_engine(path, "1", device=kind(device), fsdp=fsdp, lora=lora)
    randomize_adapters(engine)
    process.submit(begin, path, dtype, device.type, LoraConfig(**lora) if lora else None).result(120)
    devices = process.submit(devices_of, device.type).result(60)
    sender = Sender(engine, [EngineTarget("it", devices=devices)], options(device, dtype, bucket_bytes))
    assert sender._routes["it"][0] == ("ipc" if device.type == "cuda" else "shared")
    for version in (1, 2, 3):
        before = {name: tensor.clone().cpu() for name, tensor in engine.tensors()}
        expected = answers(engine, version)
        state, answered = received_state(process, sender, version, device)
        if not lora:
            assert all(torch.equal(state[name], before[name].to(state[name].dtype)) for name in state)
        assert [[completion.tokens for completion in group] for group in answered] == [
            [completion.tokens for completion in group] for group in expected
        ]
    sender.close()


def test_auto_takes_it(process: ProcessPoolExecutor, cuda: torch.device, ranks: Ranks) -> None:
    devices = process.submit(devices_of, "cuda").result(60)
    assert devices and devices == protocol.device_memory.devices(cuda)
    sender = Sender(
        open_engine(saved_model("llama"), "1", device="cuda"), [EngineTarget("it", devices=devices)], SyncOptions()
    )
    assert sender._routes["it"] == ("ipc", 0)
    sender.close()


def test_an_engine_that_is_killed_and_one_in_its_place(device: torch.device, ranks: Ranks) -> None:
    """The memory that was mapped by a process that is gone serves the next one."""
    path, port = saved_model("llama"), free_port()
    engine = open_engine(path, "1", device=kind(device), fsdp={"param_dtype": "fp32"})
    first, second = new_process(), new_process()
    devices = first.submit(devices_of, device.type).result(100)
    pid = first.submit(os.getpid).result(60)
    sync_options = options(device, torch.float32, 30_000, timeout=30.0)
    sender = Sender(engine, [EngineTarget("it", devices=devices)], sync_options, port=port, key=KEY)
    first.submit(begin, path, torch.float32, device.type, None).result(60)
    received_state(first, sender, 1, device)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BrokenProcessPool):
        first.submit(os.getpid).result(60)
    second.submit(begin, path, torch.float32, device.type, None).result(100)
    before = {name: tensor.clone().cpu() for name, tensor in engine.tensors()}
    state, _ = received_state(second, sender, 2, device)
    assert all(torch.equal(state[name], before[name]) for name in state)
    sender.close()
    for pool in (first, second):
        pool.shutdown(cancel_futures=True)


def in_vain(path: str, ticket: Ticket) -> str:
    """What an engine says that the device does not let map."""
    protocol._DeviceReceiver.mapped = None
    with (
        patch.object(protocol.device_memory, "open", side_effect=RuntimeError("none here")),
        pytest.raises(SyncError) as error,
    ):
        Standalone(path, dtype=torch.float32, device="cuda").receive(ticket, 1)
    return str(error.value)


def test_one_that_cannot_map_is_named_at_both_ends(
    process: ProcessPoolExecutor, cuda: torch.device, ranks: Ranks
) -> None:
    path = saved_model("llama")
    devices = process.submit(devices_of, "cuda").result(100)
    engine = open_engine(path, "1", device="cuda")
    sender = Sender(engine, [EngineTarget("it", devices=devices)], options(cuda, torch.float32, 30_000, timeout=30.0))
    attempt = process.submit(in_vain, path, sender.tickets["it"][0])
    with pytest.raises(SyncError, match="none here.* set rollout.transport=shared"):
        sender.send(1)
    assert "none here" in attempt.result(60)
    sender.close()


def test_asleep_the_engine_keeps_no_weights_of_the_device(
    process: ProcessPoolExecutor, device: torch.device, ranks: Ranks
) -> None:
    """Colocated engines sleep while the trainer trains; what it has mapped is the trainer's."""
    family, changes, *_ = CASES["large"]
    path = saved_model(family, **(changes if device.type == "cuda" else {}))
    engine = open_engine(path, "1", device=kind(device), fsdp={"param_dtype": "bf16"})
    process.submit(begin, path, torch.bfloat16, device.type, None).result(60)
    devices = process.submit(devices_of, device.type).result(60)
    sender = Sender(engine, [EngineTarget("it", devices=devices)], options(device, torch.bfloat16, 64 << 20))
    received_state(process, sender, 1, device)
    size = sum(parameter.numel() * 2 for parameter in engine.module.parameters())
    assert process.submit(sleep_and_report).result(60) < 0.2 * size
    received_state(process, sender, 2, device)  # awake again
    sender.close()
