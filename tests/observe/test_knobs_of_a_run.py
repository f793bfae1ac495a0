"""The knobs in `weft sft`: what a run says of them at start, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft import cli
from weft.models import hf


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model and data, in which this process stands."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    config = tiny_config("llama", vocab_size=264)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(tmp_path / "model")
    write_jsonl(tmp_path / "chats.jsonl", *(chat(("user", "ab"), ("assistant", "cd" * (i + 1))) for i in range(8)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


COMMAND = ["sft", "model.path=model", "data.path=chats.jsonl", "step.documents=2", "step.max_tokens_per_device=64"]


def test_the_start_says_what_was_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    knobs = [
        "model.freeze=[model.embed_tokens]",
        "model.recompute=full",
        "fsdp.wrap=[layers, LlamaMLP]",
        "fsdp.overrides={model.layers.1: replicate}",
        "fsdp.prefetch=[2, 1]",
        "fsdp.cpu_offload=true",
        "fsdp.cast_forward_inputs=[lm_head]",
        "optimizer.state_dtype=bf16",
        "run.dir=all",
    ]
    assert cli.main([*COMMAND, *knobs, "--verbose"]) == 0
    out = capsys.readouterr().out
    printed = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line.split()}
    assert printed["fsdp"] == (
        "fsdp reshard_after_forward true, gradients reduced: scatter, prefetch 2 ahead in forward and 1 in backward, "
        "parameters, gradients and optimizer state on the host"
    )
    assert "weights" in printed["memory"] and "a rank, gathered units" in printed["memory"]
    assert printed["host"].endswith("of host memory per rank for checkpoint copies")
    assert printed["layers"] == "layers run again in backward (recompute)"
    assert printed["hint"].startswith("hint 4 optimizer steps in all")  # others are for accelerators
    flat = " ".join(out.split())
    assert "optimizer bfloat16 state" in flat
    assert "inputs float32 cast for lm_head" in flat
    assert "frozen 0 1 16.9K model.embed_tokens" in flat
    assert "2 model.layers.*.mlp" not in flat  # one of them is replicated with its layer
    assert "model.layers.1 12.4K 48.5 KiB replicated" in flat
    lines = [json.loads(line) for line in (folder / "all" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and "loss_scale" not in lines[0]


def test_a_run_in_fp16_writes_its_loss_scale_and_survives_overflows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp16 = ["fsdp.param_dtype=fp16", "fsdp.loss_scale=1073741824", "train.max_nonfinite=1", "train.epochs=5"]
    assert cli.main([*COMMAND, *fp16, "run.dir=half", "--verbose"]) == 0
    assert "loss scale 1.07374e+09, doubled after 2000 steps" in capsys.readouterr().out
    lines = [json.loads(line) for line in (folder / "half" / "metrics.jsonl").read_text().splitlines()]
    skipped = [line for line in lines if line.get("skipped")]
    assert 1 < len(skipped) < len(lines) == 20
    assert [line["loss_scale"] for line in skipped] == [2.0 ** (30 - k) for k in range(len(skipped))]
    assert all("fp16 overflow at loss scale" in line["reason"] and line["lr"] is None for line in skipped)
    assert lines[-1]["loss"] < lines[len(skipped)]["loss"]
    summary = json.loads((folder / "half" / "summary.json").read_text())
    assert summary["skipped_steps"] == len(skipped)
