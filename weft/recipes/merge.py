"""`weft merge`: a HuggingFace model from a base and an adapter, in one process, tensor by tensor.

W + s B A (LoRA, arXiv:2106.09685) is computed in fp32 and rounded once, to the dtype of the base's files or to --dtype.
If the run stored W in fewer bits (lora.base), the merged model differs from the trained one by the rounding of W, which
weft measures. With --base-format, the adapter is added to the rounded W instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.export import FullTensors, copy_companions, export_alone, plan_export
from weft.checkpoint.snapshot import DTYPES
from weft.config.load import imports_of_run, section_of_run
from weft.config.schema import LoraConfig, ModelConfig
from weft.data.encode import load_tokenizer
from weft.data.ends import GENERATION, answer_ends, template_ends
from weft.engine.build import build_model
from weft.engine.score_head import score_of
from weft.errors import UserError
from weft.launch.options import MergeOptions
from weft.models import hf
from weft.models.lora import LoraPlan, add_delta
from weft.models.train_module import TrainModule
from weft.ops import low_bit
from weft.ops.low_bit import FORMATS, MXFP4, Format
from weft.parallel.quantise import base_format, quantisable
from weft.parallel.shards.adapter_files import CONFIG, WEIGHTS, file_names, read_config
from weft.parallel.shards.load import LoadPlan, read_whole
from weft.parallel.shards.safetensors_files import TensorFile
from weft.recipes.export import TensorShapes, find_checkpoint, write_folder
from weft.terminal import say

_TASKS: dict[str, hf.ScoreTask] = {"SEQ_CLS": "sequence", "TOKEN_CLS": "token"}  # peft's names
_HEAD = re.compile(r"base_model\.model\.(score|classifier)\.weight")


def run(options: MergeOptions) -> Path:
    """Writes the merged model and returns its folder. Raises UserError if base and adapter do not fit."""
    hf.import_architectures([*imports_of_run(options.path), *options.imports], options.path, "--import")
    adapter = find_checkpoint(Path(options.path))
    if not (adapter / CONFIG).is_file():
        raise UserError(f"{adapter} contains no {CONFIG}, so it is a complete model and needs no merge.")
    config = read_config(adapter)
    base, revision = options.base or config.get("base_model_name_or_path"), config.get("revision")
    if options.base is None and revision not in (None, "main") and not Path(str(base)).is_dir():
        raise UserError(
            f"{adapter / CONFIG}: the adapter needs revision {revision} of {base}, but weft reads the newest revision. "
            f"Download that revision, hf download {base} --revision {revision} --local-dir BASE, then use --base BASE."
        )
    if not base:
        raise UserError(f"{adapter / CONFIG} has no name of a base model: set --base.")
    target = Path(options.output) if options.output else adapter.with_name(f"{adapter.name}-merged")
    lora = section_of_run(options.path, "lora")
    trained = FORMATS.get(str(lora.get("base")))
    trained = None if trained is MXFP4 else trained  # the files have this format
    chosen = options.base_format or (str(lora.get("base")) if lora.get("init") == "loftq" else "compute")
    report = MergeReport(trained, FORMATS.get(chosen))
    write_folder(target, lambda partial: _write(adapter, str(base), partial, DTYPES[options.dtype], report))
    for line in report.describe():
        say(line)
    return target


@dataclass
class MergeReport:
    """The difference between the merged weights and the trained ones. trained: the format in which the run stored the
    base. merged: the format of the base to which adapters are added. None: the compute dtype. norms: name -> the norm
    of a weight's difference, relative to the weight's norm."""

    trained: Format | None
    merged: Format | None
    norms: dict[str, float] = field(default_factory=dict)

    def base(self, form: Format | None, weight: Tensor, compute: torch.dtype) -> Tensor:
        """The fp32 weight of the base in a format."""
        return (weight if form is None else low_bit.rounded(form, weight.to(compute))).float()

    def describe(self) -> list[str]:
        """Lines for the user; none if the base was not stored in fewer bits."""
        if self.trained is None or not self.norms:
            return []
        mean, worst = sum(self.norms.values()) / len(self.norms), max(self.norms, key=lambda name: self.norms[name])
        advice = "" if self.merged is self.trained else f"; --base-format {self.trained.name} merges into that base"
        return [
            f"merged weights differ from the trained ones, whose base is in {self.trained.title}, by {mean:.2%} of "
            f"their norm on average and {self.norms[worst]:.2%} in {worst}{advice}"
        ]


def _write(adapter: Path, base: str, folder: Path, dtype: torch.dtype | None, report: MergeReport) -> None:
    task = _TASKS.get(str(read_config(adapter).get("task_type")))
    with TensorFile.open(adapter / WEIGHTS) as file:
        heads = [entry.shape[0] for name, entry in file.entries.items() if _HEAD.fullmatch(name)]
    score = None if task is None or not heads else score_of(base, heads[0], task)
    built = build_model(
        ModelConfig(path=base, ignore_weights=("*",)),  # the adapter has no targets among weights outside of the class
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
    copy_companions(
        adapter, folder
    )  # first, because the tokenizer of the training run takes precedence over the base's
    if not (folder / GENERATION).is_file():
        plan = replace(plan, texts=_ends_of_another_template(adapter, base))
    with TensorFile.open(adapter / WEIGHTS) as file:
        names = list(built.module.state_dict())
        quantised = _quantised_names(built.module, load, report)
        export_alone(plan, FullTensors(names, _merged(load, lora, file, names, quantised, report)), folder)
    load.source.close()


def _ends_of_another_template(adapter: Path, base: str) -> dict[str, str]:
    """A generation_config.json with the tokens that end answers in the adapter's chat template, if the base has another
    template. peft saves no such file. Without it, a base that learned a template would never end its turn."""
    try:
        tokenizer, before = load_tokenizer(str(adapter)), load_tokenizer(base)
    except UserError:  # some adapters have no tokenizer
        return {}
    taught = template_ends(tokenizer) if tokenizer.chat_template != before.chat_template else []
    return answer_ends(base, tokenizer, taught).files(base)


def _quantised_names(module: TrainModule, load: LoadPlan, report: MergeReport) -> set[str]:
    """Names of the weights that a format rounds, without weights that the files already have in this format."""
    module.requires_grad_(False)
    names = set[str]()
    for form in (report.trained, report.merged):
        if form is not None:
            base = base_format(form.name, load)
            names |= quantisable(module, {}, base).keys() - base.kept
    return names


def _merged(
    load: LoadPlan, lora: LoraPlan, file: TensorFile, names: list[str], quantised: set[str], report: MergeReport
) -> Callable[[str], Tensor]:
    """Returns a function: name of a weight -> the merged weight, in fp32 if the adapter, or a format, changes it."""
    targets = {target.weight: target for target in lora.targets}
    trained = [name for name in names if lora.trains(name)]
    stored = file_names([*(name for target in lora.targets for name in lora.tensors(target)), *trained])

    def merged(name: str) -> Tensor:
        if name in stored:
            return file.read(stored[name])
        weight, target = read_whole(load, name), targets.get(name)
        compute = weight.dtype
        if name in quantised and report.merged is not None:
            weight = report.base(report.merged, weight, compute)
        if target is None:
            return weight
        values = {matrix: file.read(stored[matrix]).float() for matrix in lora.tensors(target)}
        merged_weight = add_delta(weight.to(torch.float32, copy=True), target, lora, values)
        if name in quantised and report.trained is not None:
            start = report.base(report.trained, read_whole(load, name), compute)
            trained_weight = add_delta(start, target, lora, values)
            written = merged_weight.to(compute).float()
            report.norms[name] = float((written - trained_weight).norm() / trained_weight.norm())
        return merged_weight

    return merged
