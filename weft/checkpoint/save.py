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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint import rng
from weft.checkpoint.contents import Contents, Copies, Written
from weft.checkpoint.retention import TRAINER_STATE, commit, point_best, point_latest, prune, step_folder
from weft.checkpoint.state import RNG, RankFile, write_state
from weft.cluster.agree import largest
from weft.cluster.status import STORAGE
from weft.config.schema import CheckpointConfig
from weft.engine.engine import Engine
from weft.errors import StorageError, UserError

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 3.0  # how long a rank that fails elsewhere lets a checkpoint that is being written come to its end
_MENDABLE = {*STORAGE, errno.ENOENT, errno.EACCES, errno.EPERM}


@dataclass(frozen=True)
class Job:
    """One checkpoint to write. copies: of each engine; state: what state.json says of the run, on the first rank."""

    step: int
    id: str
    partial: Path
    target: Path
    copies: Sequence[Copies]
    generators: Mapping[str, Tensor]
    state: Mapping[str, Any]
    best: bool

    @property
    def reports(self) -> Path:
        return self.partial / f".ranks-{self.id}"


class _CancelledError(Exception):
    """Another rank has failed: this one need not wait for it."""


@dataclass
class Saver:
    """Saves an engine's state into RUN/checkpoints. Every method but `failed` and `overdue` is called by all ranks.

    constants: what state.json says of the run as a whole (config, data, model). texts: files that every checkpoint has
    in place of the model's own, such as a chat template. others: folder -> an engine that is trained beside it, and
    saved there (a critic); all of a checkpoint is committed at once. command: of weft, for messages.
    """

    engine: Engine
    run: Path
    config: CheckpointConfig
    constants: Mapping[str, Any]
    last: int = 0
    news: list[str] = field(default_factory=list)
    texts: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Engine] = field(default_factory=dict)
    command: str = "sft"

    def __post_init__(self) -> None:
        self._contents = [
            Contents(engine, self.config, self.texts, folder)
            for folder, engine in {"": self.engine, **self.others}.items()
        ]
        self.checkpoints = self.run / "checkpoints"
        token = [uuid.uuid4().hex[:12]]
        dist.broadcast_object_list(token, src=0)
        self._token = token[0]
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
            f"weft {self.command} --resume {self.run}"
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
        """Copy what this rank writes into host memory."""
        copies = [contents.copy() for contents in self._contents]
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        first, target = self.engine.ranks.is_first, step_folder(self.checkpoints, step)
        return Job(
            step=step,
            id=f"{self._token}-{step}",
            partial=self._partial(step),
            target=target,
            copies=copies,
            generators={RNG + name: value for name, value in rng.capture(self.engine.device).items()},
            state={**self.constants, **progress} if first else {},
            best=best,
        )

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
        for contents in self._contents:
            contents.prepare(job.partial)
        job.reports.mkdir()

    def _write(self, job: Job) -> list[Written]:
        """Of each engine; random numbers go with the first."""
        generators = [job.generators, *({} for _ in self.others)]
        everything = zip(self._contents, job.copies, generators, strict=True)
        return [contents.write(job.partial, job.id, copies, drawn) for contents, copies, drawn in everything]

    def _report(self, job: Job, written: Sequence[Written]) -> None:
        name = f"rank-{self.engine.ranks.rank:05d}"
        draft = job.reports / f"{name}.draft"
        draft.write_text(json.dumps([asdict(part) for part in written]), encoding="utf-8")
        os.rename(draft, job.reports / f"{name}.json")

    def _commit(self, job: Job) -> bool:
        """Wait for every rank, then give the folder its name; False where weights were not finite."""
        paths = [job.reports / f"rank-{rank:05d}.json" for rank in range(self.engine.ranks.world)]
        self._until(lambda: all(path.exists() for path in paths))
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        nonfinite = [part["nonfinite"] for report in reports for part in report if part["nonfinite"] is not None]
        self._nonfinite = None
        if nonfinite:
            self._nonfinite = f"step {job.step} is not saved: weights are not finite: {', '.join(nonfinite[:3])}."
            self.news.append(self._nonfinite)
            shutil.rmtree(job.partial)
            return False
        for place, contents in enumerate(self._contents):
            self._complete(job, contents, job.copies[place], [report[place] for report in reports])
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

    def _complete(self, job: Job, contents: Contents, copies: Copies, parts: Sequence[Mapping[str, Any]]) -> None:
        """Every rank has written its part of one engine: state.json is the last of it."""
        exported, planned = sum(part["exported"] for part in parts), contents.plan.bytes
        assert exported == planned, f"{exported} of {planned} bytes of weights written"
        if contents.keep_state:
            files = [RankFile(**part["file"]) for part in parts]
            run = job.state if contents is self._contents[0] else {}
            content = {"id": job.id, "step": job.step, **run, **copies.state}
            write_state(job.partial / contents.folder / TRAINER_STATE, content, files)

    def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for files of other ranks."""
        while not holds():
            if self._cancel.wait(_POLL_SECONDS):
                raise _CancelledError


def _is_mendable(error: Exception) -> bool:
    return isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in _MENDABLE)
