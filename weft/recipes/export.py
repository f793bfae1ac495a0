"""`weft export`: a HuggingFace directory from a checkpoint's masters, or their average, in one process.

Tensor by tensor: memory holds the largest one, never the model.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.boxes import Box, Shard, overlap
from weft.checkpoint.export import commit, plan_export, prepare_export, write_export
from weft.checkpoint.files import TensorFile
from weft.checkpoint.retention import step_folder, whole_steps
from weft.checkpoint.save import DTYPES, exported
from weft.checkpoint.state import EMA, DamagedError, TrainerState, check_contents, read_state
from weft.cluster.options import ExportOptions
from weft.config.schema import ModelConfig
from weft.errors import UserError
from weft.models.build import BuiltModel, build_model


@dataclass
class _Shapes:
    """What plan_export asks of an engine."""

    built: BuiltModel


def run(options: ExportOptions) -> Path:
    """Write the directory and return it. Raises UserError where there is no whole trainer state with masters."""
    checkpoint = find_checkpoint(Path(options.path))
    try:
        state = read_state(checkpoint)
        check_contents(state, 0, 1)
    except DamagedError as error:
        raise UserError(f"{checkpoint} holds no masters to export: {error}.") from error
    if options.ema and not any(name.startswith(EMA) for name in state.content["tensors"]):
        raise UserError(f"--ema: {checkpoint} holds no average of the weights: its run had no optimizer.ema_decay.")
    name = f"{checkpoint.name}-{'ema-' * options.ema}{options.dtype}"
    target = Path(options.output) if options.output else checkpoint.with_name(name)
    if target.exists():
        raise UserError(f"--output: {target} exists already: name another folder.")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _write(state, partial, DTYPES[options.dtype], average=options.ema)
    commit(partial, target)
    return target


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or of a run folder the newest."""
    steps = whole_steps(path / "checkpoints")
    if steps:
        return step_folder(path / "checkpoints", steps[-1])
    if (path / "config.json").is_file():
        return path.resolve()  # `latest` is a link
    raise UserError(f"{path}: is neither a run folder that holds checkpoints nor one of them, RUN/checkpoints/step-N.")


def _write(state: TrainerState, folder: Path, dtype: torch.dtype | None, *, average: bool) -> None:
    """The checkpoint's own directory tells names, layout, tokenizer, and dtypes where `dtype` is None.

    average: of the weights, instead of the masters.
    """
    built = build_model(
        ModelConfig(path=str(state.checkpoint)),
        dtype=torch.float32,
        compute=torch.float32,
        device=torch.device("cpu"),
        seed=0,
    )
    plan = plan_export(_Shapes(built), dtype)
    if built.load is not None:
        built.load.source.close()
    prepare_export(plan, folder)
    first = {id(tensor): name for name, tensor in [*built.module.named_parameters(), *built.module.named_buffers()]}
    every = built.module.state_dict(keep_vars=True)
    kept = exported(state.content["tensors"], average=average)
    written = 0
    for runtime in dict.fromkeys(piece.runtime for piece in plan.pieces):
        values = _whole(state, kept[first[id(every[runtime])]])
        written += write_export(plan, {runtime: Shard(Box.whole(tuple(values.shape)), values)}, folder)
    assert written == plan.bytes, f"{written} of {plan.bytes} bytes written"


def _whole(state: TrainerState, name: str) -> Tensor:
    """A tensor of the trainer state, put together from the files of all ranks."""
    entry = state.content["tensors"][name]
    whole = Box.whole(tuple(entry["shape"]))
    values = torch.empty(whole.size, dtype=getattr(torch, entry["dtype"]))
    for file in state.files:
        if name in file.boxes:
            start, size = file.boxes[name]
            box = Box(tuple(start), tuple(size))
            assert overlap(box, whole) == box, name
            with TensorFile.open(state.folder / file.name) as opened:
                values[box.within(whole)] = opened.read(name)
    return values
