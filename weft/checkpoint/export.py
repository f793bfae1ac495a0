"""A HuggingFace model directory from a sharded model: what transformers, peft and vLLM load as they are."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from weft.engine.engine import Engine
from weft.errors import UserError
from weft.models import hf

# Files of the source that describe the tokenizer and how to generate; weights and config are written anew.
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*", "*.model", "*.tiktoken", "tekken.json", "normalizer.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_SHARD_BYTES = 5 * 10**9
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save_step(engine: Engine, checkpoints: Path, step: int) -> Path:
    """Write checkpoints/step-000100 and point `latest` at it; collective. The folder appears whole or not at all."""
    target = checkpoints / f"step-{step:06d}"
    if engine.ranks.is_first:
        checkpoints.mkdir(parents=True, exist_ok=True)
    save_huggingface(engine, target)
    if engine.ranks.is_first:
        link = checkpoints / "latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, checkpoints / "latest")
    dist.barrier()
    return target


def save_huggingface(engine: Engine, target: Path, *, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write the model as a HuggingFace directory; collective. The first rank holds the whole model while it writes.

    shard_bytes: the largest weight file; one tensor that is larger has a file of its own.
    """
    model, tensors = engine.built.module.hf_model, {}
    tied = hf.tied_parameters(model)
    for name, tensor in engine.tensors():
        if engine.ranks.is_first and name not in tied:
            tensors[name] = tensor.cpu()
    if engine.ranks.is_first:
        _write(engine, hf.to_disk_layout(model, tensors), target, shard_bytes)
    dist.barrier()


def manifest(engine: Engine) -> dict[str, Tensor]:
    """Names, shapes and dtypes of what a save writes, on meta; tied tensors once, under their owner's name.

    Raises UserError where transformers' conversion rules would lose weights.
    """
    model = engine.built.module.hf_model
    tied = hf.tied_parameters(model)
    tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in engine.module.state_dict().items()
        if name not in tied
    }
    on_disk = hf.to_disk_layout(model, tensors)
    lost = sum(tensor.numel() for tensor in tensors.values()) - sum(tensor.numel() for tensor in on_disk.values())
    if lost:
        raise UserError(
            f"model.path: transformers' rules for writing {type(model).__name__} as this checkpoint lays it out would "
            f"lose {lost:,} weights. Is it quantised? Use a checkpoint in bf16 or fp32."
        )
    return _in_dtypes_of(engine.built.source_dtypes, on_disk)


def _write(engine: Engine, tensors: Mapping[str, Tensor], target: Path, shard_bytes: int) -> None:
    """Everything is written beside the target first, over what a killed save may have left there."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    promised = manifest(engine)
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in promised.items()}
    _write_weights(tensors, promised, partial, shard_bytes)
    _write_config(engine, promised, partial)
    if engine.built.source is not None:
        copy_companions(engine.built.source, partial)
    _commit(partial, target)


def _commit(partial: Path, target: Path) -> None:
    """Put a whole folder in its place. One that is there already makes way only now, by a rename."""
    replaced = target.with_name(target.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.rename(target, replaced)
    os.rename(partial, target)
    shutil.rmtree(replaced, ignore_errors=True)


def _in_dtypes_of(dtypes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Meta tensors, the floating-point ones in the dtype that the source's files have for their names.

    A name that they do not have, or have quantised (a prefix that this model's class writes and they lack, the other
    name of a tied weight) gets the dtype of most of them; without files every tensor keeps its own.
    """
    floats = {name: _FLOATS[dtype] for name, dtype in dtypes.items() if dtype in _FLOATS}
    usual = Counter(floats.values()).most_common(1)
    out = {}
    for name, tensor in tensors.items():
        dtype = floats.get(name, usual[0][0]) if tensor.is_floating_point() and usual else tensor.dtype
        # A tensor of its own: experts taken out of one tensor are views, and would count as much as it does.
        out[name] = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return out


def _write_weights(
    tensors: Mapping[str, Tensor], promised: Mapping[str, Tensor], folder: Path, shard_bytes: int
) -> None:
    """model.safetensors, or several files and their index. Cast file by file: one file's worth is held twice."""
    split = split_torch_state_dict_into_shards(dict(promised), max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        part = {name: tensors[name].to(promised[name].dtype).contiguous() for name in names}
        save_file(part, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(engine: Engine, promised: Mapping[str, Tensor], target: Path) -> None:
    """The source's config.json as it was read, except for what the written weights say.

    Not config.save_pretrained: it renames keys that older readers need (rope_theta, torch_dtype), and it raises, at
    the end of a training run, where an old config.json holds generation settings.
    """
    raw, _ = PretrainedConfig.get_config_dict(engine.config.model.path)
    raw.pop("_commit_hash", None)
    model = engine.built.module.hf_model
    raw["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    if engine.built.config.tie_word_embeddings and not hf.tied_parameters(model):
        # The source's head differed from its embedding, so that they were loaded, and trained, apart.
        raw["tie_word_embeddings"] = False
    if "torch_dtype" not in raw:
        raw["dtype"] = None
    _describe_weights(raw, str(_most_common_dtype(promised)).removeprefix("torch."))
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _most_common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """By number of elements."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]


def _describe_weights(config: dict[str, Any], dtype: str) -> None:
    """Their dtype, under the key that the config and each sub-config has; they are not quantised, whatever was read."""
    config.pop("quantization_config", None)
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            config[key] = dtype
        elif isinstance(value, dict) and "model_type" in value:
            _describe_weights(value, dtype)


def copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template and generation config, byte for byte."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            if file.is_file() and not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
