"""Uploads a run's files during the run, in threads of the process that writes the run folder. Training recipes import
only this file of weft/checkpoint/remote."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.checkpoint.remote.enter import own_token
from weft.checkpoint.remote.layout import RemoteRun
from weft.checkpoint.remote.mirror import Mirror
from weft.checkpoint.remote.push import Pusher, Repository
from weft.checkpoint.remote.store import Store
from weft.config.rl_schema import RlConfig
from weft.config.urls import LocalCopy
from weft.errors import StorageError
from weft.launch import flight
from weft.terminal import say, say_all

_AFTER_AN_ERROR = 60.0  # seconds for uploads after the run has failed


def prepare(config: Any) -> None:
    """Checks the repository of checkpoint.push before data is read. Raises UserError if it cannot be used."""
    if config.checkpoint.push is not None:
        repository_of(config).prepare()


def repository_of(config: Any) -> Repository:
    """The repository of checkpoint.push."""
    checkpoint = config.checkpoint
    return Repository(checkpoint.push, checkpoint.push_private, checkpoint.push_revision, "checkpoint.push")


class Uploads(AbstractContextManager["Uploads"]):
    """All uploads of a run. run: the run folder. resume: whether the run was resumed. first: False on ranks that upload
    nothing."""

    def __init__(self, config: Any, run: Path, *, resume: bool, first: bool = True) -> None:
        pushes = first and config.checkpoint.push is not None
        self._pusher = Pusher(repository_of(config), config.checkpoint, run) if pushes else None
        self._mirror = mirror_of(config, run, resume=resume) if first else None

    def __enter__(self) -> Uploads:
        if self._mirror is not None:
            self._mirror.upload_config()
        for thread in (self._mirror, self._pusher):
            if thread is not None:
                thread.start()
        return self

    def pop_messages(self) -> list[str]:
        """The messages for the user since the last call."""
        threads = (self._mirror, self._pusher)
        return [text for thread in threads if thread is not None for text in thread.pop_messages()]

    def finish(self, stopped: bool, beat: Callable[[], None]) -> list[str]:
        """Waits until everything is uploaded. Returns messages for the user. stopped: whether a signal stopped the run.
        beat: called regularly while waiting. Raises StorageError if the object store lacks a file."""
        news = [] if self._pusher is None else self._pusher.finish(stopped, beat)
        if self._mirror is None:
            return news
        try:
            return [*news, *self._mirror.finish(beat)]
        except StorageError:
            say_all([*news, *self._mirror.pop_messages()])
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._pusher is not None:
            self._pusher.give_up()
        if self._mirror is not None and not self._mirror.failed:
            say(f"ending   complete checkpoints are uploaded first, within {_AFTER_AN_ERROR:g} s", error=True)
            try:
                say_all(self._mirror.finish(flight.recorder.beat, _AFTER_AN_ERROR), error=True)
            except StorageError as problem:
                say(f"upload   {problem}", error=True)


def mirror_of(config: Any, run: Path, *, resume: bool) -> Mirror | None:
    """The Mirror of a run; None if run.dir is a local folder."""
    if not isinstance(config.run.dir, LocalCopy):
        return None
    url = config.run.dir.remote
    critic = isinstance(config, RlConfig) and config.rl.has_critic and config.critic.ranks is not None
    remote = RemoteRun(Store(url), own_token(run))
    retry = f"weft {config.command} --resume {url}"
    return Mirror(remote, run, config.checkpoint, retry, critic=critic, fresh=not resume)


def upload_all(config: Any, run: Path) -> list[str]:
    """Uploads the complete checkpoints and records of a run that is already trained to its end. Returns messages for
    the user."""
    mirror = mirror_of(config, run, resume=True)
    if mirror is None:
        return []
    mirror.start()
    return mirror.finish(flight.recorder.beat)
