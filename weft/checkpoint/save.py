"""Saver: checkpoints written while training goes on.

`save` copies this rank's shards into host memory and returns; a thread of every rank then writes its part, without
any collective:

    1. The first rank makes step-000100.partial with empty weight files (their headers say what goes where) and the
       folder .ranks-ID in it, for which the others wait.
    2. Each rank fills its boxes of the weight files, writes its file of the trainer state, waits for the disk, and
       leaves a report in .ranks-ID.
    3. When all reports are there the first rank writes state.json, renames the folder to step-000100, points `latest`
       (and `best`) at it and removes what is not to be kept.

A kill at any moment leaves whole checkpoints under whole names. Errors are kept until all ranks meet again (`failed`,
`raise_failure`), because only then can all of them end with the same words.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint import rng
from weft.checkpoint.adapters import plan_adapter
from weft.checkpoint.boxes import Box, Shard
from weft.checkpoint.export import plan_export, prepare_export, write_export
from weft.checkpoint.retention import TRAINER_STATE, commit, point_best, point_latest, prune, step_folder
from weft.checkpoint.state import (
    EMA,
    RNG,
    WEIGHTS,
    Part,
    RankFile,
    find_parts,
    find_scalars,
    tied_names,
    write_rank_file,
    write_state,
)
from weft.cluster.agree import largest
from weft.cluster.status import STORAGE
from weft.config.schema import CheckpointConfig
from weft.engine.engine import Engine
from weft.errors import StorageError, UserError
from weft.parallel import fsdp

DTYPES: dict[str, torch.dtype | None] = {"auto": None, **fsdp.DTYPES}
_LARGEST_HALF = torch.finfo(torch.float16).max
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 3.0  # how long a rank that fails elsewhere lets a checkpoint that is being written come to its end
_MENDABLE = {*STORAGE, errno.ENOENT, errno.EACCES, errno.EPERM}


@dataclass(frozen=True)
class Job:
    """One checkpoint to write. copies: this rank's own elements by name; state: of state.json, on the first rank."""

    step: int
    id: str
    partial: Path
    target: Path
    copies: Mapping[str, Tensor]
    boxes: Mapping[str, Box]
    generators: Mapping[str, Tensor]
    state: Mapping[str, Any]
    best: bool

    @property
    def reports(self) -> Path:
        return self.partial / f".ranks-{self.id}"


@dataclass(frozen=True)
class RankReport:
    """What a rank has written. exported: bytes of the weight files. nonfinite: a weight that is, so nothing was."""

    exported: int = 0
    file: RankFile | None = None
    nonfinite: str | None = None


class _CancelledError(Exception):
    """Another rank has failed: this one need not wait for it."""


@dataclass
class Saver:
    """Saves an engine's state into RUN/checkpoints. Every method but `failed` and `overdue` is called by all ranks.

    constants: what state.json says of the run as a whole (config, data, model). texts: files that every checkpoint has
    in place of the model's own, such as a chat template.
    """

    engine: Engine
    run: Path
    config: CheckpointConfig
    constants: Mapping[str, Any]
    last: int = 0
    news: list[str] = field(default_factory=list)
    texts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = plan_export if self.engine.lora is None else plan_adapter
        self.plan = replace(plan(self.engine, DTYPES[self.config.dtype]), texts=self.texts)
        self._half = any(tensor.dtype == torch.float16 for tensor in self.plan.manifest.values())
        self._owners = tied_names(self.engine.module)
        self._exported = exported(find_parts(self.engine), average=self.config.weights == "ema")
        self.checkpoints = self.run / "checkpoints"
        token = [uuid.uuid4().hex[:12]]
        dist.broadcast_object_list(token, src=0)
        self._token = token[0]
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._nonfinite: str | None = None
        self._cancel = threading.Event()
        self._clock = time.monotonic()

    # ------------------------------------------------------------ when

    @property
    def overdue(self) -> bool:
        """Whether checkpoint.every_minutes have gone by without a save, by this rank's clock."""
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self._clock >= 60.0 * minutes

    def due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint belongs to this step of a run of so many."""
        return step == steps or (self.config.every > 0 and step % self.config.every == 0)

    # ------------------------------------------------------------ saving

    def save(self, step: int, progress: Mapping[str, Any], best: bool = False) -> None:
        """Save what stands after this step; a save that is still being written is waited for.

        progress: what state.json says of this moment (epoch, updates, summary). best: whether the link `best` is to
        name it.
        """
        if step == self.last:
            return
        self.wait()
        began = time.perf_counter()
        job = self._copy(step, progress, best)
        self.last, self._clock = step, time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(job, began), name=f"save-{step}", daemon=True)
        self._thread.start()
        if not self.config.async_:
            self.wait()

    def wait(self) -> None:
        """Until no rank is writing any more. Raises on all of them what has failed on any."""
        # Short collectives in a loop, because one rank may write for longer than a collective may wait.
        while True:
            pending, failed = largest([self._busy, self.failed], self.engine.mesh.data_group, self.engine.device)
            if failed:
                self.raise_failure()
            if not pending:
                return
            time.sleep(_POLL_SECONDS)

    def finish(self) -> Path:
        """Wait for the last save, and return its folder. Raises where its weights were not finite."""
        self.wait()
        found: list[str | None] = [self._nonfinite]
        dist.broadcast_object_list(found, src=0)
        if found[0] is not None:
            raise FloatingPointError(f"{found[0]} Lower optimizer.lr, or look at the data.")
        return step_folder(self.checkpoints, self.last)

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def take_news(self) -> list[str]:
        """What the first rank's writer has to say since it was last asked."""
        news, self.news = self.news, []
        return news

    # ------------------------------------------------------------ failure

    @property
    def failed(self) -> bool:
        """Whether this rank's writer has met an error."""
        return self._error is not None

    def raise_failure(self) -> None:
        """Raise the first error of any rank, on all ranks; the checkpoint it belongs to is given up."""
        self._cancel.set()
        if self._thread is not None:
            self._thread.join()
        mine = None if self._error is None else (self._describe(self._error), _is_mendable(self._error))
        errors: list[tuple[str, bool] | None] = [None] * self.engine.ranks.world
        dist.all_gather_object(errors, mine)
        text, mendable = next(error for error in errors if error is not None)
        if self.engine.ranks.is_first:
            shutil.rmtree(self._partial(self.last), ignore_errors=True)
        raise StorageError(text) if mendable else RuntimeError(text)

    def _describe(self, error: Exception) -> str:
        where = self._partial(self.last)
        reason = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
        return (
            f"rank {self.engine.ranks.rank} could not save step {self.last} to {where}: {reason}. Whole checkpoints in "
            f"{self.checkpoints} stand. Mend that (free space, or set checkpoint.keep), then go on from the newest: "
            f"weft sft --resume {self.run}"
        )

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.join(_GRACE_SECONDS if error is not None else None)
            self._cancel.set()

    # ------------------------------------------------------------ the copy

    def _copy(self, step: int, progress: Mapping[str, Any], best: bool) -> Job:
        """Copy what this rank writes into host memory, which is kept for the next save."""
        parts = find_parts(self.engine)
        keep_state = self.config.trainer_state != "none"
        wanted = parts.keys() if keep_state else set(self._exported.values())
        mine = {name: part for name, part in parts.items() if part.writes and name in wanted}
        copies = {name: self._to_host(name, part.local) for name, part in mine.items()}
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        first, target = self.engine.ranks.is_first, step_folder(self.checkpoints, step)
        return Job(
            step=step,
            id=f"{self._token}-{step}",
            partial=self._partial(step),
            target=target,
            copies=copies,
            boxes={name: part.box for name, part in mine.items()},
            generators={RNG + name: value for name, value in rng.capture(self.engine.device).items()},
            state=self._state(step, progress, parts) if first and keep_state else {},
            best=best,
        )

    def _to_host(self, name: str, local: Tensor) -> Tensor:
        host = self._host.get(name)
        if host is None or host.shape != local.shape or host.dtype != local.dtype:
            host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._host[name] = host
        return host.copy_(local, non_blocking=True)

    def _state(self, step: int, progress: Mapping[str, Any], parts: Mapping[str, Part]) -> dict[str, Any]:
        tensors = {
            name: {"dtype": str(part.local.dtype).removeprefix("torch."), "shape": list(part.shape)}
            for name, part in parts.items()
        }
        return {
            "step": step,
            "mesh": {"world": self.engine.ranks.world, **self.engine.mesh.axes},
            **self.constants,
            **progress,
            "scalars": find_scalars(self.engine),
            "loss_scale": None if self.engine.loss_scale is None else self.engine.loss_scale.state_dict(),
            "tensors": tensors,
        }

    def _partial(self, step: int) -> Path:
        target = step_folder(self.checkpoints, step)
        return target.with_name(target.name + ".partial")

    # ------------------------------------------------------------ the thread

    def _work(self, job: Job, began: float) -> None:
        try:
            if self.engine.ranks.is_first:
                self._prepare(job)
            self._until(job.reports.is_dir)
            self._report(job, self._write(job))
            if self.engine.ranks.is_first and self._commit(job):
                which = ", the best so far," if job.best else ""
                self.news.append(f"saved    {job.target}{which} in {time.perf_counter() - began:.1f} s")
        except _CancelledError:
            pass
        except Exception as error:
            self._error = error

    def _prepare(self, job: Job) -> None:
        self.checkpoints.mkdir(exist_ok=True)  # not its parents: a run folder that has vanished is an error
        shutil.rmtree(job.partial, ignore_errors=True)
        job.partial.mkdir()
        prepare_export(self.plan, job.partial)
        if job.state:
            (job.partial / TRAINER_STATE).mkdir()
        job.reports.mkdir()

    def _write(self, job: Job) -> RankReport:
        weights = {n: job.copies[kept] for n, kept in self._exported.items() if kept in job.copies}
        for name, copy in weights.items():
            if copy.is_floating_point() and not bool(copy.isfinite().all()):
                return RankReport(nonfinite=name)
            if self._half and copy.is_floating_point() and float(copy.abs().max()) > _LARGEST_HALF:
                return RankReport(nonfinite=f"{name} in fp16 (set checkpoint.dtype=bf16)")
        shards = {name: Shard(job.boxes[self._exported[name]], copy) for name, copy in weights.items()}
        shards |= {name: shards[owner] for name, owner in self._owners.items() if owner in shards}
        exported = write_export(self.plan, shards, job.partial)
        if self.config.trainer_state == "none":
            return RankReport(exported)
        folder, rank = job.partial / TRAINER_STATE, self.engine.ranks.rank
        return RankReport(exported, write_rank_file(folder, rank, job.id, {**job.copies, **job.generators}, job.boxes))

    def _report(self, job: Job, report: RankReport) -> None:
        name = f"rank-{self.engine.ranks.rank:05d}"
        draft = job.reports / f"{name}.draft"
        draft.write_text(json.dumps(asdict(report)), encoding="utf-8")
        os.rename(draft, job.reports / f"{name}.json")

    def _commit(self, job: Job) -> bool:
        """Wait for every rank, then give the folder its name; False where weights were not finite."""
        paths = [job.reports / f"rank-{rank:05d}.json" for rank in range(self.engine.ranks.world)]
        self._until(lambda: all(path.exists() for path in paths))
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        nonfinite = [report["nonfinite"] for report in reports if report["nonfinite"] is not None]
        self._nonfinite = None
        if nonfinite:
            self._nonfinite = f"step {job.step} is not saved: weights are not finite: {', '.join(nonfinite[:3])}."
            self.news.append(self._nonfinite)
            shutil.rmtree(job.partial)
            return False
        exported = sum(report["exported"] for report in reports)
        assert exported == self.plan.bytes, f"{exported} of {self.plan.bytes} bytes of weights written"
        if job.state:
            files = [RankFile(**report["file"]) for report in reports]
            write_state(job.partial / TRAINER_STATE, {"id": job.id, **job.state}, files)
        shutil.rmtree(job.reports)
        commit(job.partial, job.target)
        point_latest(job.target)
        if job.best:
            point_best(job.target)
        settings = self.config
        prune(
            self.checkpoints,
            keep=settings.keep,
            keep_every=settings.keep_every,
            trainer_state=settings.trainer_state,
        )
        return True

    def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for files of other ranks."""
        while not holds():
            if self._cancel.wait(_POLL_SECONDS):
                raise _CancelledError


def exported(names: Collection[str], *, average: bool) -> dict[str, str]:
    """The model's own name -> the tensor of the trainer state that is written for use: of the average, what has one."""
    kept = {name.removeprefix(WEIGHTS): name for name in names if name.startswith(WEIGHTS)}
    averaged = {name.removeprefix(EMA): name for name in names if name.startswith(EMA) and average}
    return {**kept, **averaged}


def _is_mendable(error: Exception) -> bool:
    return isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in _MENDABLE)
