"""Weights from trainer ranks reach vLLM through weft's sync: it samples what transformers computes from the export, and
exactly what a vLLM that was started from the export samples."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.inference.test_weight_sync import KEY, VERSIONS, train_and_send
from tests.support import pool
from tests.support.cases import saved_model
from tests.vllm.test_vllm_engine import PROMPTS, is_of, plain, settings
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.vllm.engine import VllmEngine
from weft.inference.weight_sync.protocol import Ticket
from weft.inference.weight_sync.sender import SyncOptions
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
