"""Weights from trainer ranks reach vLLM through weft's sync: it samples what transformers computes from the export, and
exactly what a vLLM that was started from the export samples."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inference.test_weight_sync import KEY, VERSIONS, train_and_send
from tests.support import pool
from tests.support.cases import open_engine, saved_model
from tests.vllm.test_vllm_engine import PROMPTS, is_of, plain, settings
from weft.checkpoint.export import save_huggingface
from weft.inference.base import Completion, Request, SamplingParams, Synced
from weft.inference.vllm.engine import VllmEngine
from weft.inference.weight_sync.protocol import Ticket
from weft.inference.weight_sync.sender import EngineTarget, Sender, SyncOptions
from weft.launch.machine import free_port
from weft.launch.options import MergeOptions
from weft.recipes import merge

SAMPLING = SamplingParams(16, temperature=0)
# vLLM on CPU has no kernels for smaller heads and experts.
LARGE = {"head_dim": 32, "hidden_size": 64}
EXPERTS = {**LARGE, "num_experts": 8, "moe_intermediate_size": 64}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "dense": ("llama", LARGE, {}, "files"),
    "tied": ("qwen3", LARGE, {}, "shared"),
    "experts": ("qwen3_moe", EXPERTS, {}, "group"),
    "adapters": ("qwen3", LARGE, {"rank": 4}, "files"),
}


async def sample(engine: VllmEngine) -> list[Completion]:
    requests = (Request(f"prompt {n}", prompt, (1,), SAMPLING) for n, prompt in enumerate(PROMPTS[:2]))
    return [completion for (completion,) in await asyncio.gather(*(engine.generate(request) for request in requests))]


async def follow(path: str, folder: Path, port: int, lora: dict[str, Any], send: Any) -> list[list[Completion]]:
    """What an engine that has read no weights samples after each sync."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True}
    engine = await VllmEngine.start(
        settings(Path(path), folder, options=options, max_tokens=128, lora_rank=lora.get("rank")), version=None
    )
    ticket, answers = Ticket("127.0.0.1", port, KEY, "it", 0, 200.0), []
    sending = asyncio.create_task(asyncio.to_thread(send))
    try:
        for version in VERSIONS:
            await engine.receive(ticket, version)
            assert engine.version == version
            answers.append(await sample(engine))
        await sending
    finally:
        await engine.close()
    return answers


async def fresh(path: Path, folder: Path, adapter: Path | None = None, rank: int | None = None) -> list[Completion]:
    """What an engine that is started from an export says; adapter: its export, over the base at `path`."""
    options = {"options": {"skip_tokenizer_init": True}, "max_tokens": 128, "lora_rank": rank}
    engine = await VllmEngine.start(settings(path, folder, name="fresh", **options), version=VERSIONS[-1])
    try:
        if adapter is not None:
            async with engine._update(VERSIONS[-1]):
                shutil.copytree(adapter, engine._adapters, dirs_exist_ok=True)
                await engine._load_adapter()
        return await sample(engine)
    finally:
        await engine.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_after_each_sync_it_samples_from_what_was_exported(name: str, tmp_path: Path) -> None:
    family, changes, lora, transport = CASES[name]
    path = saved_model(family, **changes)
    port = free_port()
    sync = SyncOptions(transport, 30_000, 2, 200.0, tmp_path / "sync")

    def send() -> None:
        pool.run(2, train_and_send, path, "2", lora, sync, port, str(tmp_path), "")

    answers = asyncio.run(follow(path, tmp_path / "engines", port, lora, send))
    for version, completions in zip(VERSIONS, answers, strict=True):
        folder = tmp_path / str(version)
        if lora:
            output = str(tmp_path / f"merged-{version}")
            folder = Path(merge.run(MergeOptions(path=str(folder), base=path, output=output, dtype="fp32")))
        model = plain(folder)
        for prompt, completion in zip(PROMPTS, completions, strict=False):
            assert completion.versions == ((version, 16),)
            assert is_of(model, prompt, completion)
    last, logs = tmp_path / str(VERSIONS[-1]), tmp_path / "engines"
    fresh_answers = fresh(Path(path), logs, last, lora["rank"]) if lora else fresh(last, logs)
    assert answers[-1] == asyncio.run(fresh_answers)


SYNCS, GAP = 6, 5  # versions, and the one before which the trainer forgets what the engine has


def send_deltas(path: str, port: int, folder: str) -> list[Synced]:
    """Sends what a small learning rate changes, and exports the last version."""
    trainer = open_engine(path, "1")
    options = SyncOptions("shared", 30_000, 2, 200.0, None, torch.bfloat16, "delta")
    sender = Sender(trainer, [EngineTarget("it")], options, port=port, key=KEY)
    generator, synced = torch.Generator().manual_seed(3), list[Synced]()
    for version in range(1, SYNCS + 1):
        with torch.no_grad():  # about what a step of Adam does at this learning rate
            for parameter in trainer.module.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.add_(1e-5 * (2 * torch.rand(local.shape, generator=generator) - 1))
        if version == GAP:
            sender._bases["shared"].version = 2
        synced.append(sender.send(version))
    sender.close()
    save_huggingface(trainer, Path(folder))
    return synced


@pytest.mark.timeout(600)
def test_deltas_lead_to_what_an_export_leads_to(tmp_path: Path) -> None:
    """Of bf16 weights, over six syncs, every other read back from vLLM; a gap forces a full one. In the end vLLM
    samples exactly what a vLLM that was started from the export samples."""
    path, port, results = saved_model("qwen3", **LARGE), free_port(), list[Synced]()

    async def follow_all() -> list[Completion]:
        options = {"load_format": "dummy", "skip_tokenizer_init": True}
        engine = await VllmEngine.start(
            settings(Path(path), tmp_path / "engines", options=options, max_tokens=128, dtype="bfloat16"), version=None
        )
        ticket = Ticket("127.0.0.1", port, KEY, "it", 0, 200.0)
        sending = asyncio.create_task(
            asyncio.to_thread(lambda: results.extend(pool.run(1, send_deltas, path, port, str(tmp_path / "last"))[0]))
        )
        try:
            for version in range(1, SYNCS + 1):
                await engine.receive(ticket, version)
            await sending
            return await sample(engine)
        finally:
            await engine.close()

    async def fresh_one() -> list[Completion]:
        fresh_settings = settings(
            tmp_path / "last", tmp_path / "engines", name="fresh", options={"skip_tokenizer_init": True},
            max_tokens=128, dtype="bfloat16",
        )  # fmt: skip
        engine = await VllmEngine.start(fresh_settings, version=SYNCS)
        try:
            return await sample(engine)
        finally:
            await engine.close()

    patched = asyncio.run(follow_all())
    shares = [synced.extra["sync/sent_gb"] * 1e9 / synced.bytes for synced in results]
    print("share of the bytes that was sent:", [f"{share:.3f}" for share in shares])
    dense = [n for n, share in enumerate(shares, 1) if share == pytest.approx(1.0)]
    assert dense == [1, GAP] and max(share for n, share in enumerate(shares, 1) if n not in dense) < 0.7
    assert [bool(synced.note) for synced in results] == [n == GAP for n in range(1, SYNCS + 1)]
    assert patched == asyncio.run(fresh_one())
