"""rollout.transport=ipc, with files in place of a device's memory: all but CUDA's own part (tests/cuda/test_ipc.py).

What a rank writes is in the file only after it has waited for its device, so that a sync which does not wait sends what
lay there before.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.inference.test_weight_sync import KEY, REQUESTS, VERSIONS, EngineProcess, _change, fresh
from tests.support import pool
from tests.support.cases import open_engine, saved_model, world_of
from weft.checkpoint.export import save_huggingface
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.inference.standalone import Standalone
from weft.inference.weight_sync import protocol
from weft.inference.weight_sync.protocol import SyncError, Ticket
from weft.inference.weight_sync.sender import EngineTarget, Sender, SyncOptions
from weft.inference.weight_sync.transports import SLOTS
from weft.launch.machine import free_port
from weft.rl.batch_pool import StandalonePool
from weft.rl.restarts import RestartBudget
from weft.rl.served_pool import open_engines
from weft.rl.trainer import RankDevices

DTYPE = torch.float32


class FileMemory:
    """In place of protocol.DeviceMemory. device: what this process's is called. shared, opened, waited: how often that
    was done."""

    def __init__(self, device: str, folder: str = "") -> None:
        self.device, self.folder, self.shared, self.opened, self.waited = device, folder, 0, 0, 0
        self._files: dict[int, tuple[str, Tensor]] = {}

    def devices(self, device: Any) -> list[str]:
        return [self.device] if self.device else []

    def allocate(self, size: int, device: Any) -> Tensor:
        memory = torch.zeros(size, dtype=torch.uint8)
        path = tempfile.mkstemp(dir=self.folder)[1]
        self._files[memory.data_ptr()] = path, torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        return memory

    def share(self, memory: Tensor) -> dict[str, Any]:
        self.shared += 1
        return {"device": self.device, "path": self._files[memory.data_ptr()][0], "size": len(memory)}

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        if handle["device"] != self.device:
            raise RuntimeError(f"this process sees other devices ({self.device})")
        self.opened += 1
        return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)

    def wait(self, memory: Tensor) -> None:
        self.waited += 1
        if memory.data_ptr() in self._files:
            self._files[memory.data_ptr()][1].copy_(memory)


@contextmanager
def device(name: str, folder: str = "") -> Iterator[FileMemory]:
    memory = FileMemory(name, folder)
    with patch.object(protocol, "device_memory", memory), patch("weft.inference.standalone.device_memory", memory):
        yield memory


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    started = [EngineProcess(), EngineProcess()]
    yield started
    for process in started:
        process.process.kill()


# ---------------------------------------------------------------- an engine's process


def follow(path: str, tickets: list[Ticket], local_device: str) -> tuple[list[Any], int, int]:
    """What it answers under every version, one ticket each; handles that it opened, and buckets that it waited for."""
    engine, answers = Standalone(path, dtype=DTYPE), []
    with device(local_device) as memory:
        assert engine.devices() == [local_device]
        for version, ticket in zip(VERSIONS, tickets, strict=True):
            engine.receive(ticket, version)
            answers.append(engine.generate(REQUESTS))
    return answers, memory.opened, memory.waited


def follow_again(path: str, ticket: Ticket, local_device: str, version: int) -> tuple[Any, int]:
    """Another engine in the same process."""
    engine = Standalone(path, dtype=DTYPE)
    with device(local_device) as memory:
        engine.receive(ticket, version)
    return engine.generate(REQUESTS), memory.opened


def fail(path: str, ticket: Ticket, local_device: str) -> str:
    protocol._DeviceReceiver.mapped = None
    with device(local_device), pytest.raises(SyncError) as error:
        Standalone(path, dtype=DTYPE).receive(ticket, 1)
    return str(error.value)


# ---------------------------------------------------------------- trainers


def options(**changes: Any) -> SyncOptions:
    return SyncOptions("auto", 30_000, 1, 60.0, dtype=DTYPE, **changes)


def train_and_send(
    path: str, mesh: str, folder: str, ports: list[int], devices: list[str]
) -> tuple[list[int], dict[str, Any], int]:
    """Every version sent and exported: buckets of each sync, the routes, and how often this rank waited."""
    engine = open_engine(path, mesh)
    rank = engine.ranks.rank
    receivers = [EngineTarget(f"engine-{n}", devices=(f"device-{n}", "another")) for n in range(len(ports))]
    buckets = []
    with device(devices[rank], folder) as memory, ExitStack() as stack:
        # Each rank that sends listens on a port of its own, which its engine knows beforehand.
        create = protocol.socket.create_server
        port = ports[rank] if rank < len(ports) else 0
        stack.enter_context(patch("socket.create_server", lambda address, **k: create((address[0], port), **k)))
        sender = Sender(engine, receivers, options(), key=KEY)
        for version in VERSIONS:
            _change(engine, version)
            before = memory.waited
            sender.send(version)
            buckets.append(memory.waited - before)
            save_huggingface(engine, Path(folder) / str(version))
        sender.close()
        waited = memory.waited
        assert memory.shared == (SLOTS if waited else 0)
    return buckets, sender._routes, waited


CASES = {
    "one rank": ("llama", "1", 1),
    "gathered": ("qwen3_moe", "2", 1),
    "an engine beside each rank": ("qwen3", "2", 2),
}


@pytest.mark.parametrize("name", CASES)
def test_engines_have_what_was_sent_and_map_each_bucket_once(
    name: str, processes: list[EngineProcess], tmp_path: Path
) -> None:
    family, mesh, engines = CASES[name]
    path, ports = saved_model(family), [free_port() for _ in range(engines)]
    for number, port in enumerate(ports):
        tickets = [Ticket("127.0.0.1", port, KEY, f"engine-{number}", 0, 60)] * len(VERSIONS)
        processes[number].begin(follow, path, tickets, f"device-{number}")
    devices = [f"device-{rank}" for rank in range(world_of(mesh))]
    by_rank = pool.run(world_of(mesh), train_and_send, path, mesh, str(tmp_path), ports, devices)
    for number in range(engines):
        buckets, routes, waited = by_rank[number]
        assert routes == {f"engine-{n}": ("ipc", n) for n in range(engines)}
        by_version, opened, released = processes[number].result()
        assert opened == SLOTS and released == waited == sum(buckets)
        assert min(buckets) > SLOTS  # slots are used again
        for version, answers in zip(VERSIONS, by_version, strict=True):
            processes[number].begin(fresh, tmp_path / str(version), DTYPE, version)
            assert answers == processes[number].result()
    assert all(waited == 0 for _, _, waited in by_rank[engines:])


def send_twice(path: str, folder: str, port: int) -> None:
    """To two engines of one process, one after the other; then from another sender."""
    engine = open_engine(path, "1")
    with device("device-0", folder):
        for version in (1, 2):
            sender = Sender(engine, [EngineTarget("it", devices=("device-0",))], options(), port=port, key=KEY)
            sender.send(version)
            if version == 1:
                sender.send(version)
            sender.close()


def test_mappings_serve_until_another_sender_comes(processes: list[EngineProcess], tmp_path: Path) -> None:
    path, ticket, opened = saved_model("llama"), Ticket("127.0.0.1", free_port(), KEY, "it", 0, 60), []
    for version in (1, 1, 2):
        processes[0].begin(follow_again, path, ticket, "device-0", version)
        if not opened:
            trainer = EngineProcess()
            trainer.begin(alone, path, str(tmp_path), ticket.port)
        opened.append(processes[0].result()[1])
    trainer.result()
    trainer.process.kill()
    assert opened == [SLOTS, 0, SLOTS]


def alone(path: str, folder: str, port: int) -> None:
    """In a process group of this process."""
    from weft.launch.process import join

    with join("cpu"):
        send_twice(path, folder, port)


# ---------------------------------------------------------------- who sees which device


class AnsweringActors:
    """Stands for a group of actors: answers by method, and what it was asked."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers, self.asked = answers, dict[str, tuple[Any, ...]]()

    def __len__(self) -> int:
        return 2

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        self.asked[method] = args
        return self.answers[method]

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        self.asked[f"{method} {number}"] = args
        return self.answers[method][number] if method in self.answers else None


def opened(tmp_path: Path, *words: str) -> tuple[AnsweringActors, AnsweringActors]:
    """(trainers, engines) after open_engines; four trainer ranks, each with a device."""
    (tmp_path / "data.jsonl").write_text("{}\n")
    required = [
        "model.path=org/name",
        f"data.path={tmp_path}/data.jsonl",
        "rl.reward=[tests.support.reward_functions:seen]",
        "cluster.placement=colocated",
    ]
    config = load_config([], [*required, *words], RlConfig)
    trainers = AnsweringActors(devices=[RankDevices("host", str(n), [f"device-{n}"]) for n in range(4)], open_sync=[{}])
    engines = AnsweringActors(
        host=["here", "here"],
        devices=[("device-0", "device-1"), ("device-1", "device-0")],
        torch_version=["2.13.0", "2.12.1"],
    )
    restarts = RestartBudget(0, 1.0, "rollout.restarts")

    async def open_all() -> None:
        pool = await open_engines(config, trainers, engines, tmp_path, "bf16", restarts)  # type: ignore[arg-type]
        if isinstance(pool, StandalonePool):  # it tells the trainers before the first sync
            await pool._supervisor._open_sync()

    asyncio.run(open_all())
    return trainers, engines


def test_trainers_are_told_what_engines_see(tmp_path: Path) -> None:
    trainers, _ = opened(tmp_path, f"model.path={saved_model('llama')}", "rollout.engine=hf", "rollout.num_engines=2")
    hosts, workers, devices, torches = trainers.asked["open_sync"]
    assert (list(hosts), workers) == (["hf-0", "hf-1"], 1)
    assert torches == {"hf-0": "2.13.0", "hf-1": "2.12.1"}
    assert devices == {"hf-0": ("device-0", "device-1"), "hf-1": ("device-1", "device-0")}


def test_servers_see_the_devices_of_the_ranks_in_whose_place_they_are(tmp_path: Path) -> None:
    trainers, engines = opened(
        tmp_path, f"model.path={saved_model('llama')}", "rollout.engine=vllm", "rollout.num_engines=2", "rollout.tp=2"
    )
    hosts, workers, devices, torches = trainers.asked["open_sync"]
    assert (list(hosts), workers) == (["vllm-0", "vllm-1"], 2)
    assert torches == {"vllm-0": "2.13.0", "vllm-1": "2.12.1"}
    assert devices == {"vllm-0": ("device-0", "device-1"), "vllm-1": ("device-2", "device-3")}
    assert [engines.asked[f"start {n}"][-1] for n in (0, 1)] == ["0,1", "2,3"]


# ---------------------------------------------------------------- where it is not possible


def route(
    path: str, local_device: str, transport: Any, devices: tuple[str, ...], host: str | None, torch: str = ""
) -> Any:
    with device(local_device):
        try:
            receivers = [EngineTarget("it", host, devices=devices, torch=torch)]
            sender = Sender(open_engine(path, "1"), receivers, SyncOptions(transport))
        except UserError as error:
            return str(error)
        sender.close()
        return sender._routes["it"]


@pytest.mark.parametrize(
    ("local_device", "transport", "devices", "host", "expected"),
    [
        ("a", "auto", ("a",), None, ("ipc", 0)),
        ("a", "auto", ("b", "a"), None, ("ipc", 0)),
        ("a", "auto", ("b",), None, ("shared", 0)),
        ("a", "auto", ("a",), "elsewhere", ("group", 0)),
        ("a", "shared", ("a",), None, ("shared", 0)),
        ("", "auto", (), None, ("shared", 0)),
    ],
)
def test_auto_takes_it_where_both_see_the_device(
    local_device: str, transport: str, devices: tuple[str, ...], host: str | None, expected: Any
) -> None:
    assert pool.run(1, route, saved_model("llama"), local_device, transport, devices, host) == [expected]


@pytest.mark.parametrize(
    ("local_device", "devices", "host"), [("", (), None), ("a", ("b",), None), ("a", ("a",), "elsewhere")]
)
def test_elsewhere_it_is_refused(local_device: str, devices: tuple[str, ...], host: str | None) -> None:
    (text,) = pool.run(1, route, saved_model("llama"), local_device, "ipc", devices, host)
    assert text.startswith("rollout.transport=ipc: it sees no CUDA device of a trainer rank")
    assert text.endswith("Set rollout.transport=auto.")


@pytest.mark.parametrize(
    ("trainer", "engine", "opens"),
    [
        ("2.11.0", "2.11.0+cu130", True), ("2.11.0", "2.13.0", True), ("2.12.1", "2.11.0", True),
        ("2.13.0", "2.13.1", True), ("2.13.0", "2.12.1", False), ("2.14.0", "2.13.0", False),
        ("2.13.0", "2.14.0", False), ("2.15.0", "2.15.0+cu132", True), ("2.13.0", "", True),
    ],
)  # fmt: skip
def test_handles_are_opened_by_torches_that_know_their_format(trainer: str, engine: str, opens: bool) -> None:
    assert protocol.opens_handles(engine, trainer) is opens


@pytest.mark.parametrize(("transport", "expected"), [("auto", ("shared", 0)), ("ipc", "Set rollout.transport=shared")])
def test_an_engine_whose_torch_may_not_open_handles_gets_no_ipc(transport: str, expected: Any) -> None:
    (outcome,) = pool.run(1, route, saved_model("llama"), "a", transport, ("a",), None, "9.9.0")
    assert outcome == expected if transport == "auto" else (expected in outcome and "it has torch 9.9.0" in outcome)


def refused_by_hello(path: str, folder: str, ports: list[int]) -> str:
    with device("device-0", folder):
        target = EngineTarget("it", devices=("device-0",))  # of an unknown torch
        sender = Sender(open_engine(path, "1"), [target], options(), port=ports[0], key=KEY)
        with pytest.raises(UserError) as error:
            sender.send(1)
    return str(error.value)


def come_with_another_torch(path: str, ticket: Ticket, local_device: str) -> str:
    with patch.object(torch, "__version__", "9.9.0"):
        return fail(path, ticket, local_device)


def test_a_torch_that_hello_tells_is_refused_before_a_bucket(processes: list[EngineProcess], tmp_path: Path) -> None:
    path, port = saved_model("llama"), free_port()
    ticket = Ticket("127.0.0.1", port, KEY, "it", 0, 60)
    processes[0].begin(come_with_another_torch, path, ticket, "device-0")
    (message,) = pool.run(1, refused_by_hello, path, str(tmp_path), [port])
    assert message == processes[0].result()
    assert "it has torch 9.9.0, which may not open CUDA IPC handles of this trainer's torch" in message


def send_in_vain(path: str, folder: str, port: int) -> str:
    with device("device-0", folder), pytest.raises(SyncError) as error:
        Sender(open_engine(path, "1"), [EngineTarget("it", devices=("device-0",))], options(), port=port, key=KEY).send(
            1
        )
    return str(error.value)


def test_an_engine_that_cannot_map_says_so_at_both_ends(processes: list[EngineProcess], tmp_path: Path) -> None:
    path, port = saved_model("llama"), free_port()
    processes[0].begin(fail, path, Ticket("127.0.0.1", port, KEY, "it", 0, 60), "device-1")
    (trainer_error,) = pool.run(1, send_in_vain, path, str(tmp_path), port)
    engine_error = processes[0].result()
    assert engine_error in trainer_error and "this process sees other devices (device-1)" in engine_error
    assert engine_error.endswith("set rollout.transport=shared")


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("expandable_segments:True", ["expandable_segments:False", "expandable_segments:True"]),
        (
            "max_split_size_mb:64,expandable_segments: True",
            ["max_split_size_mb:64,expandable_segments:False", "max_split_size_mb:64,expandable_segments: True"],
        ),
        ("max_split_size_mb:64", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_buckets_are_allocated_without_segments_that_grow(
    name: str, before: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA IPC does not share these."""
    settings: list[str] = []
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, before)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    assert len(protocol.DeviceMemory().allocate(8, "cpu")) == 8
    assert settings == expected


def test_without_a_device_nothing_is_seen() -> None:
    assert protocol.DeviceMemory().devices("cpu") == []
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            protocol.DeviceMemory().open({"device": "a"})
