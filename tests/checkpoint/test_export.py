"""The saved directory is what transformers itself would have saved, with the trainer's weights in it.

The yardstick is a plain transformers model that is given the trainer's masters: its save_pretrained says names, shapes
and layout, the source's files say dtypes, and its logits are what AutoModelForCausalLM must give from the directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
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

from tests.support.cases import open_engine, pairs, world_of
from tests.support.pool import run
from tests.support.toy_tokenizers import byte_tokenizer
from tests.support.zoo import tiny_config
from weft.checkpoint import export
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.errors import StorageError, UserError
from weft.inference.weight_sync import buckets
from weft.models import hf
from weft.parallel.shards.safetensors_files import create
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

FAMILIES = (
    "llama", "llama_tied", "qwen3", "gemma2", "gemma3_text", "stablelm", "lfm2", "gpt2", "phi", "qwen3_moe", "mixtral",
    "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next", "llama4_text",
)  # fmt: skip
Tensors = dict[str, Tensor]
_folder = tempfile.TemporaryDirectory(prefix="weft-export-")


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
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


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
    assert not all(torch.equal(masters[name], tensor) for name, tensor in model.named_parameters()), "nothing moved"
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
    run(world_of(mesh), _train_and_save, str(path), mesh, str(folder), sections)
    saved, masters = folder / "saved", torch.load(folder / "masters.pt")
    model = plain_model(path, masters)
    expected = expected_tensors(model, path, folder)
    assert_same_tensors(tensors_of(saved), expected)
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(rounded(model, expected, folder)))
    if all(tensor.dtype == torch.float32 for tensor in expected.values()):
        assert torch.equal(logits(loaded), logits(model))


def _train_and_save(path: str, mesh: str, folder: str, sections: dict[str, dict[str, Any]]) -> None:
    train_and_save(path, mesh, folder, **sections)


# ---------------------------------------------------------------- weights


DTYPES_AND_MESHES = [("fp32", "1"), ("bf16", "2")]


@pytest.mark.parametrize(("family", "dtype", "mesh"), pairs(
    [(family, *DTYPES_AND_MESHES[number % 2]) for number, family in enumerate(FAMILIES)],
    [(family, *DTYPES_AND_MESHES[number % 2 - 1]) for number, family in enumerate(FAMILIES)],
))  # fmt: skip
def test_weights_are_the_masters(family: str, dtype: str, mesh: str, tmp_path: Path) -> None:
    path = source(family, dtype)
    check(path, mesh, tmp_path)
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(path).keys()


@pytest.mark.parametrize(("family", "mesh"), pairs(
    [("qwen3", "3"), ("qwen3", "2x1"), ("qwen3_moe", "2x2")],
    [("qwen3_moe", "3"), ("qwen3_moe", "2x1"), ("qwen3", "2x2")],
))  # fmt: skip
def test_other_meshes(family: str, mesh: str, tmp_path: Path) -> None:
    check(source(family, "bf16"), mesh, tmp_path)


def test_what_the_source_keeps_in_fp32_stays_so(tmp_path: Path) -> None:
    path = source("deepseek_v3", "bf16")
    check(path, "2", tmp_path)
    saved = tensors_of(tmp_path / "saved")
    fp32_names = {name for name, tensor in saved.items() if tensor.dtype == torch.float32}
    assert fp32_names == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    for name in fp32_names:  # a buffer: no gradient, so it comes back as it was
        assert torch.equal(saved[name], tensors_of(path)[name]) and bool(saved[name].any())


def save_in_bf16(path: str, folder: str) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Leaves the export in FOLDER. Returns name -> dtype in the export's plan, and in what engines are sent."""
    engine = open_engine(path, "1")
    plan = export.plan_export(engine, torch.bfloat16)
    export.save_planned(engine, plan, export.written_shards(engine), Path(folder))
    sent = buckets.weights(engine, torch.bfloat16).manifest
    return {name: (tensor.dtype, sent[name].dtype) for name, tensor in plan.manifest.items()}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_router_biases_stay_fp32_whatever_dtype_is_asked_for(family: str, tmp_path: Path) -> None:
    """Rounded, they would choose other experts in the served model than in the trained one."""
    path = source(family, "bf16")
    [dtypes] = run(1, save_in_bf16, str(path), str(tmp_path / "saved"))
    biases = {name for name in dtypes if name.endswith("e_score_correction_bias")}
    assert biases and all(pair == (torch.float32,) * 2 for name, pair in dtypes.items() if name in biases)
    assert all(pair == (torch.bfloat16,) * 2 for name, pair in dtypes.items() if name not in biases)
    saved, before = tensors_of(tmp_path / "saved"), tensors_of(path)
    assert all(torch.equal(saved[name], before[name]) and bool(saved[name].any()) for name in biases)


def test_a_config_names_the_dtype_of_most_elements() -> None:
    """Not of most tensors: norms and gates in fp32 are many, and small."""
    small = {name: torch.ones(2) for name in "abc"}
    assert export._most_common_dtype({**small, "large": torch.ones(9, dtype=torch.bfloat16)}) == torch.bfloat16


def test_bf16_masters(tmp_path: Path) -> None:
    check(source("llama", "fp32"), "2", tmp_path, fsdp={"master_dtype": "bf16"})


# ---------------------------------------------------------------- names


def with_head(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    """The same tensors and an lm_head made of the embedding."""
    return lambda tensors: tensors | {"lm_head.weight": change(tensors["model.embed_tokens.weight"]).contiguous()}


def test_a_tied_head_in_the_file_is_written_once(tmp_path: Path) -> None:
    check(variant("with-head", "qwen3", "bf16", with_head(torch.clone)), "2", tmp_path)
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(source("qwen3", "bf16")).keys()


def test_a_tied_head_instead_of_the_embedding(tmp_path: Path) -> None:
    def renamed(tensors: Tensors) -> Tensors:
        return {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}

    check(variant("only-head", "qwen3", "bf16", renamed), "2", tmp_path)


def test_a_head_that_differs_although_the_config_ties_it(tmp_path: Path) -> None:
    path = variant("other-head", "qwen3", "bf16", with_head(lambda embedding: embedding.flip(0)))
    check(path, "2", tmp_path)
    assert read_json(path / "config.json")["tie_word_embeddings"] is True
    assert read_json(tmp_path / "saved" / "config.json")["tie_word_embeddings"] is False


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_the_file_holds_fused_stay_fused(family: str, tmp_path: Path) -> None:
    path = tmp_path / "fused"
    shutil.copytree(source(family, "bf16"), path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors_of(path)
    check(path, "2", tmp_path)
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(path).keys()


def test_a_file_without_the_base_prefix_keeps_its_dtype(tmp_path: Path) -> None:
    def bare(tensors: Tensors) -> Tensors:
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    check(variant("bare", "llama_tied", "bf16", bare), "2", tmp_path)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "saved").values()} == {torch.bfloat16}


def manifest_under_lossy_rules(path: str) -> None:
    rules = hf.run_rules_backwards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "run_rules_backwards", lambda *args: dict(list(rules(*args).items())[1:]))
        with pytest.raises(UserError, match=r"would lose weights of lm_head.weight \(1 in all\). Is it quantised"):
            open_engine(path, "1")


def test_rules_that_lose_a_weight_are_refused() -> None:
    run(1, manifest_under_lossy_rules, str(source("llama", "bf16")))


# ---------------------------------------------------------------- config and companions


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def edited(folder: Path, family: str, dtype: str, changes: dict[str, Any]) -> Path:
    """A copy of a source whose config.json differs; a change to None removes the key."""
    shutil.copytree(source(family, dtype), folder)
    config = read_json(folder / "config.json") | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(("family", "dtype"), pairs(
    [("llama", "fp32"), ("qwen3_moe", "bf16"), ("gemma3_text", "fp32"), ("gpt_oss", "bf16")],
    [("llama", "bf16"), ("qwen3_moe", "fp32"), ("gemma3_text", "bf16"), ("gpt_oss", "fp32")],
))  # fmt: skip
def test_config_and_companions_are_those_of_the_source(family: str, dtype: str, tmp_path: Path) -> None:
    path = source(family, dtype)
    run(1, train_and_save, str(path), "1", str(tmp_path))
    saved = tmp_path / "saved"
    assert read_json(saved / "config.json") == read_json(path / "config.json")
    config = AutoConfig.from_pretrained(saved)
    assert config.attention_dropout == 0.1  # 0 in training
    assert config.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    companions = {file.name for file in path.iterdir() if file.suffix != ".safetensors"} - {"config.json"}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= companions
    assert {file.name for file in saved.iterdir()} == companions | {"config.json", "model.safetensors"}
    for name in companions:
        assert (saved / name).read_bytes() == (path / name).read_bytes()
    assert AutoTokenizer.from_pretrained(saved)("text").input_ids == byte_tokenizer()("text").input_ids


def test_a_config_as_the_hub_has_it_keeps_its_keys(tmp_path: Path) -> None:
    """Old key names, generation settings that transformers will not write again, a dtype that the files belie."""
    rope = {"rope_theta": 5e5, "rope_parameters": None}
    old = {"torch_dtype": "float16", "dtype": None, "temperature": 0.6, "architectures": None}
    path = edited(tmp_path / "old", "llama", "bf16", rope | old)
    run(1, train_and_save, str(path), "1", str(tmp_path))
    config = read_json(tmp_path / "saved" / "config.json")
    assert config.pop("architectures") == ["LlamaForCausalLM"]
    assert config == read_json(path / "config.json") | {"torch_dtype": "bfloat16"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16


def test_random_weights_are_written_in_fp32_and_the_config_says_so(tmp_path: Path) -> None:
    path = edited(tmp_path / "shape", "llama", "bf16", {"quantization_config": {"quant_method": "fp8"}})
    run(1, train_and_save_random, str(path), str(tmp_path))
    saved = tmp_path / "saved"
    assert {tensor.dtype for tensor in tensors_of(saved).values()} == {torch.float32}
    assert read_json(saved / "config.json") == read_json(source("llama", "bf16") / "config.json") | {"dtype": "float32"}
    assert AutoModelForCausalLM.from_pretrained(saved, dtype="auto").dtype == torch.float32


def train_and_save_random(path: str, folder: str) -> None:
    train_and_save(path, "1", folder, model={"init": "random"})


def save_from_the_cache(hub: str, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", hub)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        train_and_save("someone/tiny", "1", folder)


def test_a_model_of_the_hub_is_saved_like_a_directory(tmp_path: Path) -> None:
    path, repository, commit = source("qwen3", "bf16"), tmp_path / "hub" / "models--someone--tiny", "a" * 40
    shutil.copytree(path, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    run(1, save_from_the_cache, str(tmp_path / "hub"), str(tmp_path))
    saved = tmp_path / "saved"
    assert {file.name for file in saved.iterdir()} == {file.name for file in path.iterdir()}
    assert read_json(saved / "config.json") == read_json(path / "config.json")
    assert {tensor.dtype for tensor in tensors_of(saved).values()} == {torch.bfloat16}


def quantised_gpt_oss(folder: Path) -> Path:
    """As the real checkpoints are: experts in MXFP4 (two numbers a byte, a scale for 32), the rest in bf16."""
    config = tiny_config("gpt_oss", intermediate_size=64)
    _plain_class(config)._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = tensors_of(folder)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        blocks = torch.arange(experts * outer * inner // 2).reshape(experts, outer, inner // 32, 16) * 37 % 251
        tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 122, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = read_json(folder / "config.json")
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_quantised_experts_are_saved_in_bf16(tmp_path: Path) -> None:
    path = quantised_gpt_oss(tmp_path / "mxfp4")
    run(1, train_and_save, str(path), "1", str(tmp_path))
    saved, masters = tmp_path / "saved", torch.load(tmp_path / "masters.pt")
    assert_same_tensors(tensors_of(saved), {name: tensor.bfloat16() for name, tensor in masters.items()})
    assert "quantization_config" not in read_json(saved / "config.json")
    assert AutoModelForCausalLM.from_pretrained(saved, dtype="auto").dtype == torch.bfloat16


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_in_several_files(family: str, tmp_path: Path) -> None:
    path, saved, max_bytes = source(family, "fp32"), tmp_path / "saved", 60_000
    run(2, train_and_save, str(path), "2", str(tmp_path), max_bytes)
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) > 2 and not (saved / "model.safetensors").exists()
    assert [file.name for file in files] == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    index = read_json(saved / "model.safetensors.index.json")
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    for file in files:
        tensors = load_file(file).values()
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= max_bytes
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(saved).values())
    model = plain_model(path, torch.load(tmp_path / "masters.pt"))
    assert_same_tensors(tensors_of(saved), expected_tensors(model, path, tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager").eval()
    assert torch.equal(logits(loaded), logits(model))


def save_over_litter(path: str, mesh: str, folder: str) -> None:
    engine, target = trained_engine(path, mesh), Path(folder)
    _litter(engine, target.with_name("saved.partial"))
    export.save_huggingface(engine, target)
    export.save_huggingface(engine, target)


def _litter(engine: Engine, partial: Path) -> None:
    """What a killed save leaves."""
    if engine.ranks.is_first:
        partial.mkdir()
        (partial / "model-00001-of-00009.safetensors").write_bytes(b"half")


def test_a_weight_file_of_another_size_is_found(tmp_path: Path) -> None:
    """Whatever checkpoint.verify says."""
    plan = export.ExportPlan([], {"a": torch.ones(3)}, {"model.safetensors": ["a"]}, None, {}, None)
    create(tmp_path / "model.safetensors", plan.layouts["model.safetensors"])
    export.check_sizes(plan, tmp_path)
    os.truncate(tmp_path / "model.safetensors", 10)
    with pytest.raises(StorageError, match=r"model.safetensors has 10 bytes on disk, but \d+ were written"):
        export.check_sizes(plan, tmp_path)


def test_leftovers_do_not_disturb_and_a_save_takes_the_place_of_another(tmp_path: Path) -> None:
    run(2, save_over_litter, str(source("llama", "bf16")), "2", str(tmp_path / "saved"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert not list((tmp_path / "saved").glob("model-*"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def killed_while_saving(path: str, folder: str, step: str) -> int:
    """Save twice, the second time in a child that is killed where `step` of export.py is entered; its exit status."""
    engine, first, two = trained_engine(path, "1"), Path(folder, "one"), Path(folder, "two")
    export.save_huggingface(engine, first)
    child = os.fork()
    if child == 0:
        setattr(export, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        export.save_huggingface(engine, two)
    status = os.waitpid(child, 0)[1]
    entries = sorted(entry.name for entry in first.parent.iterdir())
    assert entries == ["one", "two.partial"], entries
    export.save_huggingface(engine, two)
    return status


@pytest.mark.parametrize("function", ["create", "write_export", "copy_companions", "commit"])
def test_a_killed_save_leaves_no_checkpoint(function: str, tmp_path: Path) -> None:
    status = run(1, killed_while_saving, str(source("llama", "bf16")), str(tmp_path), function)[0]
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one", "two"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "two")


# ---------------------------------------------------------------- draft layers


def with_drafts(prefix: str) -> Callable[[Tensors], Tensors]:
    """The same tensors and a layer for multi-token prediction, partly in fp32, that transformers' class lacks."""

    def add(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(1)
        drafts = {
            f"{prefix}{name.removeprefix('model.layers.1.')}": torch.randn(t.shape, generator=generator).to(t.dtype)
            for name, t in tensors.items()
            if name.startswith("model.layers.1.")
        }
        return tensors | drafts | {f"{prefix}eh_proj.weight": torch.randn(64, 128, generator=generator)}

    return add


def source_with_drafts(family: str, dtype: str, prefix: str) -> Path:
    path = variant(f"{family}-drafts", family, dtype, with_drafts(prefix))
    config = read_json(path / "config.json") | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("family", "prefix", "mesh"),
    [("qwen3_next", "mtp.layers.0.", "2"), ("deepseek_v3", "model.layers.3.", "pp2"), ("llama", "mtp.layers.0.", "1")],
)
def test_draft_layers_are_copied_byte_for_byte(family: str, prefix: str, mesh: str, tmp_path: Path) -> None:
    """transformers' class does not have them; without them an engine cannot speculate with the export."""
    path = source_with_drafts(family, "bf16", prefix)
    run(world_of(mesh), train_and_save, str(path), mesh, str(tmp_path))
    saved, before = tensors_of(tmp_path / "saved"), tensors_of(path)
    assert saved.keys() == before.keys()
    drafts = [name for name in before if name.startswith(prefix)]
    assert len(drafts) > 5
    for name in drafts:
        assert saved[name].dtype == before[name].dtype and torch.equal(saved[name], before[name]), name
    assert read_json(tmp_path / "saved" / "config.json") == read_json(path / "config.json")
    # The export is a source like any other: nothing of it is refused, and its own export is the same.
    (tmp_path / "again").mkdir()
    run(1, train_and_save, str(tmp_path / "saved"), "1", str(tmp_path / "again"))
    resaved = tensors_of(tmp_path / "again" / "saved")
    assert_same_tensors({name: resaved[name] for name in drafts}, {name: before[name] for name in drafts})


def test_a_layer_that_the_config_forgets_is_no_draft_layer() -> None:
    """It would be left out of training."""

    def layer(tensors: Tensors) -> Tensors:
        extended = with_drafts("model.layers.3.")(tensors)
        return {name: tensor for name, tensor in extended.items() if "eh_proj" not in name}

    path = variant("forgotten-layer", "deepseek_v3", "bf16", layer)
    assert "DeepseekV3ForCausalLM does not have" in run(1, refusal, str(path))[0]


def refusal(path: str) -> str:
    try:
        open_engine(path, "1")
    except UserError as error:
        return str(error)
    return ""
