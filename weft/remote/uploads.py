"""What goes on beside a run with its checkpoints, as soon as each is whole: uploads, in threads of the process that has
the run folder. Recipes know this file alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.remote.hub import Repository
from weft.remote.push import Pusher


def prepare(config: Any) -> None:
    """Before anything is read or trained: UserError where what the run is to upload to cannot be had."""
    if config.checkpoint.push is not None:
        repository_of(config).prepare()


def repository_of(config: Any) -> Repository:
    """What checkpoint.push names."""
    checkpoint = config.checkpoint
    return Repository(checkpoint.push, checkpoint.push_private, checkpoint.push_revision, "checkpoint.push")


class Uploads(AbstractContextManager["Uploads"]):
    """Those of a run, from its first step to its end. first: False on ranks that upload nothing."""

    def __init__(self, config: Any, run: Path, *, first: bool = True) -> None:
        pushes = first and config.checkpoint.push is not None
        self._pusher = Pusher(repository_of(config), config.checkpoint, run) if pushes else None

    def __enter__(self) -> Uploads:
        if self._pusher is not None:
            self._pusher.start()
        return self

    def take_news(self) -> list[str]:
        """What there is to say since it was last asked."""
        return [] if self._pusher is None else self._pusher.take_news()

    def finish(self, stopped: bool, beat: Callable[[], None]) -> list[str]:
        """All that the run leaves is where it belongs; what there is to say. stopped: by a signal. beat: called every
        moment, while there is something to wait for."""
        return [] if self._pusher is None else self._pusher.finish(stopped, beat)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pusher is not None and error is not None:
            self._pusher.give_up()
