"""Weights reach an engine in another process whole and as they are, or the sync says which tensor did not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests import pool
from tests.cases import open_engine, saved_model, world_of
from weft.checkpoint.adapters import save_adapter
from weft.checkpoint.export import save_huggingface
from weft.cluster.options import MergeOptions
from weft.config.schema import LoraConfig
from weft.recipes import merge
from weft.rollout.standalone import Standalone
from weft.rollout.sync import sender as sending
from weft.rollout.sync.sender import Receiver, Sender, SyncOptions
from weft.rollout.sync.wire import Ticket
from weft.verification.adapter import stir

PROMPTS = [[5, 9, 100], [3, 100, 50, 7, 11, 12, 13, 14]]
KEY, VERSIONS = "a key", (1, 2, 3)

# ---------------------------------------------------------------- an engine's process


class EngineProcess:
    """A real process that takes weights; it calls what it is given."""

    def __init__(self) -> None:
        pool._start()  # so that its fork server has imported torch
        self.pipe, theirs = pool._context.Pipe()
        self.process = pool._context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()

    def begin(self, function: Any, *args: Any) -> None:
        self.pipe.send((function, args))

    def result(self, timeout: float = 100.0) -> Any:
        assert self.pipe.poll(timeout), "the engine's process does not answer"
        value = self.pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(*args))
        except Exception as error:
            pipe.send(error)


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    process = EngineProcess()
    yield process
    process.process.kill()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ---------------------------------------------------------------- what an engine says

Answers = list[tuple[list[int], Tensor]]


@torch.no_grad()
def answers(model: transformers.PreTrainedModel) -> Answers:
    """Greedy tokens, and the logprobs of all of them."""
    out = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(6):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        logprobs = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        out.append((tokens, logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]))
    return out


def follow(path: str, lora: LoraConfig | None, port: int) -> list[Answers]:
    """What a standalone engine answers under every version."""
    engine, ticket, found = Standalone(path, lora, dtype=torch.float32), Ticket("127.0.0.1", port, KEY, "it", 0, 60), []
    for version in VERSIONS:
        engine.receive(ticket, version)
        assert engine.version == version
        found.append(answers(engine.model))
    return found


def fresh(path: Path) -> Answers:
    return answers(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


# ---------------------------------------------------------------- trainers


class Elsewhere(Sender):
    """As on several hosts: no memory that all ranks could write to."""

    def _on_one_host(self, transport: sending.Transport) -> bool:
        return False


def train_and_send(
    path: str, mesh: str, lora: dict[str, Any], options: SyncOptions, port: int, folder: str, kind: str
) -> Any:
    """Weights that change before every version, sent and exported; (bytes, collectives) of each sync."""
    engine = open_engine(path, mesh, lora=lora)
    sender = (Elsewhere if kind == "gathered" else Sender)(
        engine, [Receiver("it", adapters=bool(lora))], options, port=port, key=KEY
    )
    found = []
    for version in VERSIONS:
        _change(engine, version)
        synced = sender.send(version)
        assert synced.version == version
        found.append(synced)
        target = Path(folder) / str(version)
        save_adapter(engine, target) if lora else save_huggingface(engine, target)
    sender.close()
    return found


def _change(engine: Any, version: int) -> None:
    if engine.lora is not None:
        stir(engine)
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
    "adapters": ("llama", "2", {"rank": 4, "modules_to_save": ("lm_head",)}, "shared", ""),
    "adapters of what is tied": ("qwen3", "1", {"rank": 4, "targets": ("q_proj", "embed_tokens")}, "group", ""),
    "adapters of experts": (
        "qwen3_moe", "2", {"rank": 2, "targets": ("all-linear", "mlp.experts.gate_up_proj")}, "files", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_after_each_sync_an_engine_is_one_loaded_from_the_export(
    name: str, process: EngineProcess, port: int, tmp_path: Path
) -> None:
    family, mesh, lora, transport, kind = CASES[name]
    path, options = saved_model(family), SyncOptions(transport, 30_000, 2, 60.0, tmp_path / "sync")  # type: ignore[arg-type]
    process.begin(follow, path, LoraConfig(**lora) if lora else None, port)
    pool.run(world_of(mesh), train_and_send, path, mesh, lora, options, port, str(tmp_path), kind)
    for version, found in zip(VERSIONS, process.result(), strict=True):
        folder = tmp_path / str(version)
        if lora:
            folder = merge.run(
                MergeOptions(path=str(folder), base=path, output=str(tmp_path / f"merged-{version}"), dtype="fp32")
            )
        process.begin(fresh, folder)
        for (tokens, logprobs), (same_tokens, same_logprobs) in zip(found, process.result(), strict=True):
            assert tokens == same_tokens and torch.equal(logprobs, same_logprobs)
