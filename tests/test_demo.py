"""The inputs of `make demo`, read as training reads them. The demo itself is too long for the suite."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from tests import forked
from weft.config import SftConfig, load_config
from weft.data.documents import load_documents
from weft.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent


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
