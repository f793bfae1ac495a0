"""Whole runs on a device: the 0.6B example for twenty steps, and a small one that is resumed bit for bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.cuda.cases import kind
from tests.support.resuming import STEPS, attempt, equal, inputs, lines, state_of
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from weft.launch.process import Ranks

ROOT = Path(__file__).parent.parent.parent
# Qwen/Qwen3-0.6B's config.json. On a CPU: what its parts are, in small.
QWEN3: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    """A model directory without weights, and chats that can be learned: sums, written out at length."""
    path, large = tmp_path_factory.mktemp("run"), device.type == "cuda"
    config = transformers.Qwen3Config(**{**QWEN3, **({} if large else SMALL)})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    source = random.Random(0)
    sums = [[source.randrange(1000) for _ in range(source.randrange(2, 60 if large else 6))] for _ in range(640)]
    write_jsonl(
        path / "chats.jsonl", *(chat(("user", "Add up."), ("assistant", _sum_in_words(terms))) for terms in sums)
    )
    return path


def _sum_in_words(terms: list[int]) -> str:
    totals = [sum(terms[: n + 1]) for n in range(len(terms))]
    return " ".join(f"plus {term} is {total};" for term, total in zip(terms, totals, strict=True))


def weft(folder: Path, *words: str) -> str:
    """What the command prints. It has a process, and a process group, of its own."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "weft", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(300)
def test_the_example_learns_and_goes_on_from_its_checkpoint(folder: Path, device: torch.device) -> None:
    words = [
        str(ROOT / "examples" / "sft_qwen3_0.6b.yaml"), "model.path=model", "model.init=random",
        "data.path=chats.jsonl", "train.epochs=null", "train.steps=20", "schedule.warmup_steps=3", "run.dir=run",
        "checkpoint.every=10", "checkpoint.keep=null",
    ]  # fmt: skip
    small = ["step.documents=8", "step.max_tokens_per_device=1024", "data.max_length=1024", "optimizer.lr=1e-2"]
    words += small if device.type == "cpu" else ["optimizer.lr=5e-4"]
    output = weft(folder, "sft", *words, "--device", kind(device), "--nproc", "1")
    print(output)
    first = lines(folder / "run")
    assert [line["step"] for line in first] == list(range(1, 21))
    assert all(line["loss"] > 0 and not line.get("skipped") for line in first)
    assert first[-1]["loss"] < 0.75 * first[0]["loss"]
    times = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    print([(line["tokens_per_second"], line["memory_gib"], line["mfu"]) for line in times])
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "run" / "checkpoints" / "latest")
    assert all(bool(parameter.isfinite().all()) for parameter in saved.parameters())
    last = folder / "run" / "checkpoints" / "step-000020"
    last.rename(folder / "aside")
    assert "step 10 of 20" in weft(folder, "sft", "--resume", "run", "--device", kind(device), "--nproc", "1")
    second = lines(folder / "run")
    assert [line["step"] for line in second] == list(range(1, 21)) and second[:10] == first[:10]
    assert second[10]["loss"] == pytest.approx(first[10]["loss"], rel=1e-3)
    assert second[-1]["loss"] == pytest.approx(first[-1]["loss"], rel=5e-2)  # kernels add in any order


def test_a_resumed_run_is_the_one_that_was_not_stopped_bit_for_bit(
    device: torch.device, ranks: Ranks, tmp_path: Path
) -> None:
    """Under train.deterministic, as docs/reference/checkpoints.md says; in bf16, with asynchronous saves."""
    sections = {"train": {"deterministic": True}, "fsdp": {"param_dtype": "bf16"}, "checkpoint": {"async_": True}}
    home, uninterrupted, cut = str(inputs()), tmp_path / "whole", tmp_path / "cut"
    try:
        drawn = attempt(home, str(uninterrupted), "1", False, None, sections, None, kind(device))
        parts = attempt(home, str(cut), "1", False, 4, sections, None, kind(device))
        parts += attempt(home, str(cut), "1", True, None, sections, None, kind(device))
    finally:
        torch.use_deterministic_algorithms(False)
    assert parts == drawn
    assert lines(cut) == lines(uninterrupted)
    assert equal(state_of(cut, STEPS), state_of(uninterrupted, STEPS))
