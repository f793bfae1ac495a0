"""Weights reach an engine in another process whole and as they are, or the sync says which tensor did not."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.support import pool
from tests.support.cases import open_engine, pairs, saved_model, world_of
from weft.checkpoint.export import save_adapter, save_huggingface
from weft.config.schema import LoraConfig
from weft.errors import UserError
from weft.inference import standalone
from weft.inference.base import Completion, Request, SamplingParams, Synced
from weft.inference.generate import Generator
from weft.inference.standalone import LoadedWeights, Standalone
from weft.inference.weight_sync import buckets as contents
from weft.inference.weight_sync import protocol, transports
from weft.inference.weight_sync import sender as sending
from weft.inference.weight_sync import server as sending_server
from weft.inference.weight_sync.protocol import SyncError, Ticket
from weft.inference.weight_sync.sender import EngineTarget, Sender, SyncOptions
from weft.inference.weight_sync.server import SyncServer
from weft.inference.weight_sync.transports import BroadcastGroup, SharedBuckets
from weft.launch.machine import free_port
from weft.launch.options import MergeOptions
from weft.models.lora import samples_separate
from weft.parallel.shards import walker
from weft.recipes import merge
from weft.verify.adapter import randomize_adapters

PROMPTS = [(5, 9, 100), (3, 100, 50, 7, 11, 12, 13, 14)]
KEY, VERSIONS = "a key", (1, 2, 3)

# ---------------------------------------------------------------- an engine's process


class EngineProcess:
    """A real process that takes weights; it calls what it is given."""

    def __init__(self) -> None:
        pool._start()  # so that its fork server has imported torch
        self.pipe, child_end = pool._context.Pipe()
        self.process = pool._context.Process(target=_serve, args=(child_end,), daemon=True)
        self.process.start()
        self.number = 0

    def begin(self, function: Any, *args: Any) -> None:
        self.number += 1
        self.pipe.send((self.number, function, args))

    def result(self, timeout: float = 100.0) -> Any:
        number, end = 0, time.monotonic() + timeout
        while number < self.number:  # what a test that failed has begun is passed over
            assert self.pipe.poll(max(0.0, end - time.monotonic())), "the engine's process does not answer"
            number, value = self.pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        number, function, args = pipe.recv()
        try:
            pipe.send((number, function(*args)))
        except Exception as error:
            pipe.send((number, error))


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    process = EngineProcess()
    yield process
    process.process.kill()


@pytest.fixture
def port() -> int:
    return free_port()


# ---------------------------------------------------------------- what an engine says

REQUESTS = [Request(f"{i}", tokens, (7, 8), SamplingParams(6, temperature=i)) for i, tokens in enumerate(PROMPTS)]


def follow(path: str, lora: LoraConfig | None, dtype: torch.dtype, port: int) -> list[list[list[Completion]]]:
    """What a standalone engine answers under every version; the first request is greedy."""
    engine, ticket, answers = Standalone(path, lora, dtype=dtype), Ticket("127.0.0.1", port, KEY, "it", 0, 60), []
    for version in VERSIONS:
        engine.receive(ticket, version)
        answers.append(engine.generate(REQUESTS))
    return answers


def fresh(path: Path, dtype: torch.dtype, version: int) -> list[list[Completion]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # a map of a file is aligned otherwise, which moves the last bits
    return Generator(model, version).generate(REQUESTS)


# ---------------------------------------------------------------- trainers


class SenderOverHosts(Sender):
    """As on several hosts: no memory that all ranks could write to."""

    def _on_one_host(self, transport: sending.Transport) -> bool:
        return False


def train_and_send(
    path: str, mesh: str, lora: dict[str, Any], options: SyncOptions, port: int, folder: str, kind: str
) -> list[tuple[Synced, int]]:
    """Weights that change before every version, sent and exported: what each sync says, and its collectives."""
    engine = open_engine(path, mesh, lora=lora)
    sender = (SenderOverHosts if kind == "gathered" else Sender)(
        engine, [EngineTarget("it")], options, port=port, key=KEY
    )
    results = []
    for version in VERSIONS:
        _change(engine, version)
        with counted() as calls:
            synced = sender.send(version)
        results.append((synced, len(calls)))
        largest = max(content.largest for content in sender._contents)
        memory = [memories.memory(0) for memories in sender._memories.values()]
        assert all(bucket is None or len(bucket) <= max(7_500, largest + 64) for bucket in memory)
        target = Path(folder) / str(version)
        save_adapter(engine, target) if lora else save_huggingface(engine, target)
    paths = [path for slots in sender._memories.values() if isinstance(slots, SharedBuckets) for path in slots.paths]
    sender.close()
    assert not (engine.ranks.is_first and any(path.exists() for path in paths))
    return results


@contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives of the body, which go through these three."""
    calls, names = list[str](), ((dist, "all_reduce"), (dist, "all_gather_object"), (walker, "all_gather_single"))

    def count(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    with ExitStack() as stack:
        for owner, name in names:
            stack.enter_context(patch.object(owner, name, count(name, getattr(owner, name))))
        yield calls


def _change(engine: Any, version: int) -> None:
    if engine.lora is not None:
        randomize_adapters(engine)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.05 * version)


CASES: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "dense": ("llama", "1", {}, "shared", ""),
    "tied": ("qwen3", "2", {}, "shared", ""),
    "experts": ("qwen3_moe", "2", {}, "group", ""),
    "experts, gathered": ("gpt_oss", "2", {}, "shared", "gathered"),
    "gathered, group": ("qwen3_moe", "2", {}, "group", "gathered"),
    "files": ("qwen3", "2", {}, "files", ""),
    "tp, fused and repeated heads": ("phi3_longrope", "tp4", {}, "shared", ""),
    "tp, gathered": ("qwen3_moe", "2xtp2", {}, "group", "gathered"),
    "tp, adapters": ("phi3_longrope", "tp4", {"rank": 4, "targets": ("qkv_proj", "o_proj", "lm_head")}, "shared", ""),
    "tp, adapters, gathered": (
        "qwen3_moe", "2xtp2", {"rank": 2, "targets": ("all-linear", "mlp.experts.gate_up_proj")}, "group", "gathered",
    ),
    "ep, shared": ("qwen3_moe", "4ep2", {}, "shared", ""),
    "ep, tp, gathered": ("gpt_oss", "ep2xtp2", {}, "group", "gathered"),
    "ep, adapters": (
        "qwen3_moe", "ep2", {"rank": 2, "targets": ("all-linear", "mlp.experts.gate_up_proj")}, "shared", "gathered",
    ),
    "tp, files": ("gpt_oss", "tp2", {}, "files", ""),
    "stages, tied": ("qwen3", "pp2x2", {}, "shared", ""),
    "stages, gathered": ("deepseek_v3", "pp2x2", {}, "group", "gathered"),
    "stages, files": ("llama_tied", "pp2x2x1", {}, "files", ""),
    "stages, adapters, gathered": (
        "qwen3_moe", "pp2xep2", {"rank": 2, "targets": ("all-linear", "mlp.experts.gate_up_proj")}, "group", "gathered",
    ),
    "in the engine's dtype": ("llama_tied", "1", {}, "shared", "bf16"),
    "adapters": ("llama", "2", {"rank": 4, "modules_to_save": ("lm_head",)}, "shared", ""),
    "adapters of what is tied": ("qwen3", "1", {"rank": 4, "targets": ("q_proj", "embed_tokens")}, "group", ""),
    "adapters over nf4": ("llama", "2", {"rank": 4, "base": "nf4", "modules_to_save": ("lm_head",)}, "shared", ""),
    "adapters over nf4, merged": ("llama", "1", {"rank": 4, "base": "nf4", "sampling": "merged"}, "shared", ""),
    "adapters over nf4, stages": (
        "qwen3_moe", "pp2xep2", {"rank": 2, "base": "nf4", "targets": ("all-linear", "mlp.experts.down_proj")},
        "shared", "gathered",
    ),
    "adapters beside": ("qwen3", "1", {"rank": 4, "dora": True, "sampling": "separate"}, "files", ""),
    "adapters over int8, gathered": ("llama", "tp2", {"rank": 4, "base": "int8"}, "group", "gathered"),
    "adapters of experts": (
        "qwen3_moe", "2", {"rank": 2, "targets": ("all-linear", "mlp.experts.gate_up_proj")}, "files", "",
    ),
}  # fmt: skip


# The suite has each transport with each axis, and each kind of adapter; these are further pairs.
TABLE = (
    "experts, gathered", "gathered, group", "tp, adapters, gathered", "tp, files", "stages, files",
    "stages, adapters, gathered", "adapters over nf4, stages", "adapters of what is tied",
)  # fmt: skip


@pytest.mark.covers("rollout.transport", "rollout.bucket_mb")
@pytest.mark.parametrize("name", pairs([(name,) for name in CASES if name not in TABLE], [(name,) for name in TABLE]))
def test_after_each_sync_an_engine_is_one_loaded_from_the_export(
    name: str, process: EngineProcess, port: int, tmp_path: Path
) -> None:
    family, mesh, lora, transport, kind = CASES[name]
    base = lora.get("base", "compute")
    path = saved_model(family, **({} if base == "compute" else {"hidden_size": 128, "intermediate_size": 256}))
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    options = SyncOptions(transport, 30_000, 2, 60.0, tmp_path / "sync", dtype)  # type: ignore[arg-type]
    process.begin(follow, path, LoraConfig(**lora) if lora else None, dtype, port)
    by_rank = pool.run(world_of(mesh), train_and_send, path, mesh, lora, options, port, str(tmp_path), kind)
    assert not list(tmp_path.glob("sync/*"))
    for version, (synced, collectives) in zip(VERSIONS, by_rank[0], strict=True):
        buckets = 2 * synced.bytes / 7_500 + 2  # each at least half full; a tensor that is larger has its own
        assert synced.version == version and synced.extra["sync/gb_per_second"] > 0
        assert collectives <= (2 if kind == "gathered" else 1) * buckets + 8
    for version, answers in zip(VERSIONS, process.result(), strict=True):
        folder = tmp_path / str(version)
        if lora:
            folder = merge.run(
                MergeOptions(
                    path=str(folder),
                    base=path,
                    output=str(tmp_path / f"merged-{version}"),
                    dtype="fp32",
                    base_format=None if base == "compute" else base,
                )
            )
        process.begin(fresh, folder, dtype, version)
        expected = process.result()
        if lora and samples_separate(LoraConfig(**lora)):  # which adds up in another order
            pairs = [(a, b) for of, to in zip(answers, expected, strict=True) for a, b in zip(of, to, strict=True)]
            assert all((a.tokens, a.versions) == (b.tokens, b.versions) for a, b in pairs)
            assert max(abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 5e-5
        else:
            assert answers == expected


def written(path: str, mesh: str) -> tuple[int, int]:
    """(bytes that this rank writes into shared buckets, bytes of the model)."""
    engine = open_engine(path, mesh)
    content = contents.weights(engine, torch.float32)
    plan, memory = contents.BucketPlan(engine, content, 30_000), torch.empty(content.room, dtype=torch.uint8)
    shares = [share for bucket in plan._shares for share in bucket]
    return sum(share.row.within(memory)[share.target].nbytes for share in shares), content.bytes


@pytest.mark.parametrize(("family", "mesh"), [("qwen3", "pp2x2"), ("deepseek_v3", "pp2x2x1"), ("gpt_oss", "ep2xtp2")])
def test_every_byte_is_written_by_one_rank(family: str, mesh: str) -> None:
    """Also of what is tied over two stages, and of the buffers and small tensors that all have."""
    by_rank = pool.run(world_of(mesh), written, saved_model(family), mesh)
    assert sum(written_by_rank for written_by_rank, _ in by_rank) == by_rank[0][1]


def bucket_places(path: str, size: int | None) -> tuple[int, list[list[tuple[int, int]]]]:
    """(bucket size, for each bucket the first and the last byte of each tensor). size: None for what three of the
    first tensors fill to the last byte."""
    engine = open_engine(path, "1")
    content = contents.weights(engine, torch.float32)
    if size is None:
        (rows, *_) = contents.BucketPlan(engine, content, 1 << 30).buckets
        size = rows[2].end
    buckets = contents.BucketPlan(engine, content, size).buckets
    assert [row.entry for bucket in buckets for row in bucket] == [content.entries[m.disk] for m in content.mappings]
    return size, [[(row.offset, row.end) for row in bucket] for bucket in buckets]


@pytest.mark.parametrize("given", [20_000, None])
def test_buckets_are_filled(given: int | None) -> None:
    size, buckets = pool.run(1, bucket_places, saved_model("qwen3"), given)[0]
    for bucket in buckets:
        ends = [0, *(end for _, end in bucket)]
        assert [offset for offset, _ in bucket] == [
            -(-end // contents.ALIGNMENT) * contents.ALIGNMENT for end in ends[:-1]
        ]
        assert len(bucket) == 1 or ends[-1] <= size
    for bucket, following in itertools.pairwise(buckets):
        assert -(-bucket[-1][1] // contents.ALIGNMENT) * contents.ALIGNMENT + following[0][1] > size
    assert len(buckets) > 2 and max(map(len, buckets)) > 2
    assert given is not None or buckets[0][-1][1] == size


# ---------------------------------------------------------------- when it fails


def fail_and_go_on(path: str, port: int, transport: sending.Transport) -> tuple[str, int]:
    """What every rank is told of a sync that fails; and the version of the next one."""
    engine = open_engine(path, "2")
    sender = Sender(engine, [EngineTarget("it")], SyncOptions(transport, 30_000, 2, 30.0), port=port, key=KEY)
    with pytest.raises(SyncError) as error:
        sender.send(1)
    synced = sender.send(2)
    sender.close()
    return str(error.value), synced.version


def fail_and_follow(path: str, port: int) -> tuple[str, int | None]:
    """The engine of that: it runs out of memory in the middle, has no weights then, and is served by the next sync."""
    engine, ticket = Standalone(path, dtype=torch.float32), Ticket("127.0.0.1", port, KEY, "it", 0, 30.0)
    places = LoadedWeights._local_view

    def short_of_memory(self: LoadedWeights, piece: Any) -> Any:
        if "layers.1" in piece.disk:
            raise MemoryError("no room")
        return places(self, piece)

    with patch.object(LoadedWeights, "_local_view", short_of_memory), pytest.raises(MemoryError):
        engine.receive(ticket, 1)
    with pytest.raises(SyncError) as error:
        engine.generate(REQUESTS)
    engine.receive(ticket, 2)
    engine.generate(REQUESTS)
    return str(error.value), engine.version


@pytest.mark.parametrize("transport", ["shared", "group"])
def test_a_sync_that_fails_is_told_to_all_and_the_next_one_serves(
    transport: str, process: EngineProcess, port: int
) -> None:
    path = saved_model("llama")
    process.begin(fail_and_follow, path, port)
    first, second = pool.run(2, fail_and_go_on, path, port, transport)
    assert first == second == ("it: MemoryError: no room", 2)
    assert process.result() == (
        "this engine has no weights to sample with: none were synced yet, or the last sync failed",
        2,
    )


def proven(path: str, port: int) -> list[bool]:
    """Which of five syncs compared checksums."""
    sender = Sender(
        open_engine(path, "1"), [EngineTarget("it")], SyncOptions("shared", verify_every=3), port=port, key=KEY
    )
    proofs, prove = list[bool](), SyncServer.prove
    note = lambda server, buckets, version, sent: (proofs.append(bool(sent)), prove(server, buckets, version, sent))  # noqa: E731
    with patch.object(SyncServer, "prove", note):
        for version in range(1, 6):
            sender.send(version)
    sender.close()
    return proofs


def restarted_once(path: str, port: int) -> None:
    ticket = Ticket("127.0.0.1", port, KEY, "it", 0, 60.0)
    for versions in ((1, 2, 3, 4), (5,)):
        engine = Standalone(path, dtype=torch.float32)
        for version in versions:
            engine.receive(ticket, version)


@pytest.mark.covers("rollout.verify_every")
def test_values_are_compared_at_an_engines_first_sync_and_every_so_often(process: EngineProcess, port: int) -> None:
    path = saved_model("llama")
    process.begin(restarted_once, path, port)
    assert pool.run(1, proven, path, port) == [[True, False, True, False, True]]
    process.result()


def refused(path: str, options: SyncOptions) -> str:
    with pytest.raises(UserError) as error:
        Sender(open_engine(path, "1"), [EngineTarget("it", host="another")], options)
    return str(error.value)


def test_shared_memory_of_another_host_is_refused() -> None:
    (text,) = pool.run(1, refused, saved_model("llama"), SyncOptions("shared"))
    assert text.startswith("rollout.transport=shared: it is on another, but no trainer rank is")


# ---------------------------------------------------------------- shared memory that a device writes


class Registry:
    """In place of transports.HostMemory."""

    def __init__(self) -> None:
        self.registered, self.released = list[int](), list[int]()

    def register(self, memory: torch.Tensor) -> bool:
        self.registered.append(memory.data_ptr())
        return len(self.registered) != 2  # of one map CUDA is not told

    def release(self, memory: torch.Tensor) -> None:
        assert memory[0] == 0, "it is mapped still"
        self.released.append(memory.data_ptr())


def test_maps_of_shared_buckets_are_registered_once_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    monkeypatch.setattr(transports, "host_memory", registry)
    SharedBuckets("plain", 0, 4096, 4096, True, torch.device("cpu")).close()
    assert not registry.registered
    buckets = SharedBuckets("device", 0, 4096, 4096, True, torch.device("cuda"))
    assert len(registry.registered) == transports.SLOTS
    buckets.close()
    assert registry.released == [registry.registered[0], *registry.registered[2:]]


def written_late(path: str) -> tuple[list[bool], list[int], int]:
    """(whether each bucket was whole when it was posted, copies that each waited for together, blocking copies): for a
    device whose copies to the host are done when it is waited for."""
    engine = open_engine(path, "1")
    content = contents.weights(engine, torch.float32)
    plan = contents.BucketPlan(engine, content, 30_000)
    late = list[tuple[torch.Tensor, torch.Tensor]]()
    waits, blocking, copy = list[int](), list[int](), torch.Tensor.copy_
    memory = torch.zeros(content.room, dtype=torch.uint8)
    bucket: Any = SimpleNamespace(size=30_000, memory=lambda number: memory)

    def copy_(into: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        late.append((into, values.clone())) if non_blocking else blocking.append(1)
        return into

    def settle(device: torch.device, bucket: torch.Tensor | None) -> None:
        assert bucket is memory
        waits.append(len(late))
        for into, values in late:
            copy(into, values)
        late.clear()

    complete = list[bool]()
    state = dict(engine.tensors())
    with patch.object(torch.Tensor, "copy_", copy_), patch.object(contents, "settle", settle):
        for number, rows in enumerate(plan.write(engine, bucket)):
            complete += [bool(row.within(memory).abs().sum() > 0) for row in rows]
            for share in plan._shares[number]:
                expected = share.mapping.to_disk(state[share.mapping.runtime][share.source])
                complete.append(torch.equal(share.row.within(memory)[share.target], expected))
    return complete, waits, len(blocking)


def test_a_device_is_waited_for_once_for_each_bucket() -> None:
    ((complete, waits, blocking),) = pool.run(1, written_late, saved_model("llama"))
    assert all(complete) and blocking == 0
    assert len(waits) > 2 and all(waits) and max(waits) > 1


# ---------------------------------------------------------------- a group of NCCL, in place of which something stands


class DelayedBroadcast:
    """A broadcast that is done after so many looks; None: never."""

    def __init__(self, looks: int | None) -> None:
        self.looks, self.waited = looks, False

    def is_completed(self) -> bool:
        if self.looks:
            self.looks -= 1
        return self.looks == 0

    def wait(self) -> None:
        self.waited = True  # as NCCL's: it neither blocks nor raises


class Group:
    def __init__(self, looks: int | None) -> None:
        self.work, self.aborted = DelayedBroadcast(looks), threading.Event()

    def broadcast(self, tensors: Any, options: Any) -> DelayedBroadcast:
        return self.work

    def abort(self) -> None:
        self.aborted.set()


def broadcasting(looks: int | None) -> tuple[BroadcastGroup, Group]:
    group = BroadcastGroup("127.0.0.1", "nccl", 0.05)
    group._group = Group(looks)
    group.start(0, torch.zeros(4, dtype=torch.uint8))
    return group, group._group


def test_a_broadcast_is_waited_for_on_the_host() -> None:
    group, standing = broadcasting(looks=3)
    group.wait(0)
    assert standing.work.looks == 0 and standing.work.waited


def test_a_broadcast_that_is_never_done_is_an_error_in_time_and_its_group_is_aborted() -> None:
    """An engine that dies in the middle: NCCL itself would end the trainer's process."""
    group, standing = broadcasting(looks=None)
    with pytest.raises(SyncError, match=r"bucket 0 did not go through the group: nothing came for 0\.05 s") as error:
        group.wait(0)
    assert error.value.late
    group.leave()
    assert standing.aborted.wait(10.0) and group._group is None


def test_an_engine_gives_up_a_broadcast_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    standing = Group(looks=None)
    monkeypatch.setattr(protocol._GroupReceiver, "joined", ("id", standing))
    received = protocol._GroupReceiver({"id": "id", "backend": "gloo"}, Ticket("127.0.0.1", 1, KEY, "it", 0, 0.05))
    with pytest.raises(SyncError, match="bucket 4 did not come through the group: nothing came"):
        received.take({"bucket": 4, "bytes": 8})
    assert standing.aborted.is_set() and protocol._GroupReceiver.joined is None


class NcclGroup:
    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
        self.timeout = options._timeout


def test_the_watchdog_of_nccl_comes_after_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    assert protocol.join_group(dist.HashStore(), "a", 0, 1, "nccl", 30.0).timeout == timedelta(seconds=120)


def test_nobody_begins_to_join_nccl_while_a_member_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first broadcast joins, without a limit."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    group = BroadcastGroup("127.0.0.1", "nccl", 0.1)
    group._members, group._store, group._id = [("vllm-0", 0)], dist.HashStore(), "a"
    with pytest.raises(SyncError, match=r"no process group with vllm-0 within 0\.1 s"):
        group.join()


@pytest.mark.parametrize(("backend", "engine_nccl", "message"), [
    ("nccl", "2.27.5", "vllm-0 has NCCL 2.27.5 (torch 2.12.1), and this trainer NCCL 2.28.9 (torch 2.13.0)"),
    ("nccl", "2.28.9", ""), ("nccl", "", ""), ("gloo", "2.27.5", ""),
])  # fmt: skip
def test_engines_with_another_nccl_are_refused_by_name(backend: str, engine_nccl: str, message: str) -> None:
    trainer: Any = SimpleNamespace(_software={"torch": "2.13.0", "nccl": "2.28.9"}, _backend=backend)
    connection = sending_server.Connection(Any, "vllm-0", 0, None, True, None, None, "2.12.1", engine_nccl)  # type: ignore[arg-type]
    server: Any = SimpleNamespace(connections=[connection])
    if not message:
        Sender._check_software(trainer, server, "group")
        return
    with pytest.raises(UserError) as refusal:
        Sender._check_software(trainer, server, "group")
    assert message in str(refusal.value) and "set rollout.transport=shared" in str(refusal.value)


def test_an_engine_opens_images_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, Any]] = []

    def generator(*_: Any, **options: Any) -> Any:
        built.append(options)
        return SimpleNamespace(renew=lambda version, keep: None)

    monkeypatch.setattr(standalone, "Generator", generator)
    monkeypatch.setattr(standalone, "Delivery", lambda *_, **options: nullcontext(SimpleNamespace(parts=list)))
    opener: Any = object()
    engine = Standalone("m", dtype=torch.float32, opener=opener)
    filled: Any = SimpleNamespace(asleep=False, model=None)
    ticket: Any = None
    engine._weights = filled
    engine.receive(ticket, 3)
    assert built == [{"opener": opener}] and engine.version == 3


def test_the_sender_sleeps_until_somebody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a second at most, so that its own end is noticed."""
    waits: list[float] = []
    poll = SimpleNamespace(register=lambda *_: None, poll=lambda milliseconds: waits.append(milliseconds) or [])
    sender = SyncServer("127.0.0.1", 0, 5.0)
    try:
        monkeypatch.setattr(sending_server, "select", SimpleNamespace(poll=lambda: poll, POLLIN=1))
        for seconds in (60.0, 0.5, -1.0):
            assert sender._complete_hellos([], time.monotonic() + seconds) == []
    finally:
        sender._listener.close()
    assert 900 < waits[0] <= 1000 and 400 < waits[1] <= 500 and waits[2] == 0


def test_a_group_of_engines_is_made_anew_where_any_has_not_joined_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "open_store", lambda *_, **options: SimpleNamespace(port=9))
    group = BroadcastGroup("127.0.0.1", "gloo", 5.0)
    workers: list[Any] = [SimpleNamespace(name="engine", member=member, joined=None) for member in range(2)]

    def described() -> str:
        first, second = group.describe(workers)
        assert (first["rank"], second["rank"], first["world"], first["port"]) == (1, 2, 3, 9)
        assert first["id"] == second["id"]
        group._group = object()
        return str(first["id"])

    description = described()
    for worker in workers:
        worker.joined = description
    assert described() == description
    workers[1].joined = None  # it was started again
    assert described() != description
