"""A HuggingFace model directory from a sharded model: what transformers, peft and vLLM load as they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

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


def save_huggingface(engine: Engine, target: Path) -> None:
    """Write the model as a HuggingFace directory; collective. The first rank holds the whole model while it writes."""
    tensors = {}
    for name, tensor in engine.tensors():
        if engine.ranks.is_first:
            tensors[name] = tensor.cpu()
    if engine.ranks.is_first:
        _write(engine, tensors, target)
    dist.barrier()


def _write(engine: Engine, tensors: dict[str, Tensor], target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    built = engine.built
    on_disk = hf.to_disk_layout(built.module.hf_model, _retied(tensors, built.module.hf_model))
    cast = cast_to_source(on_disk, built.source_dtypes)
    save_torch_state_dict(cast, partial, max_shard_size=_SHARD_BYTES, metadata={"format": "pt"})
    _write_config(engine, cast, partial)
    if built.source is not None:
        copy_companions(built.source, partial)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)


def _retied(tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Tied names as one tensor again, which is how the conversion rules know what to write once."""
    for name, owner in hf.tied_parameters(model).items():
        if name in tensors and owner in tensors:
            tensors[name] = tensors[owner]
    return tensors


def cast_to_source(tensors: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """Each tensor in the dtype that the source's files have for its name; unchanged where they do not have it."""
    return {
        name: (tensor.to(SAFETENSORS_DTYPES[dtypes[name]]) if name in dtypes else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def _write_config(engine: Engine, tensors: Mapping[str, Tensor], target: Path) -> None:
    """The source's own config, dropout included, with the dtype that most of the written weights have."""
    config = hf.read_config(engine.config.model.path)
    config.architectures = [type(engine.built.module.hf_model).__name__.removeprefix("FSDP")]
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    config.dtype = max(sizes, key=lambda dtype: sizes[dtype])
    config.save_pretrained(target)


def copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template and generation config, byte for byte."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
