"""`weft merge`: a HuggingFace model from a base and an adapter, in one process, tensor by tensor.

W + s B A is computed in fp32 and rounded once, to the dtype that the base's files have.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
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
from weft.models.build import build_model
from weft.models.load import LoadPlan, read_whole
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
    with TensorFile.open(adapter / WEIGHTS) as file:
        written = write_export(plan, _Merged(load, lora, file, list(built.module.state_dict())), folder)
    load.source.close()
    assert written == plan.bytes, f"{written} of {plan.bytes} bytes written"


class _Merged(Mapping[str, Shard]):
    """The whole merged weights by the model's names, each computed when it is asked for. One is kept, because pieces of
    the same tensor follow one another."""

    def __init__(self, load: LoadPlan, lora: LoraPlan, file: TensorFile, names: list[str]) -> None:
        self.load, self.lora, self.file, self.names = load, lora, file, names
        self.targets = {target.weight: target for target in lora.targets}
        trained = [name for name in names if lora.trains(name)]
        self.stored = file_names([*(name for target in lora.targets for name in target.names), *trained])
        self._last: tuple[str, Shard] | None = None

    def __getitem__(self, name: str) -> Shard:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is read: memory holds one
            values = self._merged(name)
            self._last = name, Shard(Box.whole(tuple(values.shape)), values)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _merged(self, name: str) -> Tensor:
        if name in self.stored:
            return self.file.read(self.stored[name])
        weight, target = read_whole(self.load, name), self.targets.get(name)
        if target is None:
            return weight
        a, b = (self.file.read(self.stored[matrix]).float() for matrix in target.names)
        return add_delta(weight.float(), target, self.lora, a, b)


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
