"""`weft export`: a HuggingFace directory from a checkpoint's masters, in one process and another dtype.

Tensor by tensor: memory holds the largest one, never the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.boxes import Box, Shard, overlap
from weft.checkpoint.export import plan_export, prepare_export, write_export
from weft.checkpoint.files import TensorFile
from weft.checkpoint.retention import commit, step_folder, whole_steps
from weft.checkpoint.save import DTYPES
from weft.checkpoint.state import WEIGHTS, DamagedError, TrainerState, check_contents, read_state, tied_names
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
    target = Path(options.output) if options.output else checkpoint.with_name(f"{checkpoint.name}-{options.dtype}")
    if target.exists():
        raise UserError(f"--output: {target} exists already: name another folder.")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _write(state, partial, DTYPES[options.dtype])
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


def _write(state: TrainerState, folder: Path, dtype: torch.dtype | None) -> None:
    """The checkpoint's own directory tells names, layout, tokenizer, and dtypes where `dtype` is None."""
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
    with _Masters(state, tied_names(built.module), list(built.module.state_dict())) as masters:
        written = write_export(plan, masters, folder)
    assert written == plan.bytes, f"{written} of {plan.bytes} bytes written"


class _Masters(Mapping[str, Shard]):
    """The whole weights of a trainer state by the model's names, put together from the files of all ranks when they
    are asked for. One is kept, because pieces of the same tensor follow one another."""

    def __init__(self, state: TrainerState, owners: Mapping[str, str], names: list[str]) -> None:
        self.state, self.owners, self.names = state, owners, names
        self._files = [(file.boxes, TensorFile.open(state.folder / file.name)) for file in state.files]
        self._last: tuple[str, Shard] | None = None

    def __getitem__(self, name: str) -> Shard:
        owner = WEIGHTS + self.owners.get(name, name)
        if self._last is None or self._last[0] != owner:
            self._last = None  # before the next is read: memory holds one
            values = self._read(owner)
            self._last = owner, Shard(Box.whole(tuple(values.shape)), values)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __enter__(self) -> _Masters:
        return self

    def __exit__(self, *error: object) -> None:
        for _, file in self._files:
            file.close()

    def _read(self, name: str) -> Tensor:
        entry = self.state.content["tensors"][name]
        whole = Box.whole(tuple(entry["shape"]))
        values = torch.empty(whole.size, dtype=getattr(torch, entry["dtype"]))
        for boxes, file in self._files:
            if name in boxes:
                start, size = boxes[name]
                box = Box(tuple(start), tuple(size))
                assert overlap(box, whole) == box, name
                values[box.within(whole)] = file.read(name)
        return values
