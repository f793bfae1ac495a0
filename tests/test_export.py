"""The saved directory is what transformers itself would have saved, with the trainer's weights in it.

The yardstick is a plain transformers model that is given the trainer's masters: its save_pretrained says names, shapes
and layout, the source's files say dtypes, and its logits are what AutoModelForCausalLM must give from the directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from tests.cases import _folder, open_engine
from tests.pool import run
from tests.toy_tokenizers import byte_tokenizer
from tests.zoo import tiny_config
from weft.checkpoint import export
from weft.engine.engine import Engine
from weft.objectives.cross_entropy import CrossEntropy
from weft.verification.documents import awkward_steps
from weft.verification.harness import to_documents

FAMILIES = (
    "llama", "llama_tied", "qwen3", "gemma2", "gemma3_text", "stablelm", "lfm2", "gpt2", "phi", "qwen3_moe", "mixtral",
    "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next", "llama4_text",
)  # fmt: skip
Tensors = dict[str, Tensor]


# ---------------------------------------------------------------- sources


@cache
def source(family: str, dtype: str) -> Path:
    """A checkpoint as a user finds it: weights in one dtype but for what stays fp32, dropout on, tokenizer beside."""
    path = Path(_folder.name) / f"export-{family}-{dtype}"
    config = tiny_config(family)
    if hasattr(config, "attention_dropout"):
        config.attention_dropout = 0.1
    model = _plain_class(config)._from_config(config, dtype=torch.float32)
    _fill_buffers(model)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    if dtype == "bf16":  # loaded by transformers, which knows what must stay fp32
        _plain_class(config).from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def _fill_buffers(model: PreTrainedModel) -> None:
    """Persistent buffers (router biases) are zero in a fresh model, and something in a real one."""
    generator = torch.Generator().manual_seed(0)
    for buffer in (value for key, value in model.state_dict().items() if key in dict(model.named_buffers())):
        buffer.copy_(torch.rand(buffer.shape, generator=generator) / 10)


def _plain_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    return getattr(transformers, config.architectures[0])  # type: ignore[no-any-return]


def variant(name: str, family: str, dtype: str, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a source with other tensors in its file."""
    path = Path(_folder.name) / f"export-{name}"
    if not path.exists():
        shutil.copytree(source(family, dtype), path)
        save_file(change(tensors_of(path)), path / "model.safetensors", {"format": "pt"})
    return path


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a directory's safetensors files; no name may occur twice."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not found.keys() & part.keys()
        found |= part
    return found


# ---------------------------------------------------------------- the engine's side


def trained_engine(path: str, mesh: str, **sections: dict[str, Any]) -> Engine:
    """An engine two steps after the source."""
    engine = open_engine(path, mesh, **sections)
    for step in awkward_steps(128)[:2]:
        documents, metas = to_documents(engine, step)
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        assert not engine.apply(1e-2).skipped
    return engine


def train_and_save(path: str, mesh: str, folder: str, shard_bytes: int = 10**9, **sections: dict[str, Any]) -> None:
    """Leaves the directory in FOLDER/saved and the masters, whole, in FOLDER/masters.pt."""
    engine = trained_engine(path, mesh, **sections)
    export.save_huggingface(engine, Path(folder, "saved"), shard_bytes=shard_bytes)
    masters = {name: tensor.cpu().clone() for name, tensor in engine.tensors()}
    if engine.ranks.is_first:
        torch.save(masters, Path(folder, "masters.pt"))


# ---------------------------------------------------------------- the yardstick


def plain_model(path: Path, masters: Tensors) -> PreTrainedModel:
    """transformers' own model of the source, in fp32, with the trainer's weights."""
    model = _plain_class(AutoConfig.from_pretrained(path)).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    model.load_state_dict(masters, strict=True)
    return model.eval()


def expected_tensors(model: PreTrainedModel, path: Path, folder: Path) -> Tensors:
    """What it writes, each tensor in the dtype of the source's file."""
    model.save_pretrained(folder / "plain")
    before = tensors_of(path)
    usual = torch.bfloat16 if any(t.dtype == torch.bfloat16 for t in before.values()) else torch.float32
    return {
        name: tensor.to(before[name].dtype if name in before else usual)
        for name, tensor in tensors_of(folder / "plain").items()
    }


def assert_same_tensors(saved: Tensors, expected: Tensors) -> None:
    """Names, shapes, dtypes and bits."""
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert saved[name].dtype == tensor.dtype, name
        assert torch.equal(saved[name], tensor), name


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.tensor([[5, 17, 99, 3, 64, 28, 31, 7, 120, 55, 42, 9, 11, 77, 80, 21, 14, 90, 33]])
    return model(input_ids=ids, use_cache=False).logits


def rounded(model: PreTrainedModel, expected: Tensors, folder: Path) -> PreTrainedModel:
    """The plain model with its weights rounded to what the file can hold, by transformers' own reading of it."""
    save_file(expected, folder / "plain" / "model.safetensors", {"format": "pt"})
    return type(model).from_pretrained(folder / "plain", dtype=torch.float32, attn_implementation="eager").eval()


def check(path: Path, mesh: str, folder: Path, **sections: dict[str, Any]) -> None:
    """Train, save, and compare all of it."""
    run(int(mesh), _train_and_save, str(path), mesh, str(folder), sections)
    saved, masters = folder / "saved", torch.load(folder / "masters.pt")
    model = plain_model(path, masters)
    expected = expected_tensors(model, path, folder)
    assert_same_tensors(tensors_of(saved), expected)
    assert not all(torch.equal(expected[n], t) for n, t in tensors_of(path).items() if n in expected), "nothing moved"
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(rounded(model, expected, folder)))
    if all(tensor.dtype == torch.float32 for tensor in expected.values()):
        assert torch.equal(logits(loaded), logits(model))


def _train_and_save(path: str, mesh: str, folder: str, sections: dict[str, dict[str, Any]]) -> None:
    train_and_save(path, mesh, folder, **sections)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "mesh"), [("fp32", "1"), ("bf16", "2"), ("bf16", "3")])
def test_weights_are_the_masters(family: str, dtype: str, mesh: str, tmp_path: Path) -> None:
    path = source(family, dtype)
    check(path, mesh, tmp_path)
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(path).keys()
