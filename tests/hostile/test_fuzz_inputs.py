"""Rows, configs, chat templates and metrics, damaged at random: refused in a sentence, in time and in little memory."""

from __future__ import annotations

# ruff: noqa: E501
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fuzz import fuzz
from tests.support.toy_tokenizers import CHATML, byte_tokenizer
from weft.config import load_config
from weft.config.rl_schema import RlConfig
from weft.config.schema import DataConfig
from weft.data.chat_template import chosen_template
from weft.data.encode import Encoder, Encoding
from weft.data.records import ParseOptions, Record
from weft.data.sources import open_data
from weft.observe.report.page import page
from weft.observe.report.read import read_run

ROWS = [
    b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "train": true}]}\n',
    b'{"prompt": "a", "completion": "b"}\n{"text": "some text"}\n',
    b'{"instruction": "do", "input": "this", "output": "done", "history": [["a", "b"]]}\n',
    b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"}\n',
    b'{"messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"a\\"}, {\\"role\\": \\"assistant\\", \\"content\\": \\"b\\"}]"}\n',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "",'
    b' "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}]}, {"role": "tool",'
    b' "content": "3"}, {"role": "assistant", "content": "c", "weight": 1}], "tools": [{"name": "f"}],'
    b' "chat_template_kwargs": {"a": 1}}\n',
]
CONFIGS = [
    b"model: {path: m/m}\ndata:\n  path: d/d\n  columns: {prompt: a, completion: b.c}\n  template_kwargs: {x: true}\n"
    b"step: {documents: 8, max_tokens_per_device: 4096}\noptimizer:\n  lr: 1e-5\n  betas: [0.9, 0.95]\n",
    b"model: &m\n  path: m/m\ndata:\n  sources:\n    - {path: a/b, weight: 2, name: x}\n    - {path: c/d}\n"
    b"train: {steps: 5, seed: 0x10}\nfsdp:\n  prefetch: [1, 2]\n  overrides: {lm_head: full}\n",
    b"model.path: m/m\ndata.path: d/d\n# a comment\nrun: {dir: null}\nlora: {rank: 8, targets: [q_proj, 'k?']}\n",
    b'{"model": {"path": "m/m"}, "data": {"path": "d/d"}, "eval": {"prompts": ["a", "b"], "every": 2}}',
    b"per_device_train_batch_size: 2\nlearning_rate: 1e-4\nmodel: {path: m/m}\ndata: {path: d/d}\n",
]
TEMPLATES = [
    CHATML.encode(),
    b"{% for m in messages %}{{ '<|start|>' + m['role'] ~ m.content | trim * 2 + '<|end|>\\n' }}{% endfor %}",
    b"{% macro m(x, y=1) %}{{ x | upper }}{% if y < 3 %}{{ m(x, y + 1) }}{% endif %}{% endmacro %}"
    b"{% set ns = namespace(n=0) %}{% for x in messages %}{% set ns.n = ns.n + loop.index * 2 ** 3 %}"
    b"{{ m(x.content) }}{{ ns.n }}{% endfor %}{{ '%05d' % 7 }}{{ '{:>9}'.format('a') }}",
    b"{%- for x in range(9999) %}{{ 'ab'.replace('a', 'bb').center(30) | indent(4) }}{% endfor -%}"
    b"{{ messages | tojson(indent=2) }}{{ [1, [2]] + [3] * 4 }}{{ 'a,b'.split(',') | join('x') }}",
]
METRICS = [
    b'{"step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100, "loss_tokens": 60, "seconds": 0.5}\n'
    b'{"step": 2, "loss": null, "lr": 1e-3, "skipped": true, "reason": "a", "epoch": 1, "time/forward": 0.2}\n'
    b'{"step": 3, "loss": 2.4, "eval/loss": 3.0, "eval/a/loss": 2, "eval/b/loss": 1, "mfu": 0.3, "memory_gib": 1.5}\n',
    b'{"step": 1, "rollout": 1, "reward": 0.5, "reward_std": 0.1, "rewards/a/mean": 1, "rewards/b/mean": 2, "kl": 0.1}\n'
    b'{"step": 2, "rollout": 2, "reward": 0.6, "seconds/rollout": 3.0, "seconds/train": 1, "eval/accuracy": 0.5}\n',
]


def read_rows(path: Path) -> None:
    for part in open_data(DataConfig(path=str(path)))[0].parts:
        for block in part.blocks():
            records = [record for _, record in block.records(ParseOptions())]
            ENCODER.encode(records)


def read_config(path: Path) -> None:
    load_config([str(path)], [])
    load_config([str(path)], [], RlConfig)


def render(path: Path) -> None:
    """A row through the template; and its verdict on the file alone."""
    source = chosen_template(DataConfig(path="x", chat_template=str(path)))
    assert source is not None
    Encoder(byte_tokenizer(), Encoding("all", source)).encode([ROW])


def report(path: Path) -> None:
    run = path.parent / "run"
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_bytes(path.read_bytes())
    text = path.read_bytes()
    for name in ("config.yaml", "summary.json", "samples.jsonl"):  # damage of any kind
        (run / name).write_bytes(text)
    page([read_run(run)])


ENCODER = Encoder(byte_tokenizer(), Encoding())
ROW = Record("a.jsonl:1", "messages", {"messages": [
    {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]})  # fmt: skip

TARGETS: dict[str, tuple[Callable[[Path], object], list[bytes], str]] = {
    "rows": (read_rows, ROWS, ".jsonl"),
    "a list of rows": (read_rows, [b"[" + rows.replace(b"\n", b",\n").rstrip(b",\n") + b"]" for rows in ROWS], ".json"),
    "configs": (read_config, CONFIGS, ".yaml"),
    "templates": (render, TEMPLATES, ".jinja"),
    "metrics": (report, METRICS, ".jsonl"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_damage(name: str) -> None:
    parse, seeds, suffix = TARGETS[name]
    fuzz(parse, seeds, 250, suffix=suffix)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_much_damage(name: str) -> None:
    parse, seeds, suffix = TARGETS[name]
    fuzz(parse, seeds, 20_000, suffix=suffix)
