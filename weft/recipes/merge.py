"""`weft merge`: a HuggingFace model from a base and an adapter, in one process, tensor by tensor.

W + s B A (LoRA, arXiv:2106.09685) is computed in fp32 and rounded once, to the dtype of the base's files or --dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.export import FullTensors, copy_companions, export_alone, plan_export
from weft.checkpoint.snapshot import DTYPES
from weft.config.load import imports_of_run
from weft.config.schema import LoraConfig, ModelConfig
from weft.data.encode import load_tokenizer
from weft.data.ends import GENERATION, answer_ends, template_ends
from weft.engine.build import build_model
from weft.engine.score_head import score_of
from weft.errors import UserError
from weft.launch.options import MergeOptions
from weft.models import hf
from weft.models.lora import LoraPlan, add_delta
from weft.parallel.shards.adapter_files import CONFIG, WEIGHTS, file_names, read_config
from weft.parallel.shards.load import LoadPlan, read_whole
from weft.parallel.shards.safetensors_files import TensorFile
from weft.recipes.export import TensorShapes, find_checkpoint, write_folder

_TASKS: dict[str, hf.ScoreTask] = {"SEQ_CLS": "sequence", "TOKEN_CLS": "token"}  # peft's names
_HEAD = re.compile(r"base_model\.model\.(score|classifier)\.weight")


def run(options: MergeOptions) -> Path:
    """Writes the merged model and returns its folder. Raises UserError if base and adapter do not fit."""
    hf.import_architectures([*imports_of_run(options.path), *options.imports], options.path, "--import")
    adapter = find_checkpoint(Path(options.path))
    if not (adapter / CONFIG).is_file():
        raise UserError(f"{adapter} holds no {CONFIG}: it is a whole model, with nothing to merge.")
    config = read_config(adapter)
    base, revision = options.base or config.get("base_model_name_or_path"), config.get("revision")
    if options.base is None and revision not in (None, "main") and not Path(str(base)).is_dir():
        raise UserError(
            f"{adapter / CONFIG}: the adapter belongs to revision {revision} of {base}, but weft reads the newest. "
            f"Download that revision, hf download {base} --revision {revision} --local-dir BASE, then use --base BASE."
        )
    if not base:
        raise UserError(f"{adapter / CONFIG} names no base model: set --base.")
    target = Path(options.output) if options.output else adapter.with_name(f"{adapter.name}-merged")
    write_folder(target, lambda partial: _write(adapter, str(base), partial, DTYPES[options.dtype]))
    return target


def _write(adapter: Path, base: str, folder: Path, dtype: torch.dtype | None) -> None:
    task = _TASKS.get(str(read_config(adapter).get("task_type")))
    with TensorFile.open(adapter / WEIGHTS) as file:
        heads = [entry.shape[0] for name, entry in file.entries.items() if _HEAD.fullmatch(name)]
    score = None if task is None or not heads else score_of(base, heads[0], task)
    built = build_model(
        ModelConfig(path=base, ignore_weights=("*",)),  # weights that the class lacks are no targets of the adapter
        LoraConfig(path=str(adapter)),
        dtype=torch.float32,
        compute=torch.float32,
        device=torch.device("cpu"),
        adapters="merged",
        score=score,
    )
    plan, lora, load = plan_export(TensorShapes(built), dtype), built.lora, built.load
    assert lora is not None and load is not None
    folder.mkdir(parents=True)
    copy_companions(adapter, folder)  # first: the tokenizer of the training run takes precedence over the base's
    if not (folder / GENERATION).is_file():
        plan = replace(plan, texts=_ends_of_another_template(adapter, base))
    with TensorFile.open(adapter / WEIGHTS) as file:
        names = list(built.module.state_dict())
        export_alone(plan, FullTensors(names, _merged(load, lora, file, names)), folder)
    load.source.close()


def _ends_of_another_template(adapter: Path, base: str) -> dict[str, str]:
    """A generation_config.json with the tokens that end answers in the adapter's chat template, if the base has another
    template. peft saves no such file: without it, a base that learnt a template would never end its turn."""
    try:
        tokenizer, before = load_tokenizer(str(adapter)), load_tokenizer(base)
    except UserError:  # not every adapter comes with a tokenizer
        return {}
    taught = template_ends(tokenizer) if tokenizer.chat_template != before.chat_template else []
    return answer_ends(base, tokenizer, taught).files(base)


def _merged(load: LoadPlan, lora: LoraPlan, file: TensorFile, names: list[str]) -> Callable[[str], Tensor]:
    """Returns a function: name of a weight -> the merged weight, in fp32 if the adapter changes it."""
    targets = {target.weight: target for target in lora.targets}
    trained = [name for name in names if lora.trains(name)]
    stored = file_names([*(name for target in lora.targets for name in target.names), *trained])

    def merged(name: str) -> Tensor:
        if name in stored:
            return file.read(stored[name])
        weight, target = read_whole(load, name), targets.get(name)
        if target is None:
            return weight
        a, b = (file.read(stored[matrix]).float() for matrix in target.names)
        return add_delta(weight.float(), target, lora, a, b)

    return merged
