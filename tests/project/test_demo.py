"""The inputs of `make demo`, read as training reads them. The demo itself is too long for the suite."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import forked
from weft.config import SftConfig, load_config
from weft.data.documents import load_documents
from weft.data.encode import load_tokenizer

ROOT = Path(__file__).parents[2]


def test_additions_read_as_what_they_are(tmp_path: Path) -> None:
    """Every answer is a sum that is right as it is written, ones first, and fits what a rollout may have of tokens."""
    words = [str(ROOT / "examples/make_arithmetic_demo.py"), str(tmp_path)]
    assert forked.run(partial(forked.script, words), tmp_path).returncode == 0
    tokenizer = load_tokenizer(str(tmp_path / "adder"))
    rollout = yaml.safe_load((ROOT / "examples/rl_arithmetic_cpu.yaml").read_text())["rollout"]
    rows = [json.loads(line) for name in ("additions", "held-out") for line in (tmp_path / f"{name}.jsonl").open()]
    assert len(rows) == 8100
    longest = 0
    for row in rows:
        numbers, parts = ([int(n) for n in text.split("+")] for text in (row["prompt"][:-1], row["completion"]))
        assert row["prompt"][-1] == "=" and sum(parts) == sum(numbers)
        assert parts[0] < 10 and [part for part in parts[1:] if part in (100, *range(10, 100, 10))] == parts[1:]
        prompt, completion = (tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
        assert len(prompt) == rollout["max_prompt_tokens"]
        assert [tokenizer.decode(ids) for ids in (prompt, completion)] == [row["prompt"], row["completion"]]
        longest = max(longest, len(completion) + 1)
    assert longest == rollout["max_new_tokens"]


def test_demo_inputs(tmp_path: Path) -> None:
    words = [str(ROOT / "examples/make_chat_demo.py"), str(tmp_path)]
    assert forked.run(partial(forked.script, words), tmp_path).returncode == 0
    chats = [json.loads(line)["messages"] for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    questions, answers = ([chat[i]["content"] for chat in chats] for i in (0, 1))
    assert len(chats) == len(set(questions)) == len(set(answers)) == 600
    assert all(20 <= len(answer) <= 200 for answer in answers)

    tokenizer = load_tokenizer(str(tmp_path / "model"))
    model_config = AutoConfig.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == model_config.vocab_size == 4096
    parameters = AutoModelForCausalLM.from_config(model_config).num_parameters()
    assert round(parameters / 1e6, 1) == 5.2
    documents, report = load_documents(
        str(tmp_path / "chat.jsonl"), tokenizer, max_length=1024, vocab_size=model_config.vocab_size
    )
    assert report.documents == 600
    for document, answer in zip(documents, answers, strict=True):
        assert tokenizer.decode(document.tokens[document.weights > 0].tolist()) == answer + "<|im_end|>"

    overrides = [f"model.path={tmp_path}/model", f"data.path={tmp_path}/chat.jsonl"]
    config: SftConfig = load_config([str(ROOT / "examples/sft_chat_cpu.yaml")], overrides)
    assert report.longest <= config.step.max_tokens_per_device
