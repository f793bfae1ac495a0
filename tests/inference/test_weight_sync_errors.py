"""What is wrong with a sync is found, by name, on both ends. Nothing here needs a trainer."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.support.cases import saved_model
from tests.support.rl_samples import algorithm, rl_config, sample
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig, RolloutConfig
from weft.config.schema import LoraConfig
from weft.errors import ActorError, UserError
from weft.inference.standalone import LoadedWeights, Standalone
from weft.inference.weight_sync import server as servers
from weft.inference.weight_sync import transports
from weft.inference.weight_sync.buckets import BucketTensor, SyncContent, entry_of
from weft.inference.weight_sync.checksums import checksum
from weft.inference.weight_sync.protocol import Delivery, SyncError, TensorHeader, Ticket, as_torch
from weft.inference.weight_sync.sender import SyncOptions, options_of, verify_is_due
from weft.inference.weight_sync.server import SyncServer
from weft.inference.weight_sync.transports import SharedBuckets
from weft.inference.weight_sync.verify import check_parity, compare
from weft.launch import scratch
from weft.models.lora import LoraPlan
from weft.parallel.shards.adapter_files import file_names
from weft.rl.corrections import parity_is_due, require_parity
from weft.rl.engine_supervisor import decline_on_error

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.arange(4)}
MANIFEST = {name: torch.empty_like(tensor, device="meta") for name, tensor in TENSORS.items()}

# ---------------------------------------------------------------- checksums


def test_a_checksum_sees_every_word_and_where_it_is() -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8)
    checksums = {checksum(data)}
    for change in (0, 7, 8, 8191, 8192, 65_536, 99_999, 100_002):
        changed = data.copy()
        changed[change] ^= 0x80
        checksums.add(checksum(changed))
    for a, b in ((0, 8), (0, 8192), (16, 65_536), (8, 99_992)):  # two words that change places
        changed = data.copy()
        changed[a : a + 8], changed[b : b + 8] = data[b : b + 8], data[a : a + 8]
        checksums.add(checksum(changed))
    rows = data[:98_304].reshape(-1, 8192)
    checksums |= {checksum(rows), checksum(np.ascontiguousarray(rows[::-1])), checksum(data[:-1])}
    negated = data[:98_304].copy()
    negated.view(np.float32)[[1, 3]] *= -1
    checksums.add(checksum(negated))
    checksums |= {checksum(b""), checksum(b"\0"), checksum(b"\0\0")}
    assert len(checksums) == 1 + 8 + 4 + 3 + 1 + 3
    assert checksum(data) == checksum(data.tobytes()) < 1 << 64


def mixed(number: int) -> int:
    """The output of splitmix64 of this number, with seed 0, in Python's integers."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize("size", [0, 5, 8192, 8200, 3 * 8192, 32 * 8192, 32 * 8192 + 16, 33 * 8192 + 8191, 70 * 8192])
def test_a_checksum_is_what_it_is_described_as(size: int) -> None:
    """Word by word: an engine and a trainer that were wrong alike would agree."""
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    words = np.frombuffer(data.tobytes() + bytes(-size % 8192), np.uint64).tolist() or [0]
    total = size * 0x9E3779B97F4A7C15
    for index, word in enumerate(words):
        row, column = divmod(index, 1024)
        factor = (mixed((1 << 32) + row) & ~1) + (mixed(column) | 1)
        total += (word ^ word >> 32) * factor
    assert checksum(data) == total % 2**64


# ---------------------------------------------------------------- the wire, tampered with


class Attempt:
    """One sync of TENSORS in shared memory between two threads, with something wrong. The ends' errors, None where
    there was none; what came."""

    def __init__(self, tamper: Callable[[Attempt], None] | None = None, has: int | None = None, asked: int = 3) -> None:
        self.version, self.rows, offset = 3, list[BucketTensor](), 0
        for name, tensor in MANIFEST.items():
            self.rows.append(BucketTensor(entry_of(name, tensor), offset))
            offset += 64
        self.memory = torch.zeros(4096, dtype=torch.uint8)
        self.placed: dict[str, int] | None = None
        self.has, self.asked, self.sums, self.came = has, asked, dict[str, int](), dict[str, Tensor]()
        self.sender_error: SyncError | None = None
        self.engine_error: SyncError | None = None
        for row in self.rows:
            row.within(self.memory).copy_(TENSORS[row.entry.name])
            self.sums[row.entry.name] = checksum(self.memory[row.offset : row.end].numpy())
        if tamper is not None:
            tamper(self)
        self.run()

    def run(self) -> None:
        slots, server = (
            SharedBuckets(f"test-{secrets.token_hex(4)}", 0, 4096, 4096, True),
            SyncServer("127.0.0.1", 0, 20.0),
        )
        ticket = Ticket("127.0.0.1", server.port, "key", "engine-0", 0, 20.0)
        thread = threading.Thread(target=self.receive, args=(ticket,))
        thread.start()
        error = None
        try:
            server.welcome([ticket], self.asked)
            server.active = server.connections
            server.begin(SyncContent("weights", [], MANIFEST), self.version, [{"kind": "shared"}], True, False)
            slots.memory(0).copy_(self.memory)
            server.post(0, self.rows, {"path": slots.path(0)})
            server.wait_taken(0, self.version)
            server.prove(1, self.version, self.sums)
            server.commit(self.version)
        except SyncError as failure:
            self.sender_error, error = failure, str(failure)
        server.leave(self.version, error)
        thread.join()
        server.close()
        slots.close()

    def receive(self, ticket: Ticket) -> None:
        try:
            with Delivery(ticket, self.asked, has=self.has) as delivery:
                for part in delivery.parts():
                    for entry, data in part.tensors():
                        self.came[entry.name] = as_torch(entry, data).clone()
                    part.finish(self.placed)
        except SyncError as error:
            self.engine_error = error


def test_what_is_sent_arrives() -> None:
    attempt = Attempt()
    assert attempt.sender_error is attempt.engine_error is None
    assert all(torch.equal(attempt.came[name], tensor) for name, tensor in TENSORS.items())
    assert not list(scratch.SHARED_MEMORY.glob("weft-sync-test-*"))


def _row(attempt: Attempt, index: int, **changes: Any) -> None:
    attempt.rows[index] = BucketTensor(replace(attempt.rows[index].entry, **changes), attempt.rows[index].offset)


def _swap(attempt: Attempt) -> None:
    """Each in the other's place, as two experts of equal shape would be."""
    attempt.memory[0:24] = attempt.memory[0:24].flip(0)


PLANTS: dict[str, tuple[Callable[[Attempt], Any], str]] = {
    "withheld": (lambda a: a.rows.pop(1), "1 of 3 tensors did not come with version 3: b"),
    "misnamed": (lambda a: _row(a, 1, name="d"), "d came with version 3 and is not in its manifest"),
    "doubled": (lambda a: a.rows.append(a.rows[0]), "a came twice with version 3"),
    "of another dtype": (lambda a: _row(a, 1, dtype="float16"), "b came with version 3 as float16 .5., but"),
    "of another shape": (lambda a: _row(a, 0, shape=(3, 2)), "a came with version 3 as float32 .3, 2., but"),
    "truncated": (
        lambda a: a.rows.__setitem__(2, BucketTensor(a.rows[2].entry, 4096 - 8)),
        "c came with version 3 cut short: 8 of 32 bytes",
    ),
    "changed on its way": (_swap, "engine-0 received bytes that differ from the sent bytes, version 3: a"),
    "not where it belongs": (
        lambda a: setattr(a, "placed", {**a.sums, "c": 1}),
        "engine-0 holds values that differ from the sent values, version 3: c",
    ),
    "not read back": (
        lambda a: setattr(a, "placed", {"a": a.sums["a"]}),
        "engine-0 did not report checksums of b, c",
    ),
    "of an older version": (lambda a: setattr(a, "version", 2), "stale weights: version 2 was sent, but"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_a_tensor_that_is_wrong_is_named_at_both_ends(name: str) -> None:
    tamper, message = PLANTS[name]
    attempt = Attempt(tamper)
    with pytest.raises(SyncError, match=message):
        raise attempt.sender_error or AssertionError("the sender saw nothing")
    with pytest.raises(SyncError, match=message):
        raise attempt.engine_error or AssertionError("the engine saw nothing")


def test_an_engine_does_not_go_back() -> None:
    assert "stale weights: version 3" in str(Attempt(has=4).engine_error)
    assert Attempt(has=3).engine_error is None  # once more, after others failed


def test_nobody_waits_for_an_engine_that_has_died() -> None:
    """Its controller says so in its place."""
    server = SyncServer("127.0.0.1", 0, 60.0)
    ticket = Ticket("127.0.0.1", server.port, "key", "engine-0", 0, 60.0)

    async def dies() -> None:
        raise ActorError("rollout engine 0 died", "killed")

    with pytest.raises(ActorError, match="engine 0 died"):
        asyncio.run(decline_on_error(dies(), ticket))
    began = time.monotonic()
    with pytest.raises(SyncError, match="engine-0 died before it connected for version 3"):
        server.welcome([ticket], 3)
    assert time.monotonic() - began < 10
    server.close()


def test_every_wait_ends_and_says_for_whom() -> None:
    server = SyncServer("127.0.0.1", 0, 0.2)
    ticket = Ticket("127.0.0.1", server.port, "key", "engine-0", 0, 0.2)
    with pytest.raises(SyncError, match=r"engine-0 did not connect for version 3 within 0.2 s"):
        server.welcome([ticket], 3)
    Delivery(replace(ticket, key="another"), 3)
    with pytest.raises(SyncError, match="engine-0 did not connect for version 3"):
        server.welcome([ticket], 3)  # one without the key is not let in
    delivery = Delivery(ticket, 3)
    server.welcome([ticket], 3)
    server.active = server.connections
    with pytest.raises(SyncError, match=r"engine-0: .* bucket 4 of version 3 to be taken: nothing came for 0.2 s"):
        server.wait_taken(4, 3)
    with pytest.raises(SyncError, match=r"the sender at .* version 3 to begin: nothing came for 0.2 s"):
        next(delivery.parts())
    delivery.channel.close()
    with pytest.raises(SyncError, match="engine-0: .* it has closed the connection"):
        server.wait_taken(4, 3)
    server.leave(3)
    Delivery(ticket, 2)
    with pytest.raises(SyncError, match="engine-0 requests version 2, but version 3 is being sent"):
        server.welcome([ticket], 3)
    server.close()
    with pytest.raises(SyncError, match=r"engine-0 found no sender of version 3 at 127.0.0.1:\d+ for 0.2 s"):
        Delivery(ticket, 3)


def test_shared_memory_that_is_short_or_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path)
    leftover = tmp_path / "weft-sync-dead-0-0"
    leftover.touch()
    buckets = SharedBuckets("ours", 0, 4096, 4096, True)
    assert not leftover.exists() and len(list(tmp_path.iterdir())) == transports.SLOTS
    SharedBuckets("others", 0, 4096, 4096, True)
    assert len(list(tmp_path.iterdir())) == 2 * transports.SLOTS  # those of living processes stay
    buckets.close()
    assert len(list(tmp_path.iterdir())) == transports.SLOTS
    with pytest.raises(UserError, match="Lower rollout.bucket_mb"):
        SharedBuckets("vast", 0, 1 << 60, 4096, True)


def test_shared_memory_that_another_run_takes_for_stale_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path)
    lock, removed = transports.fcntl.flock, list[Path]()

    def late(descriptor: int, how: int) -> None:
        """The other run comes between the making of a slot and its lock."""
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(descriptor, how)

    monkeypatch.setattr(transports.fcntl, "flock", late)
    slots = SharedBuckets("ours", 0, 4096, 4096, True)
    assert len(removed) == 1 and all(path.exists() for path in slots.paths)
    slots.close()


# ---------------------------------------------------------------- what a standalone engine has of it


class WeightsByName:
    """A part whose tensors are at hand; its sender compares as ever."""

    verify, version = True, 1

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.given = tensors
        self.manifest = {name: entry_of(name, tensor) for name, tensor in tensors.items()}

    def tensors(self, stored: Any = None) -> Iterator[tuple[TensorHeader, Any]]:
        for name, tensor in self.given.items():
            yield self.manifest[name], tensor.contiguous().reshape(-1).view(torch.uint8).numpy()

    def finish(self, placed: Mapping[str, int] | None) -> None:
        sums = {entry.name: checksum(data) for entry, data in self.tensors()}
        compare(self.version, "engine-0", sums, sums, placed)


def _filled(family: str, lora: LoraConfig | None = None) -> tuple[LoadedWeights, Any]:
    path = saved_model(family)
    part = WeightsByName(safetensors.torch.load_file(f"{path}/model.safetensors"))
    filled = LoadedWeights(path, lora, part.manifest, torch.float32, torch.device("cpu"))
    filled.take_weights(part)  # type: ignore[arg-type]
    return filled, part


def test_what_an_engine_holds_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    filled, part = _filled("qwen3_moe")
    stale = WeightsByName({**part.given, "model.norm.weight": part.given["model.norm.weight"] + 1})
    local_view, by_name = LoadedWeights._local_view, {mapping.disk: mapping for mapping in filled.mappings}
    first, second = (by_name[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in (1, 3))
    writing = [True]

    def swapped(self: LoadedWeights, piece: Any) -> Tensor:
        return local_view(self, {first: second, second: first}.get(piece, piece) if writing[0] else piece)

    class Swapping(WeightsByName):
        def tensors(self, stored: Any = None) -> Iterator[tuple[TensorHeader, Any]]:
            yield from super().tensors()
            writing[0] = False

    monkeypatch.setattr(LoadedWeights, "_local_view", swapped)
    with pytest.raises(
        SyncError, match=r"engine-0 holds values that differ.*experts.1.up_proj.weight, .*experts.3.up_proj"
    ):
        filled.take_weights(Swapping(part.given))  # type: ignore[arg-type]
    monkeypatch.setattr(
        LoadedWeights,
        "_local_view",
        lambda self, piece: local_view(self, piece).clone() if "norm" in piece.disk else local_view(self, piece),
    )
    with pytest.raises(SyncError, match="engine-0 holds values that differ.* version 1: model.norm.weight"):
        filled.take_weights(stale)  # type: ignore[arg-type]


def _adapter(plan: LoraPlan) -> WeightsByName:
    shapes = {name: shape for t in plan.targets for name, shape in zip(t.names, t.shapes(plan.rank), strict=True)}
    return WeightsByName({file: torch.randn(shapes[name]) for name, file in file_names(shapes).items()})


def test_an_adapter_that_is_not_applied_is_found() -> None:
    filled, _ = _filled("llama", LoraConfig(rank=2, targets=("q_proj",)))
    assert filled.plan is not None
    part = _adapter(filled.plan)
    filled.take_adapter(part)  # type: ignore[arg-type]
    name = filled.plan.targets[0].weight
    assert not torch.equal(filled.state[name], filled.base[name])
    merged = filled._merged

    def forgetful(*args: Any) -> Tensor:
        filled._merged = merged  # type: ignore[method-assign]
        return filled.base[name]

    filled._merged = forgetful  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="q_proj.weight differs from its base with the merged adapter"):
        filled.take_adapter(part)  # type: ignore[arg-type]


def test_an_engine_refuses_weights_of_another_model() -> None:
    _, part = _filled("llama")
    tied_model = saved_model("llama_tied")
    with pytest.raises(SyncError, match="the model has no tensors for lm_head"):
        LoadedWeights(
            tied_model,
            None,
            {**part.manifest, "lm_head.other": TensorHeader("lm_head.other", "float32", (1,))},
            torch.float32,
            torch.device("cpu"),
        )
    incomplete = {name: entry for name, entry in part.manifest.items() if name != "model.norm.weight"}
    with pytest.raises(SyncError, match="the sync does not contain model.norm.weight .1 tensors"):
        LoadedWeights(saved_model("llama"), None, incomplete, torch.float32, torch.device("cpu"))
    engine = Standalone(tied_model, dtype=torch.float32)
    with pytest.raises(SyncError, match="this engine has no weights"):
        engine.generate([])


# ---------------------------------------------------------------- logprobs


def test_logprobs_of_another_model_are_found() -> None:
    reported, fp32 = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)], ["fp32", "fp32"]
    assert check_parity("hf", 3, reported, reported, fp32) == check_parity("hf", 3, [], [], fp32) == 0.0
    near = [part + np.float32(1e-5) for part in reported]
    assert 0 < check_parity("hf", 3, near, reported, fp32) < 2e-5
    for wrong in (np.float32(0.3), np.float32("nan")):
        with pytest.raises(SyncError, match="hf samples from another distribution .* version 3"):
            check_parity("hf", 3, [reported[0] + wrong, reported[1]], reported, fp32)
    check_parity("hf", 3, [reported[0] + 0.1, reported[1]], reported, ["bf16", "fp32"])
    with pytest.raises(SyncError, match="hf returned 2 logprobs for 3 tokens"):
        check_parity("hf", 3, reported[:1], reported, fp32)


def test_what_an_engine_sampled_is_compared_with_what_the_trainer_reads() -> None:
    right = sample(0, 2, 1.0, rollout_logprobs=(-1, -2), old_logprobs=(-1, -2), versions=(4, 4))
    wrong = sample(1, 2, 1.0, rollout_logprobs=(-1, -3), old_logprobs=(-1, -2), versions=(4, 4))
    stale = sample(
        2, 2, 1.0, rollout_logprobs=(-1, -3), old_logprobs=(-1, -2), versions=(3, 4)
    )  # begun under older weights
    require_parity([right, stale], 4, "hf", ["fp32"], RolloutConfig())
    with pytest.raises(ActorError, match="logprobs of 4 tokens differ by 0.25 on average"):
        require_parity([right, wrong, stale], 4, "hf", ["fp32"], RolloutConfig())
    config = rl_config(algorithm(), engine="hf", verify_every=3)
    assert [parity_is_due(config, step) for step in (1, 2, 3, 4, 6)] == [True, False, True, False, True]
    assert not parity_is_due(rl_config(algorithm()), 1)


# ---------------------------------------------------------------- keys


NEEDED = ("model.path=org/name", f"data.path={__file__}", "rl.reward=[length]", "step.max_tokens_per_device=4096")


def test_the_keys_of_sync() -> None:
    keys = {"engine": "vllm", "transport": "group", "bucket_mb": 3, "verify_every": 7, "dtype": "bf16", "timeout": 50.0}
    overrides = [*NEEDED, *(f"rollout.{key}={value}" for key, value in keys.items())]
    config = load_config([], overrides, RlConfig)
    assert options_of(config, Path("run")) == SyncOptions(
        "group", 3_000_000, 7, 50.0, Path("run/sync"), torch.bfloat16, stored=False
    )
    short = load_config([], [*overrides, "train.timeout=10"], RlConfig)
    assert options_of(short, Path("run")).timeout == 8.0  # the other ranks wait in a collective meanwhile
    with pytest.raises(UserError, match="rollout.transport would have no effect"):
        load_config([], [*NEEDED, "rollout.transport=group"], RlConfig)


def test_which_syncs_are_proven() -> None:
    """Again and again, not once; and for an engine that comes back with an older version."""
    assert [n for n in range(1, 10) if verify_is_due(n, 3, [n - 1], n - 1)] == [3, 6, 9]
    assert not any(verify_is_due(n, 0, [n - 1], n - 1) for n in range(1, 10))
    assert verify_is_due(5, 3, [4, None], 4) and verify_is_due(5, 3, [4, 3], 4) and verify_is_due(5, 0, [3], 4)
    assert not verify_is_due(5, 3, [4, 4], 4) and not verify_is_due(3, 3, [], 2)


# ---------------------------------------------------------------- strangers at the port


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


HELLO = {
    "hello": 7, "version": 3, "has": None, "holds": None, "base": True, "joined": None, "mapped": None, "key": "key",
    "torch": "", "nccl": "",
    "name": "engine-0", "member": 0,
}  # fmt: skip
STRANGERS = {
    "silent": b"",
    "announces 4 GiB": b"\xff\xff\xff\xff" + b"x" * 100,
    "announces more than it says": framed(b"{}" + b" " * 200)[:-5],
    "no JSON": framed(b"\x00\xff"),
    "no object": framed(b"[[1, 2]]"),
    "a number": framed(b"5"),
    "deep nesting": framed(b"[" * 4000),
    "no key": framed(json.dumps({k: v for k, v in HELLO.items() if k != "key"}).encode()),
    "a wrong key": framed(json.dumps({**HELLO, "key": "kez"}).encode()),
    "a key of another type": framed(json.dumps({**HELLO, "key": ["key"]}).encode()),
    "half a letter": framed(json.dumps({**HELLO, "key": "\ud800"}).encode()),
    "a name of another type": framed(json.dumps({**HELLO, "name": {"a": 1}}).encode()),
    "a member of another type": framed(json.dumps({**HELLO, "member": "zero"}).encode()),
    "no version": framed(json.dumps({k: v for k, v in HELLO.items() if k != "version"}).encode()),
    "a number that is too large": framed(b'{"hello": ' + b"9" * 4000 + b"}"),
    "an error": framed(b'{"error": "give up"}'),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}  # fmt: skip


def test_strangers_at_the_port_neither_end_nor_delay_a_sync() -> None:
    """All of them come first, some many times, and keep their connections; the engine comes last."""
    server = SyncServer("127.0.0.1", 0, 60.0)
    ticket = Ticket("127.0.0.1", server.port, "key", "engine-0", 0, 60.0)
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(len(STRANGERS) + 70)]
    for stranger, greeting in zip(strangers, [*STRANGERS.values(), *[b""] * 70], strict=True):
        stranger.sendall(greeting)
    delivery = Delivery(ticket, 3)
    began = time.monotonic()
    server.welcome([ticket], 3)
    assert [connection.name for connection in server.connections] == ["engine-0"] and time.monotonic() - began < 4.0
    assert all(is_closed(stranger) for stranger in strangers)
    server.leave(3)
    assert list(delivery.parts()) == []
    server.close()


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(5.0)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_who_shows_no_ticket_is_sent_away_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_HELLO_SECONDS", 0.3)
    server = SyncServer("127.0.0.1", 0, 3.0)
    ticket = Ticket("127.0.0.1", server.port, "key", "engine-0", 0, 3.0)
    silent = socket.create_connection(("127.0.0.1", server.port))
    sent_away = list[float]()

    def look() -> None:
        assert is_closed(silent)
        sent_away.append(time.monotonic())

    thread, began = threading.Thread(target=look), time.monotonic()
    thread.start()
    with pytest.raises(SyncError, match="engine-0 did not connect for version 3 within 3 s"):
        server.welcome([ticket], 3)
    thread.join()
    assert sent_away[0] - began < 2.0
    server.close()


def fed(report: bytes) -> tuple[SyncServer, socket.socket]:
    """A server with an engine that has shown its ticket and has said this besides."""
    server = SyncServer("127.0.0.1", 0, 2.0)
    engine = socket.create_connection(("127.0.0.1", server.port))
    engine.sendall(framed(json.dumps(HELLO).encode()) + report)
    server.welcome([Ticket("127.0.0.1", server.port, "key", "engine-0", 0, 2.0)], 3)
    server.active = server.connections
    return server, engine


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (b'{"received": 5, "placed": null}', "engine-0 sent a malformed message: TypeError: checksums"),
        (b'{"received": {"a": "1"}, "placed": null}', "engine-0 sent a malformed message: TypeError"),
        (b'{"received": {}}', "engine-0 sent a malformed message: KeyError: 'placed'"),
        (b"[]", "while waiting for what it received of version 3: a message is list, not an object"),
        (b"[" * 100_000, "while waiting for .* a message is nested too deeply"),
    ],
)
def test_reports_that_make_no_sense_are_said_to_be_the_engines(report: bytes, message: str) -> None:
    server, engine = fed(framed(report))
    with pytest.raises(SyncError, match=message):
        server.prove(0, 3, {"a": 1})
    server.leave(3)
    server.close()
    engine.close()


def test_a_message_of_4_gib_is_refused_when_it_is_announced() -> None:
    server, engine = fed(b"\xff\xff\xff\xff")
    with pytest.raises(SyncError, match="a message of 4294967295 bytes is announced"):
        server.prove(0, 3, {})
    server.leave(3)
    server.close()
    engine.close()
