"""`weft merge`: a HuggingFace model from a base and an adapter, in one process, tensor by tensor.

W + s B A is computed in fp32 and rounded once, to the dtype that the base's files have.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.boxes import Box, Shard
from weft.checkpoint.export import copy_companions, plan_export, prepare_export, write_export
from weft.checkpoint.files import TensorFile
from weft.checkpoint.retention import commit
from weft.checkpoint.save import DTYPES
from weft.cluster.options import MergeOptions
from weft.config.schema import LoraConfig, ModelConfig
from weft.errors import UserError
from weft.models.adapter_files import CONFIG, WEIGHTS, file_names, read_config
from weft.models.build import BuiltModel, build_model
from weft.models.load import read_whole
from weft.models.lora import LoraPlan, Target
from weft.recipes.export import Shapes, find_checkpoint


def run(options: MergeOptions) -> Path:
    """Write the merged model and return its folder. Raises UserError where base and adapter do not fit."""
    adapter = find_checkpoint(Path(options.path))
    if not (adapter / CONFIG).is_file():
        raise UserError(f"{adapter} holds no {CONFIG}: it is a whole model, with nothing to merge.")
    base = options.base or read_config(adapter).get("base_model_name_or_path")
    if not base:
        raise UserError(f"{adapter / CONFIG} does not say what it was trained on: name it with --base.")
    target = Path(options.output) if options.output else adapter.with_name(f"{adapter.name}-merged")
    if target.exists():
        raise UserError(f"--output: {target} exists already: name another folder.")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _write(adapter, str(base), partial, DTYPES[options.dtype])
    commit(partial, target)
    return target


def _write(adapter: Path, base: str, folder: Path, dtype: torch.dtype | None) -> None:
    built = build_model(
        ModelConfig(path=base, ignore_weights=("*",)),  # what the class does not have cannot be merged into
        LoraConfig(path=str(adapter)),
        dtype=torch.float32,
        compute=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        adapters="merged",
    )
    plan, lora, load = plan_export(Shapes(built), dtype), built.lora, built.load
    assert lora is not None and load is not None
    folder.mkdir(parents=True)
    copy_companions(adapter, folder)  # the tokenizer that was trained with, before the base's
    prepare_export(plan, folder)
    adapted = {target.weight: target for target in lora.targets}
    written = 0
    with TensorFile.open(adapter / WEIGHTS) as file:
        names = file_names([*(n for t in lora.targets for n in t.names), *_trained(built, lora)])
        for runtime in dict.fromkeys(piece.runtime for piece in plan.pieces):
            if runtime in names:
                values = file.read(names[runtime])
            else:
                values = read_whole(load, runtime)
            if runtime in adapted:
                target = adapted[runtime]
                matrices = [file.read(names[name]).float() for name in target.names]
                values = add_delta(values.float(), target, lora, *matrices)
            written += write_export(plan, {runtime: Shard(Box.whole(tuple(values.shape)), values)}, folder)
    load.source.close()
    assert written == plan.bytes, f"{written} of {plan.bytes} bytes written"


def _trained(built: BuiltModel, lora: LoraPlan) -> list[str]:
    return [name for name in built.module.state_dict() if lora.trains(name)]


def add_delta(weight: Tensor, target: Target, lora: LoraPlan, a: Tensor, b: Tensor) -> Tensor:
    """W + s B A, in place, in fp32; of fused experts each with its own."""
    if target.kind == "experts":
        a_Eri, b_orE = a.view(target.experts, lora.rank, -1), b.view(len(b), lora.rank, target.experts)
        deltas: Iterable[Tensor] = (b_orE[:, :, expert] @ a_Eri[expert] for expert in range(target.experts))
    else:
        weight, deltas = weight[None], [b @ a]
    for own, delta in zip(weight, deltas, strict=True):
        own.add_(delta.T if target.transposed else delta, alpha=lora.scale)
    return weight if target.kind == "experts" else weight[0]
