"""`weft distill` with a teacher that a real vLLM serves: the same as lists that transformers has computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.reward_job import run_weft, write_model
from tests.support.toy_tokenizers import write_jsonl
from tests.support.vllm_server import vllm_server
from tests.vllm.conftest import SETTINGS

TOP_K, PROMPT = 12, 4  # tokens of a list; of a document that are not trained


@pytest.mark.timeout(900)
def test_a_served_teacher_is_its_lists(tmp_path: Path) -> None:
    """Loss and gradient norm of three steps, on two ranks; tokens of the data are not always among the likeliest."""
    write_model("qwen3", tmp_path / "student", seed=0)
    write_model("llama", tmp_path / "teacher", seed=1)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32).eval()
    rows = list[dict[str, Any]]()
    for n in range(12):
        ids = [(11 * n + 5 * t + t * t) % 250 + 5 for t in range(10 + 2 * n)]
        with torch.no_grad():
            logprobs = teacher(input_ids=torch.tensor([ids])).logits[0, PROMPT - 1 : -1].log_softmax(-1)
        values, tops = logprobs.topk(TOP_K)
        lists = {"teacher_top_ids": tops.tolist(), "teacher_top_logprobs": values.tolist()}
        rows.append({"input_ids": ids, "labels": [-100] * PROMPT + ids[PROMPT:], **lists})
    write_jsonl(tmp_path / "rows.jsonl", *rows)
    with vllm_server(tmp_path / "teacher", "teacher", tmp_path / "log") as url:
        ours, served = (
            distilled(tmp_path, name, of)
            for name, of in (
                ("data", ["distill.teacher=data"]),
                ("served", [f"distill.teacher={url}", f"distill.top_k={TOP_K}"]),
            )
        )
    assert len(ours) == 3 and ours[0]["divergence"] > 0.1
    for from_data, from_server in zip(ours, served, strict=True):
        for name in ("loss", "divergence", "grad_norm"):
            assert from_server[name] == pytest.approx(from_data[name], rel=1e-5), name


def distilled(folder: Path, name: str, words: list[str]) -> list[dict[str, Any]]:
    """The steps of a run."""
    run_weft(
        "weft", "distill", f"model.path={folder}/student", f"data.path={folder}/rows.jsonl", f"run.dir={folder}/{name}",
        "step.documents=4", "train.epochs=1", "optimizer.lr=1e-3", "--nproc", "2", "--device", "cpu", *words,
        without=list(SETTINGS),
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]
