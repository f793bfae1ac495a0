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
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from weft.engine.engine import Engine
from weft.models import hf

# Files of the source that describe the tokenizer and how to generate; weights and config are written anew.
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.model", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_SHARD_BYTES = 5 * 10**9
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


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
    tensors = {}
    for name, tensor in engine.tensors():
        if engine.ranks.is_first:
            tensors[name] = tensor.cpu()
    if engine.ranks.is_first:
        _write(engine, tensors, target, shard_bytes)
    dist.barrier()


def _write(engine: Engine, tensors: dict[str, Tensor], target: Path, shard_bytes: int) -> None:
    """Everything is written beside the target first, over what a killed save may have left there."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model = engine.built.module.hf_model
    on_disk = hf.to_disk_layout(model, _retied(tensors, model))
    cast = cast_to_source(on_disk, engine.built.source_dtypes)
    save_torch_state_dict(cast, partial, max_shard_size=shard_bytes, metadata={"format": "pt"})
    _write_config(engine, cast, partial)
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


def _retied(tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Tied names as one tensor again, which is how the conversion rules know what to write once."""
    for name, owner in hf.tied_parameters(model).items():
        if name in tensors and owner in tensors:
            tensors[name] = tensors[owner]
    return tensors


def cast_to_source(tensors: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """Each tensor in the dtype that the source's files have for its name.

    A name that they do not have (a prefix that this model's class writes and they lack, the other name of a tied
    weight) gets the dtype of most of them; without files nothing is cast.
    """
    usual = Counter(dtypes.values()).most_common(1)[0][0] if dtypes else None
    out = {}
    for name, tensor in tensors.items():
        wanted = dtypes.get(name, usual if tensor.is_floating_point() else None)
        out[name] = (tensor if wanted is None else tensor.to(SAFETENSORS_DTYPES[wanted])).contiguous()
    return out


def _write_config(engine: Engine, tensors: Mapping[str, Tensor], target: Path) -> None:
    """The source's config.json as it was read, except for what the written weights say.

    Not config.save_pretrained: it renames keys that older readers need (rope_theta, torch_dtype), and it raises, at
    the end of a training run, where an old config.json holds generation settings.
    """
    raw, _ = PretrainedConfig.get_config_dict(engine.config.model.path)
    raw = {key: value for key, value in raw.items() if key != "_commit_hash"}
    model = engine.built.module.hf_model
    raw["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    if engine.built.config.tie_word_embeddings and not hf.tied_parameters(model):
        # The source's head differed from its embedding, so that they were loaded, and trained, apart.
        raw["tie_word_embeddings"] = False
    raw.setdefault("torch_dtype" if "torch_dtype" in raw else "dtype", None)
    _set_dtype(raw, str(_most_common_dtype(tensors)).removeprefix("torch."))
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _most_common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """By number of elements."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """In the config and its sub-configs, under the key that each has."""
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            config[key] = dtype
        elif isinstance(value, dict) and "model_type" in value:
            _set_dtype(value, dtype)


def copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template and generation config, byte for byte."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
