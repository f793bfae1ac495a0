"""An engine's part of a checkpoint: its weights in HuggingFace's format, and its trainer state.

The first engine's part is the checkpoint's own folder. A critic's part is a folder inside it with the same layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.export import (
    ExportResult,
    check_sizes,
    join_export,
    plan_adapter,
    plan_export,
    prepare_export,
    require_complete,
    write_export,
)
from weft.checkpoint.retention import TRAINER_STATE
from weft.checkpoint.state import (
    EMA,
    WEIGHTS,
    DamagedError,
    RankFile,
    StateShard,
    check_file,
    find_scalars,
    find_state_shards,
    tensor_of,
    tied_names,
    write_rank_file,
    write_state,
)
from weft.config.schema import CheckpointConfig
from weft.engine.engine import Engine
from weft.engine.host import Allocation, HostTensor
from weft.parallel import fsdp
from weft.parallel.memory import HostNeeds
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.digests import BoxDigest, check_boxes, not_as_written, write_digests

DTYPES: dict[str, torch.dtype | None] = {"auto": None, **fsdp.DTYPES}
_LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class HostCopies:
    """A copy of an engine's state. copies: this rank's elements by name, in `allocation`. boxes: their positions in the
    full tensors. state: on the first rank, the engine's part of state.json, else empty."""

    copies: Mapping[str, HostTensor]
    boxes: Mapping[str, Box]
    state: Mapping[str, Any]
    allocation: Allocation


@dataclass(frozen=True)
class _HostShard:
    """A copied box of a tensor, which only this rank writes."""

    box: Box
    values: HostTensor

    def read(self, box: Box) -> Tensor:
        return self.values[box.within(self.box)]

    def is_writer(self, number: int) -> bool:
        return True


@dataclass(frozen=True)
class WriteResult:
    """Result of EngineWriter.write on one rank. exported: its part of the weight files. file: its file of the trainer
    state, if any. nonfinite: name of a weight that is not finite; then the rank wrote nothing."""

    exported: ExportResult
    file: RankFile | None = None
    nonfinite: str | None = None

    @staticmethod
    def from_note(fields: Mapping[str, Any]) -> WriteResult:
        """Build it from the fields of a rank's note."""
        exported = {**fields["exported"], "digests": [BoxDigest(**digest) for digest in fields["exported"]["digests"]]}
        file = None if fields["file"] is None else RankFile(**fields["file"])
        return WriteResult(ExportResult(**exported), file, fields["nonfinite"])


class EngineWriter:
    """Copies an engine's state and writes its part of checkpoints. folder: the engine's folder in every checkpoint; ""
    for the checkpoint itself."""

    def __init__(self, engine: Engine, config: CheckpointConfig, texts: Mapping[str, str], folder: str = "") -> None:
        self.engine, self.folder, self.keep_state = engine, folder, config.trainer_state != "none"
        self._verify = config.verify
        plan = plan_export if engine.lora is None else plan_adapter
        self.plan = replace(plan(engine, DTYPES[config.dtype]), texts=texts)
        self._half = any(tensor.dtype == torch.float16 for tensor in self.plan.manifest.values())
        self._owners = tied_names(engine.module)
        self._exported = names_to_export(find_state_shards(engine), average=config.weights == "ema")
        needs = HostNeeds.estimate(
            engine.memory, adapters=engine.lora is not None, state=self.keep_state, replicas=engine.mesh.dp_replicate,
            parts=(),
        )  # fmt: skip
        engine.offloader.pool.fill(needs.saved)

    def copy(self) -> HostCopies:
        """Copy the tensors that this rank will write into host memory, which `release` frees."""
        parts = find_state_shards(self.engine)
        names = parts.keys() if self.keep_state else set(self._exported.values())
        written = {name: part for name, part in parts.items() if part.writes and name in names}
        allocation = self.engine.offloader.pool.take([part.local.nbytes for part in written.values()], by_writer=True)
        copies = {}
        for (name, part), pieces in zip(written.items(), allocation.pieces, strict=True):
            copies[name] = HostTensor(tuple(part.local.shape), part.local.dtype, pieces)
            copies[name].fill(part.local)
        boxes = {name: part.box for name, part in written.items()}
        state = self._state(parts) if self.keep_state else {}
        return HostCopies(copies, boxes, state, allocation)

    def release(self, copies: HostCopies) -> None:
        """Free the host memory of written copies."""
        self.engine.offloader.pool.give(copies.allocation)

    def _state(self, parts: Mapping[str, StateShard]) -> dict[str, Any]:
        """The engine's part of state.json on the first rank, with the tensors of all stages; {} on others. Collective
        over the first ranks of all stages."""
        if self.engine.mesh.stage_rank[0] > 0:
            return {}
        tensors = {
            tensor_of(name): {"dtype": str(part.local.dtype).removeprefix("torch."), "shape": list(part.shape)}
            for name, part in parts.items()
        }
        scalars = find_scalars(self.engine)
        if self.engine.mesh.pp is not None:
            for of_stage in self.engine.mesh.pp.all_gather((tensors, scalars)):
                tensors, scalars = of_stage[0] | tensors, of_stage[1] | scalars
        if not self.engine.ranks.is_first:
            return {}
        return {
            "mesh": {"world": self.engine.ranks.world, **self.engine.mesh.axes},
            "scalars": scalars,
            "loss_scale": None if self.engine.loss_scale is None else self.engine.loss_scale.state_dict(),
            "tensors": tensors,
        }

    def prepare(self, checkpoint: Path) -> None:
        """Create the empty weight files; called by the first rank."""
        prepare_export(self.plan, checkpoint / self.folder)
        if self.keep_state:
            (checkpoint / self.folder / TRAINER_STATE).mkdir()

    def write(
        self, checkpoint: Path, id: str, copies: HostCopies, generators: Mapping[str, Tensor], seams: Sequence[Path]
    ) -> WriteResult:
        """Write this rank's boxes of the weight files, and its file of the trainer state; no collective.

        generators: this rank's random states. seams: the seam file of each rank; none for one rank.
        """
        weights = {n: copies.copies[stored] for n, stored in self._exported.items() if stored in copies.copies}
        nonfinite = self._find_nonfinite(weights)
        shards = dict[str, list[_HostShard]]()
        for name, copy in weights.items():
            shards.setdefault(tensor_of(name), []).append(_HostShard(copies.boxes[self._exported[name]], copy))
        shards |= {name: shards[owner] for name, owner in self._owners.items() if owner in shards}
        exported = write_export(
            self.plan,
            {} if nonfinite else shards,
            checkpoint / self.folder,
            seams=seams[self.engine.ranks.rank] if seams else None,
            digests=self._verify == "digest",
        )
        if nonfinite or not self.keep_state:
            return WriteResult(exported, None, nonfinite)
        folder, rank = checkpoint / self.folder / TRAINER_STATE, self.engine.ranks.rank
        tensors = {**copies.copies, **{name: HostTensor.wrap(value) for name, value in generators.items()}}
        return WriteResult(exported, write_rank_file(folder, rank, id, tensors, copies.boxes))

    def _find_nonfinite(self, weights: Mapping[str, HostTensor]) -> str | None:
        for name, copy in weights.items():
            for values in copy.flat() if copy.dtype.is_floating_point else ():
                if not bool(values.isfinite().all()):
                    return self._named(name)
                if self._half and float(values.abs().max()) > _LARGEST_HALF:
                    return f"{self._named(name)} in fp16 (set checkpoint.dtype=bf16)"
        return None

    def join(self, checkpoint: Path, seams: Sequence[Path]) -> int:
        """Join the seams in this rank's share of the weight files. Returns the number of bytes joined. seams: as in
        `write`."""
        return join_export(self.plan, checkpoint / self.folder, seams, self.engine.ranks.rank)

    def check(self, checkpoint: Path, written: WriteResult, writer: int) -> None:
        """Read the files of the rank `writer` and compare digests. Raises StorageError if they differ."""
        check_boxes(checkpoint, self.folder, written.exported.digests, writer)
        if written.file is not None:
            folder = Path(self.folder, TRAINER_STATE)
            try:
                check_file(checkpoint / folder, written.file)
            except DamagedError as error:
                raise not_as_written(str(folder / written.file.name), writer) from error

    def complete(
        self, checkpoint: Path, parts: Sequence[WriteResult], joined: int, state: Mapping[str, Any] | None
    ) -> None:
        """Write digests.json, then state.json with `state`. Call it after every rank has written and joined."""
        folder, digests = checkpoint / self.folder, [digest for part in parts for digest in part.exported.digests]
        exported = [part.exported for part in parts]
        require_complete(self.plan, sum(e.bytes for e in exported), sum(e.handed for e in exported), joined)
        if self._verify != "none":
            check_sizes(self.plan, folder)
        if digests:
            write_digests(folder, digests)
        if state is not None:
            write_state(folder / TRAINER_STATE, state, [part.file for part in parts if part.file is not None])

    def _named(self, name: str) -> str:
        return f"{self.folder}: {name}" if self.folder else name


def names_to_export(names: Collection[str], *, average: bool) -> dict[str, str]:
    """Model name -> name of the tensor in the trainer state to export: the averaged tensor, if `average` is set and it
    exists."""
    masters = {name.removeprefix(WEIGHTS): name for name in names if name.startswith(WEIGHTS)}
    averaged = {name.removeprefix(EMA): name for name in names if name.startswith(EMA) and average}
    return {**masters, **averaged}
