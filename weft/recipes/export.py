"""`weft export`: writes a HuggingFace directory from a checkpoint's master weights, or their average, in one process.

It processes one tensor at a time, so memory must hold only the largest tensor, never the whole model.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.dcp import write_dcp
from weft.checkpoint.export import FullTensors, export_alone, plan_export, plan_files
from weft.checkpoint.resume import read_verified
from weft.checkpoint.retention import TRAINER_STATE, commit, complete_steps, step_folder
from weft.checkpoint.snapshot import DTYPES, names_to_export
from weft.checkpoint.state import EMA, OPTIMIZER, DamagedError, TrainerState, check_contents, read_state, tied_names
from weft.config.load import imports_of_run
from weft.config.schema import ModelConfig
from weft.engine.build import BuiltModel, build_model
from weft.engine.score_head import score_of
from weft.errors import UserError
from weft.launch.options import ExportOptions
from weft.models import hf
from weft.parallel.shards.adapter_files import CONFIG, read_config
from weft.parallel.shards.boxes import Box, overlap
from weft.parallel.shards.dcp import is_dcp
from weft.parallel.shards.digests import DIGESTS, check_digests
from weft.parallel.shards.load import read_whole
from weft.parallel.shards.rank_files import holds_rank_files
from weft.parallel.shards.safetensors_files import TensorFile


@dataclass
class TensorShapes:
    """The shapes of an engine, for plan_export."""

    built: BuiltModel


def run(options: ExportOptions) -> Path:
    """Writes the directory and returns its path. For a run with adapters it contains the adapter; `weft merge` writes
    the model. Raises UserError if the checkpoint has no complete trainer state with master weights."""
    imported = [*imports_of_run(options.path), *options.imports]
    hf.import_architectures(imported, options.model or options.path, "--import")
    if options.model is not None:
        return _convert(options, options.model)
    checkpoint = find_checkpoint(Path(options.path))
    try:
        state = read_state(checkpoint)
        check_contents(state, 0, 1)
    except DamagedError as error:
        raise UserError(f"{checkpoint} contains no master weights to export: {error}.") from error
    if options.ema and not any(name.startswith(EMA) for name in state.content["tensors"]):
        raise UserError(
            f"--ema: {checkpoint} has no average of the weights, because its run had no optimizer.ema_decay."
        )
    name = f"{checkpoint.name}-{'ema-' * options.ema}{'dcp-' * (options.format == 'dcp')}{options.weights_dtype}"
    target = Path(options.output) if options.output else checkpoint.with_name(name)
    write = partial(_write, state, options)
    if (checkpoint / CONFIG).is_file():
        if options.format == "dcp":
            quoted = shlex.quote(str(checkpoint))
            raise UserError(f"--format dcp: {checkpoint} is an adapter: weft merge {quoted} writes the model.")
        write = partial(_write_adapter, state, options)
    write_folder(target, write)
    return target


def _convert(options: ExportOptions, model: str) -> Path:
    """Converts another trainer's checkpoint to a HuggingFace directory. model: the HuggingFace model with its config
    and tokenizer."""
    built = _built(ModelConfig(path=model, dcp_weights=options.path))
    assert built.load is not None
    load, dtype = built.load, DTYPES[options.weights_dtype]
    target = Path(options.output) if options.output else Path(f"{options.path.rstrip('/')}-{options.weights_dtype}")
    try:
        plan = plan_export(TensorShapes(built), dtype)
        write_folder(
            target, lambda folder: export_alone(plan, FullTensors(list(load.fills), partial(read_whole, load)), folder)
        )
    finally:
        load.source.close()
    return target


def check(path: Path) -> str:
    """Compares a checkpoint's weights, and its trainer state if there is one, with their digests. Returns a message for
    the user. Raises UserError if they differ, or if there are no digests."""
    checkpoint = find_checkpoint(path)
    folders = [folder.parent for folder in (checkpoint / DIGESTS, *sorted(checkpoint.glob(f"*/{DIGESTS}")))]
    if not os.path.lexists(checkpoint / DIGESTS):
        raise UserError(
            f"--check: {checkpoint} contains no {DIGESTS} to compare with. checkpoint.verify=digest, weft export and "
            "weft merge write this file."
        )
    compared = sum(check_digests(folder) for folder in folders)
    if not (checkpoint / TRAINER_STATE).is_dir():
        return f"{checkpoint}: {compared:,} bytes of weights equal their digests"
    try:
        read_verified(checkpoint, 0, 1, {}, weights=False)
    except DamagedError as error:
        raise UserError(f"{checkpoint} is damaged: {error}.") from error
    return f"{checkpoint}: {compared:,} bytes of weights and the trainer state equal their digests"


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` to fill a temporary folder, then renames it to `target`. Raises UserError if `target` exists."""
    if target.exists():
        raise UserError(f"--output: {target} already exists: write another path.")
    unfinished = target.with_name(target.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    write(unfinished)
    commit(unfinished, target)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path: the newest of a run folder, or the path itself if it is a model or adapter. Raises
    UserError for any other path."""
    steps = complete_steps(path / "checkpoints")
    if steps:
        return step_folder(path / "checkpoints", steps[-1])
    if any((path / name).is_file() for name in ("config.json", CONFIG)):
        return path.resolve()  # the path may be the link `latest`
    if is_dcp(path) or holds_rank_files(path):
        raise UserError(
            f"{path} is another trainer's checkpoint: set --model to the HuggingFace model with its config and "
            "tokenizer, a folder or a hub id."
        )
    raise UserError(f"{path}: neither a run folder with checkpoints nor a checkpoint: write RUN/checkpoints/step-N.")


def _built(config: ModelConfig) -> BuiltModel:
    score = score_of(config.path)
    return build_model(config, dtype=torch.float32, compute=torch.float32, device=torch.device("cpu"), score=score)


def _write(state: TrainerState, options: ExportOptions, folder: Path) -> None:
    """Writes a model without adapters. Names, file layout and tokenizer come from the checkpoint's HuggingFace files.
    If options.dtype is auto, the dtypes do, too."""
    built, average = _built(ModelConfig(path=str(state.checkpoint))), options.ema
    plan = plan_export(TensorShapes(built), DTYPES[options.weights_dtype])
    stored, owners = names_to_export(state.content["tensors"], average=average), tied_names(built.module)
    names = {name: stored[owners.get(name, name)] for name in built.module.state_dict()}
    with _weights(state, names) as weights, ExitStack() as stack:
        if built.load is not None:
            stack.callback(built.load.source.close)
        if options.format == "hf":
            export_alone(plan, weights, folder)
            return
        prefix, scalars = f"{OPTIMIZER}step/", state.content["scalars"].items()
        step_counts = {name.removeprefix(prefix): float(v["value"]) for name, v in scalars if name.startswith(prefix)}
        moments = {}
        steps = {name: step_counts[owners.get(name, name)] for name in names if owners.get(name, name) in step_counts}
        for key, stored in _moments(state).items() if options.optimizer else ():
            moment_names = {name: stored[owners.get(name, name)] for name in names if owners.get(name, name) in stored}
            moments[key] = stack.enter_context(_weights(state, moment_names))
        write_dcp(plan, weights, folder, hf.tied_parameters(built.module.hf_model), moments, steps)


def _moments(state: TrainerState) -> dict[str, dict[str, str]]:
    """Key of the optimizer state -> parameter -> name of the tensor in the trainer state."""
    moments: dict[str, dict[str, str]] = {}
    for entry in state.content["tensors"]:
        if entry.startswith(OPTIMIZER):
            key, _, name = entry.removeprefix(OPTIMIZER).partition("/")
            moments.setdefault(key, {})[name] = entry
    return moments


def _write_adapter(state: TrainerState, options: ExportOptions, folder: Path) -> None:
    """Writes the adapter of a run with adapters, in options.dtype."""
    dtype, average = DTYPES[options.weights_dtype], options.ema
    entries, names = state.content["tensors"], names_to_export(state.content["tensors"], average=average)
    tensors = {
        name: torch.empty(
            entries[stored]["shape"], dtype=dtype or getattr(torch, entries[stored]["dtype"]), device="meta"
        )
        for name, stored in names.items()
    }
    plan = plan_files(tensors, read_config(state.checkpoint), state.checkpoint)
    with _weights(state, names) as weights:
        export_alone(plan, weights, folder)


@contextmanager
def _weights(state: TrainerState, names: Mapping[str, str]) -> Iterator[FullTensors]:
    """The full tensors of a trainer state, assembled from the files of all ranks. names: name in the model -> name in
    the state."""
    with ExitStack() as stack:
        files = [(file.boxes, stack.enter_context(TensorFile.open(state.folder / file.name))) for file in state.files]

        def read(name: str) -> Tensor:
            stored = names[name]
            entry = state.content["tensors"][stored]
            full = Box.from_shape(tuple(entry["shape"]))
            values = torch.empty(full.size, dtype=getattr(torch, entry["dtype"]))
            for boxes, file in files:
                if stored in boxes:
                    start, size = boxes[stored]
                    box = Box(tuple(start), tuple(size))
                    assert overlap(box, full) == box, stored
                    values[box.within(full)] = file.read(stored)
            return values

        yield FullTensors(list(names), read)
