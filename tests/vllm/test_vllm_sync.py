"""Weights from a trainer to a real vLLM: by every transport, whole models and adapters alone."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cases import open_engine, saved_model
from weft.checkpoint.adapters import save_adapter
from weft.checkpoint.export import save_huggingface
from weft.cluster.options import MergeOptions
from weft.recipes import merge
from weft.rollout.base import Completion, Request, Sampling
from weft.rollout.sync.sender import Receiver, Sender, SyncOptions
from weft.rollout.sync.wire import SyncError, Ticket
from weft.rollout.vllm.engine import VllmEngine
from weft.rollout.vllm.interpreter import find
from weft.rollout.vllm.server import Settings
from weft.verification.adapter import stir

PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(40, 80))]
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def start(loop: asyncio.Runner, path: str, folder: Path, **more: Any) -> VllmEngine:
    settings = Settings(
        model=path, folder=folder, interpreter=find(sys.executable), name="vllm-0", max_tokens=256, dtype="float32",
        variables=VARIABLES, **more,
    )  # fmt: skip
    return loop.run(VllmEngine.start(settings, version=0))


def sync(loop: asyncio.Runner, sender: Sender, engine: VllmEngine, version: int) -> Any:
    """Both ends at once, as the controller does it."""
    (ticket,) = sender.tickets["vllm-0"]

    async def both() -> Any:
        _, synced = await asyncio.gather(engine.receive(ticket, version), asyncio.to_thread(sender.send, version))
        return synced

    return loop.run(both())


def is_of(folder: Path, engine: VllmEngine, loop: asyncio.Runner, version: int) -> None:
    """Greedy tokens and logprobs are those of the model in a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    async def ask() -> list[list[Completion]]:
        sampling = Sampling(12, temperature=0)
        return await asyncio.gather(*(engine.generate(Request(f"{p}", p, (1,), sampling)) for p in PROMPTS))

    for prompt, (completion,) in zip(PROMPTS, loop.run(ask()), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        tokens = torch.tensor(completion.tokens)
        off = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0] - torch.tensor(completion.logprobs)
        assert logits.argmax(-1).tolist() == tokens.tolist() and float(off.abs().mean()) < 1e-5
        assert completion.versions == ((version, len(tokens)),)


@pytest.mark.parametrize(
    ("family", "transports"), [("qwen3", ("shared", "group", "files")), ("qwen3_moe", ("shared",))]
)
def test_weights_arrive_by_every_transport(
    family: str, transports: tuple[Any, ...], loop: asyncio.Runner, tmp_path: Path
) -> None:
    path = saved_model(family, head_dim=32)
    trainer, engine = open_engine(path, "1"), start(loop, path, tmp_path)
    try:
        for version, transport in enumerate(transports, 1):
            with torch.no_grad():
                for parameter in trainer.module.parameters():
                    parameter.mul_(1.05)
            sender = Sender(trainer, [Receiver("vllm-0")], SyncOptions(transport, 60_000, 1, 60.0, tmp_path / "sync"))
            synced = sync(loop, sender, engine, version)
            assert engine.version == synced.version == version
            save_huggingface(trainer, tmp_path / str(version))
            is_of(tmp_path / str(version), engine, loop, version)
            sender.close()
    finally:
        loop.run(engine.close())


def test_adapters_arrive_alone(loop: asyncio.Runner, tmp_path: Path) -> None:
    path = saved_model("llama", head_dim=32)
    trainer = open_engine(path, "1", lora={"rank": 4, "targets": ("q_proj", "down_proj")})
    stir(trainer)
    engine = start(loop, path, tmp_path, lora_rank=8)
    sender = Sender(trainer, [Receiver("vllm-0", adapters=True)], SyncOptions("shared", 60_000, 1, 60.0))
    try:
        for version in (1, 2):
            with torch.no_grad():
                for parameter in trainer.module.parameters():
                    parameter.mul_(1.05 if parameter.requires_grad else 1.0)
            synced = sync(loop, sender, engine, version)
            assert (synced.bytes < 100_000) == (version == 2)  # the first brings the base, too
            save_adapter(trainer, tmp_path / str(version))
            options = MergeOptions(str(tmp_path / str(version)), path, "fp32", str(tmp_path / f"merged-{version}"))
            is_of(merge.run(options), engine, loop, version)
    finally:
        sender.close()
        loop.run(engine.close())
