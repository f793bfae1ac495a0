"""Saver: asynchronous checkpoints.

`save` copies this rank's shards into host memory and returns. A thread on every rank then writes the rank's part,
without collectives. Ranks exchange their progress through files in step-000100.ranks-ID (Notes):

1. The first rank creates step-000100.partial with empty weight files, whose headers define every tensor's position.
2. Each rank writes its boxes into the weight files, and bytes at the seams between ranks into a separate file
   (ranges.py). It then writes its file of the trainer state, and waits for the disk.
3. When all ranks have written, one rank per weight file joins the seams.
4. With checkpoint.verify=digest, each rank reads the files of another rank and compares digests.
5. When all ranks are done, the first rank writes state.json, renames the folder to step-000100, points `latest` (and
   `best`) at it and removes the checkpoints that retention does not keep.

A kill at any moment leaves only complete checkpoints under final names. The saver stores errors until all ranks
synchronise again (`failed`, `raise_failure`), so that all ranks end with the same message. If all ranks end with
another error, the saver first finishes the checkpoint in progress (`end`).
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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint import rng
from weft.checkpoint.retention import commit, complete_steps, point_best, point_latest, prune, step_folder
from weft.checkpoint.snapshot import EngineWriter, HostCopies, WriteResult
from weft.checkpoint.state import RNG
from weft.config.schema import CheckpointConfig
from weft.engine.engine import Engine
from weft.errors import StorageError, UserError, first_line
from weft.launch import flight
from weft.launch.consistency import max_over_ranks
from weft.launch.status import STORAGE
from weft.terminal import say


@dataclass(frozen=True)
class Notes:
    """The notes of one save: files in a folder that the first rank creates and removes. rank: the rank that writes
    notes."""

    folder: Path
    rank: int
    world: int

    def begin(self) -> None:
        """Create the folder."""
        self.folder.mkdir()

    def end(self) -> None:
        """Rename the folder, then remove it, so that a late note cannot prevent the removal."""
        over = self.folder.with_name(f"{self.folder.name}.over")
        with suppress(FileNotFoundError):
            os.rename(self.folder, over)
        shutil.rmtree(over, ignore_errors=True)

    def seams(self, number: int) -> list[Path]:
        """The seam file of each rank (ranges.py) for the saved engine of index `number`; none for one rank."""
        return [self.folder / f"seams-{number}-{rank:05d}" for rank in range(self.world)] if self.world > 1 else []

    def leave(self, kind: str, content: Any = None) -> None:
        """Write a note atomically."""
        note = self.folder / _name(kind, self.rank)
        if content is None:
            note.touch()  # works even on a full disk
            return
        draft = note.with_name(f"{note.name}.draft")
        draft.write_text(json.dumps(content), encoding="utf-8")
        os.rename(draft, note)

    def read(self, kind: str, rank: int) -> Any:
        """The content of an existing note."""
        return json.loads((self.folder / _name(kind, rank)).read_text(encoding="utf-8"))

    def listed(self) -> set[str] | None:
        """The names of all notes; None while the folder does not exist. Folders are listed, the outermost first: a
        network file system fetches a listing from its server, but may cache for half a minute that a name did not
        exist.
        """
        with suppress(FileNotFoundError):
            if self.folder.name in os.listdir(self.folder.parent):
                return set(os.listdir(self.folder))
        return None

    def all(self, kind: str) -> bool:
        """Whether every rank has written this note."""
        return {_name(kind, rank) for rank in range(self.world)} <= (self.listed() or set())

    def any(self, kind: str) -> bool:
        """Whether any rank has written this note."""
        return any(name.startswith(f"{kind}-") for name in self.listed() or ())


def _name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}"


_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.5
_ENDING_POLL_SECONDS = 0.02
_GRACE_SECONDS = 3.0  # seconds that a rank that ends with an error waits for the others to end
_MENDABLE = {*STORAGE, errno.ENOENT, errno.EACCES, errno.EPERM}


@dataclass(frozen=True)
class SaveJob:
    """A checkpoint to write. copies: one for each engine. state: on the first rank, the run's part of state.json, else
    empty. best: whether to point the link `best` at it."""

    step: int
    id: str
    partial: Path
    target: Path
    copies: Sequence[HostCopies]
    generators: Mapping[str, Tensor]
    state: Mapping[str, Any]
    best: bool
    notes: Notes


class _CancelledError(Exception):
    """Another rank has failed or is gone, so this rank stops waiting."""


@dataclass
class Saver:
    """Saves an engine's state into RUN/checkpoints. All ranks call every method except `failed` and `overdue`.

    constants: the run's constant part of state.json (config, data, model). texts: files that replace the model's files
    in every checkpoint, such as a chat template. further_engines: folder -> further engine (a critic), saved there and
    committed together. command: weft's command, for messages. timeout: seconds (train.timeout) that a save may take
    when all ranks end with an error.
    """

    engine: Engine
    run: Path
    config: CheckpointConfig
    constants: Mapping[str, Any]
    last: int = 0
    news: list[str] = field(default_factory=list)
    texts: Mapping[str, str] = field(default_factory=dict)
    further_engines: Mapping[str, Engine] = field(default_factory=dict)
    command: str = "sft"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self._contents = [
            EngineWriter(engine, self.config, self.texts, folder)
            for folder, engine in {"": self.engine, **self.further_engines}.items()
        ]
        self.checkpoints = self.run / "checkpoints"
        token = [uuid.uuid4().hex[:12]]
        dist.broadcast_object_list(token, src=0, group=self.engine.ranks.group)
        self._token = token[0]
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._nonfinite: str | None = None
        self._existing = complete_steps(self.checkpoints)  # at the last look of this run
        self._ending = False  # whether all ranks end with an error that is not the saver's
        self._cancel = threading.Event()
        self._clock = time.monotonic()

    # ------------------------------------------------------------ when

    @property
    def overdue(self) -> bool:
        """Whether checkpoint.every_minutes have passed since the last save, by this rank's clock."""
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self._clock >= 60.0 * minutes

    def is_due(self, step: int, steps: int) -> bool:
        """Whether this step of `steps` ends with a checkpoint."""
        return step == steps or (self.config.every > 0 and step % self.config.every == 0)

    # ------------------------------------------------------------ saving

    def save(self, step: int, progress: Mapping[str, Any], best: bool = False) -> None:
        """Save the state after this step. Waits until the previous save is written.

        progress: the step's part of state.json (epoch, updates, summary). best: whether to point the link `best` at it.
        """
        if step == self.last:
            return
        self.wait()
        began = time.perf_counter()
        job = self._job = self._copy(step, progress, best)
        self.last, self._clock = step, time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(job, began), name=f"save-{step}", daemon=True)
        self._thread.start()
        if not self.config.async_:
            self.wait()

    def wait(self) -> None:
        """Wait until no rank is writing. Raises the first error of any rank on all ranks."""
        # Short collectives in a loop, because one rank may write for longer than a collective may wait.
        while True:
            pending, failed = max_over_ranks(
                [self._busy, self.failed], self.engine.mesh.world_group, self.engine.device
            )
            if failed:
                self.raise_failure()
            if not pending:
                return
            if self._thread is not None:
                self._thread.join(_LONGEST_POLL_SECONDS)

    def finish(self) -> Path:
        """Wait for the last save and return its folder. Raises FloatingPointError if its weights were not finite."""
        self.wait()
        if self.engine.ranks.is_first:
            self._note_missing()
        problem: list[str | None] = [self._nonfinite]
        dist.broadcast_object_list(problem, src=0, group=self.engine.ranks.group)
        if problem[0] is not None:
            raise FloatingPointError(f"{problem[0]} Lower optimizer.lr, or check the data.")
        return step_folder(self.checkpoints, self.last)

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def pop_messages(self) -> list[str]:
        """The first rank's new messages for the user."""
        news, self.news = self.news, []
        return news

    # ------------------------------------------------------------ failure

    @property
    def failed(self) -> bool:
        """Whether this rank's writer has failed."""
        return self._error is not None

    def raise_failure(self) -> None:
        """Raise the first error of any rank, on all ranks. The checkpoint of that save is abandoned."""
        self._cancel.set()
        if self._thread is not None:
            self._thread.join()
        local_error = None
        if (error := self._error) is not None:
            is_mendable = isinstance(error, UserError) or (isinstance(error, OSError) and error.errno in _MENDABLE)
            local_error = self._describe(error), is_mendable
        errors: list[tuple[str, bool] | None] = [None] * self.engine.ranks.world
        dist.all_gather_object(errors, local_error, group=self.engine.ranks.group)
        text, mendable = next(error for error in errors if error is not None)
        if self.engine.ranks.is_first and self._job is not None:
            shutil.rmtree(self._job.partial, ignore_errors=True)
            self._job.notes.end()
        self._job = None
        raise StorageError(text) if mendable else RuntimeError(text)

    def _describe(self, error: Exception) -> str:
        folder = self._partial(self.last)
        reason = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
        return (
            f"rank {self.engine.ranks.rank} could not save step {self.last} to {folder}: {reason}. Complete "
            f"checkpoints in {self.checkpoints} are intact. Fix the cause (free disk space, or set checkpoint.keep), "
            f"then resume from the newest: weft {self.command} --resume {self.run}"
        )

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(error)
        elif self._thread is not None:
            self._thread.join()

    def end(self, error: BaseException) -> None:
        """Finish the checkpoint that is being written, if possible; called on a rank that ends with an error.

        This is possible if all ranks end this way within `timeout`. If another rank continues or has died, this rank
        waits only a few seconds. No rank returns before the checkpoint is committed, because launchers end all ranks
        when the first exits.
        """
        job, began, noted = self._job, time.monotonic(), False
        if job is None:
            return
        while self._busy or job.notes.listed() is not None:  # not committed, and no rank has given up
            all_ending = job.notes.all("ending")
            over = time.monotonic() - began > (self.timeout if all_ending else _GRACE_SECONDS)
            if over or self.failed or job.notes.any("left"):
                with suppress(OSError):
                    job.notes.leave("left")
                break
            if all_ending and not self._ending and self.engine.ranks.is_first:
                self._ending = True
                reason = first_line(error) if isinstance(error, Exception) else type(error).__name__
                say(
                    f"ending   {reason}: weft first finishes {job.target}, within {self.timeout:g} s (train.timeout)",
                    error=True,
                )
            if not noted and job.notes.listed() is not None:
                with suppress(OSError):  # another rank may have removed the folder
                    job.notes.leave("ending")
                noted = True
            flight.recorder.beat()
            time.sleep(_ENDING_POLL_SECONDS)
        self._cancel.set()
        if self._ending:
            say(*self.pop_messages(), error=True)

    def _tell(self, news: str) -> None:
        """Queue a message of the writer's thread for the user. If the run is ending, print it at once, because other
        ranks exit when the notes of this save are removed."""
        if self._ending:
            say(news, error=True)
        else:
            self.news.append(news)

    # ------------------------------------------------------------ the copy

    def _copy(self, step: int, progress: Mapping[str, Any], best: bool) -> SaveJob:
        """Copy the tensors that this rank writes to host memory."""
        copies = [contents.copy() for contents in self._contents]
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        ranks, target = self.engine.ranks, step_folder(self.checkpoints, step)
        return SaveJob(
            step=step,
            id=f"{self._token}-{step}",
            partial=self._partial(step),
            target=target,
            copies=copies,
            generators={RNG + name: value for name, value in rng.capture(self.engine.device).items()},
            state={**self.constants, **progress} if ranks.is_first else {},
            best=best,
            notes=Notes(target.with_name(f"{target.name}.ranks-{self._token}"), ranks.rank, ranks.world),
        )

    def _partial(self, step: int) -> Path:
        target = step_folder(self.checkpoints, step)
        return target.with_name(target.name + ".partial")

    # ------------------------------------------------------------ the thread

    def _work(self, job: SaveJob, began: float) -> None:
        try:
            if self.engine.ranks.is_first:
                self._prepare(job)
            self._until(job, lambda: job.notes.any("prepared"))
            job.notes.leave("written", [asdict(part) for part in self._write(job)])
            self._release(job)
            self._until(job, lambda: job.notes.all("written"))
            joined = [c.join(job.partial, job.notes.seams(number)) for number, c in enumerate(self._contents)]
            job.notes.leave("joined", joined)
            if self.config.verify == "digest":
                self._until(job, lambda: job.notes.all("joined"))
                self._check(job)
            job.notes.leave("done")
            if self.engine.ranks.is_first:
                if self._commit(job):
                    suffix = ", the best so far," if job.best else ""
                    self._tell(f"saved    {job.target}{suffix} in {time.perf_counter() - began:.1f} s")
                job.notes.end()
        except _CancelledError:
            pass
        except Exception as error:
            self._error = error
            with suppress(OSError):
                job.notes.leave("left")  # tells the other ranks not to wait for this one
        finally:
            self._release(job)

    def _prepare(self, job: SaveJob) -> None:
        self.checkpoints.mkdir(exist_ok=True)  # without parents: a run folder that has vanished is an error
        shutil.rmtree(job.partial, ignore_errors=True)
        job.notes.begin()
        job.partial.mkdir()
        for contents in self._contents:
            contents.prepare(job.partial)
        job.notes.leave("prepared")

    def _write(self, job: SaveJob) -> list[WriteResult]:
        """Write the part of each engine. The first engine's part includes the states of random number generators."""
        results = []
        for number, (contents, copies) in enumerate(zip(self._contents, job.copies, strict=True)):
            generators = {} if number else job.generators
            results.append(contents.write(job.partial, job.id, copies, generators, job.notes.seams(number)))
        return results

    def _release(self, job: SaveJob) -> None:
        """Free the copies after they are written or abandoned."""
        for contents, copies in zip(self._contents, job.copies, strict=True):
            contents.release(copies)

    def _check(self, job: SaveJob) -> None:
        """Compare the files of another rank with their digests. With several machines the rank is on another machine,
        because the page cache of this machine would hide errors of the disk."""
        rank, world = self.engine.ranks.rank, self.engine.ranks.world
        writer = (rank + (world + 1) // 2) % world
        for contents, fields in zip(self._contents, job.notes.read("written", writer), strict=True):
            contents.check(job.partial, WriteResult.from_note(fields), writer)

    def _commit(self, job: SaveJob) -> bool:
        """Wait for every rank, then rename the folder to its final name. Returns False if weights are not finite."""
        self._until(job, lambda: job.notes.all("done"))
        world = range(self.engine.ranks.world)
        written = [[WriteResult.from_note(fields) for fields in job.notes.read("written", rank)] for rank in world]
        joined = [job.notes.read("joined", rank) for rank in world]
        nonfinite = [part.nonfinite for of_rank in written for part in of_rank if part.nonfinite is not None]
        self._nonfinite = None
        if nonfinite:
            self._nonfinite = f"step {job.step} is not saved: weights are not finite: {', '.join(nonfinite[:3])}."
            self._tell(self._nonfinite)
            shutil.rmtree(job.partial, ignore_errors=True)
            return False
        for index, contents in enumerate(self._contents):
            state = None
            if contents.keep_state:  # the first engine's state.json includes the run's part
                run_state = {} if index else job.state
                state = {"id": job.id, "step": job.step, **run_state, **job.copies[index].state}
            parts = [of_rank[index] for of_rank in written]
            contents.complete(job.partial, parts, sum(of_rank[index] for of_rank in joined), state)
        self._note_missing()
        commit(job.partial, job.target)
        point_latest(job.target)
        if job.best:
            point_best(job.target)
        keep, keep_every, trainer_state = self.config.keep, self.config.keep_every, self.config.trainer_state
        prune(self.checkpoints, keep=keep, keep_every=keep_every, trainer_state=trainer_state)
        self._existing = complete_steps(self.checkpoints)
        return True

    def _note_missing(self) -> None:
        """Queue a message about checkpoints that another program has removed; the run continues."""
        existing = set(complete_steps(self.checkpoints))
        missing = [step_folder(self.checkpoints, step).name for step in self._existing if step not in existing]
        if missing:
            self._tell(
                f"gone     {', '.join(missing)} of {self.checkpoints}: removed by another program, not by this run"
            )
        self._existing = sorted(existing)

    def _until(self, job: SaveJob, holds: Callable[[], bool]) -> None:
        """Wait until `holds()` is true; it reads notes of other ranks. Raises _CancelledError if a rank has failed or
        exited."""
        seconds = _FIRST_POLL_SECONDS
        while not holds():
            if self._cancel.wait(seconds) or job.notes.any("left"):
                raise _CancelledError
            seconds = min(1.3 * seconds, _LONGEST_POLL_SECONDS)
