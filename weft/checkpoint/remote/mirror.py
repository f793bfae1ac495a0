"""Keeps a run's copy on an object store up to date during training, in a thread of the process that writes the run
folder.

The thread uploads complete checkpoints, and the run's other files when they change. It hard-links a new checkpoint at
once, so that retention cannot remove it before the upload. It uploads the lines of metrics.jsonl up to a checkpoint
before it marks the checkpoint complete. An error of the store never ends training: the thread reports it and retries.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.checkpoint.remote.layout import (
    ASIDE,
    BEST,
    CHECKPOINTS,
    CRITIC,
    LATEST,
    TOKEN,
    RemoteRun,
    TakenOverError,
    name_of,
)
from weft.checkpoint.remote.store import StoreError
from weft.checkpoint.retention import best_step, complete_steps, step_folder, superseded
from weft.config.schema import CheckpointConfig
from weft.errors import StorageError
from weft.files import link_files, sha256
from weft.terminal import say

_POLL_SECONDS = 0.3
_RECORDS_SECONDS, _RECORDS_SHARE = (
    30.0,
    20.0,
)  # shortest pause between uploads of other files, in seconds and in times of the last upload
_LONGEST_PAUSE = 60.0
_FINAL_ROUNDS = 2
_LEFT_OUT = {CHECKPOINTS, "uploading", "pushing", "fetching", "placement-trial", "lock", TOKEN}
_PASSING = (".partial", ".live", ".new", ".draft", ".removing")


class Mirror:
    """The uploading thread of a run. retry: the command that uploads what is missing. critic: whether a critic saves in
    RUN/critic. fresh: whether the run is new, so that files of an earlier run are removed."""

    def __init__(
        self, remote: RemoteRun, run: Path, config: CheckpointConfig, retry: str, *, critic: bool, fresh: bool
    ) -> None:
        self.remote, self.run, self.config, self.retry = remote, run, config, retry
        self.critic, self.fresh = critic, fresh
        self._links = run / "uploading"
        self._news: list[str] = []
        self._linked_steps: set[int] = set()  # steps that are linked, or already on the store
        self._sent: dict[str, tuple[int, int]] = {}  # other files: size and modification time at their upload
        self._records_due = 0.0
        self._stop = threading.Event()
        self._failure = ""
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        say(f"staging  {self.run}, uploaded to {self.remote.store.url} during training (run.staging)", as_is=True)
        shutil.rmtree(self._links, ignore_errors=True)
        self._thread.start()

    def upload_config(self) -> None:
        """Uploads config.yaml of a new run, which `--resume` needs, before training begins. Raises StorageError if that
        fails."""
        if not self.fresh:
            return
        try:
            self.remote.require_own()
            self.remote.clear()
            self.remote.store.put(self.run / "config.yaml", "config.yaml")
            self.fresh = False
        except StoreError as error:
            raise StorageError(
                f"run.dir: {self.remote.store.url} could be written at the start, but no longer: {error}. Nothing has "
                "been trained. Start again when the store accepts files."
            ) from error

    def pop_messages(self) -> list[str]:
        """The messages for the user since the last call."""
        news, self._news = self._news, []
        return news

    @property
    def failed(self) -> bool:
        """Whether the thread ended without uploading everything."""
        return bool(self._failure) and not self._thread.is_alive()

    def finish(self, beat: Callable[[], None], seconds: float = float("inf")) -> list[str]:
        """Waits until everything is uploaded, at most `seconds`. beat: called regularly while waiting. Returns messages
        for the user. Raises StorageError if a file is not uploaded."""
        self._stop.set()
        end = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(_POLL_SECONDS)
            beat()
        if self._thread.is_alive():
            self._failure = f"not done within {seconds:g} s"
        if self._failure:
            raise StorageError(
                f"the run on {self.remote.store.url} is incomplete: {self._failure}. The complete run is on this "
                f"machine: {self.run}. To upload it from here: {self.retry}"
            )
        return self.pop_messages()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        pause, rounds, tidy = 0.0, 0, False
        while True:
            ends = self._stop.wait(max(_POLL_SECONDS, pause))
            try:
                if not tidy:
                    self._tidy()
                    tidy = True
                self._link_new()
                self._round(ends)
                if self._failure:
                    self._news.append(f"upload   {self.remote.store.url} accepts files again")
                pause, rounds, self._failure = 0.0, 0, ""
                if ends and not self._linked():
                    return
            except TakenOverError as error:
                self._failure = str(error)
                self._news.append(f"upload   {error}. Training continues")
                return
            except Exception as error:  # training continues, whatever a store raises
                pause, rounds = min(_LONGEST_PAUSE, 2 * pause + 1.0), rounds + 1
                reason = str(error) or type(error).__name__
                if reason != self._failure:
                    self._news.append(f"upload   failed, will be retried: {reason}. Training continues")
                self._failure = reason
                if ends and rounds >= _FINAL_ROUNDS:
                    return

    def _tidy(self) -> None:
        """Prepares the store, once: clears it for a new run, removes incomplete checkpoints, marks checkpoints later
        than the newest local one as set aside, and records the checkpoints that need no upload."""
        self.remote.require_own()
        if self.fresh:
            self.remote.clear()
        self.remote.sweep()
        local, remote = complete_steps(self.run / CHECKPOINTS), self.remote.steps()
        later = [step for step in remote if step > max(local, default=0)]
        if later:
            self.remote.unmark(later, into=ASIDE)
        for step in set(local) & set(remote):
            if self._is_uploaded(step):
                self._linked_steps.add(step)
        remaining = [step for step in remote if step not in later]
        if remaining and self.remote.named(LATEST) != remaining[-1]:
            self.remote.point(LATEST, remaining[-1])

    def _is_uploaded(self, step: int) -> bool:
        """Whether the checkpoint on the store equals the local one. Compares all sizes, and the sha256 of JSON
        files."""
        manifest = self.remote.manifest(step)
        files = {str(path.relative_to(self.run)): path for path in self._files(step)}
        if manifest is None or manifest.files.keys() != files.keys():
            return False
        return all(
            path.stat().st_size == manifest.files[name][0]
            and (path.suffix != ".json" or sha256(path) == manifest.files[name][1])
            for name, path in files.items()
        )

    def _files(self, step: int) -> list[Path]:
        """The local files of a checkpoint, and of the critic's checkpoint of the same step."""
        folders = [step_folder(self.run / inner, step) for inner in (CHECKPOINTS, f"{CRITIC}/{CHECKPOINTS}")]
        files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
        return [path for path in files if not any(part.endswith(_PASSING) for part in path.parts)]

    def _link_new(self) -> None:
        for step in complete_steps(self.run / CHECKPOINTS):
            waits = self.critic and not step_folder(self.run / CRITIC / CHECKPOINTS, step).is_dir()
            if step in self._linked_steps or waits:
                continue
            partial = self._links / f"{name_of(step)}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            try:
                link_files(self.run, [path.relative_to(self.run) for path in self._files(step)], partial)
            except FileNotFoundError:
                continue  # retention removed it meanwhile: there is a newer one
            os.rename(partial, self._links / name_of(step))
            self._linked_steps.add(step)

    def _linked(self) -> list[int]:
        """The steps that are linked but not uploaded, ascending."""
        return complete_steps(self._links)

    def _round(self, ends: bool) -> None:
        """Uploads everything that is due: first other files, then checkpoints. ends: whether the run has ended."""
        steps, best = self._linked(), best_step(self.run / CHECKPOINTS)
        if steps or ends or time.monotonic() >= self._records_due:
            began = time.monotonic()
            self._send_records()
            seconds = time.monotonic() - began
            self._records_due = time.monotonic() + max(_RECORDS_SECONDS, _RECORDS_SHARE * seconds)
        for step in steps:
            folder = self._links / name_of(step)
            if step not in superseded(self._linked(), self.config.keep, self.config.keep_every) or step == best:
                began = time.monotonic()
                self.remote.upload(step, folder)
                url = f"{self.remote.store.url}/{CHECKPOINTS}/{name_of(step)}"
                self._news.append(f"uploaded {url} in {time.monotonic() - began:.1f} s")
                self._point_best(best)
                last = self.config.trainer_state == "last"
                self.remote.prune(self.config.keep, self.config.keep_every, best, last_state=last)
            shutil.rmtree(folder)
            self._link_new()
        if ends:
            self._point_best(best)

    def _point_best(self, best: int | None) -> None:
        if best is not None and best != self.remote.named(BEST) and best in self.remote.steps():
            self.remote.point(BEST, best)

    def _send_records(self) -> None:
        for path in records(self.run):
            try:
                stat = path.stat()
                name = str(path.relative_to(self.run))
                if self._sent.get(name) != (stat.st_size, stat.st_mtime_ns):
                    self.remote.store.put(path, name)
                    self._sent[name] = (stat.st_size, stat.st_mtime_ns)
            except FileNotFoundError:
                continue  # the file was moved or removed in the meantime


def records(run: Path) -> Iterator[Path]:
    """Yields the files of a run folder except checkpoints and temporary files."""
    for folder, inner, names in os.walk(run):
        relative = Path(folder).relative_to(run)
        inner[:] = sorted(
            name for name in inner if (relative / name).parts[0] not in _LEFT_OUT and relative / name != _OF_CRITIC
        )
        for name in sorted(names):
            path = Path(folder) / name
            passing = str(relative / name) in _LEFT_OUT or name.endswith(_PASSING)
            if not passing and path.is_file() and not path.is_symlink():
                yield path


_OF_CRITIC = Path(CRITIC) / CHECKPOINTS
