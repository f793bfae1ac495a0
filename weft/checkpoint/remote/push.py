"""Uploads checkpoints to the hub: a single one (`weft push`), or the checkpoints of a run during training."""

from __future__ import annotations

import shlex
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils.tqdm import disable_progress_bars

from weft.checkpoint.remote.card import CARD, model_card
from weft.checkpoint.retention import TRAINER_STATE, best_step, complete_steps, step_folder
from weft.config.schema import CheckpointConfig
from weft.errors import UserError, first_line
from weft.files import link_files
from weft.parallel.shards.digests import DIGESTS

T = TypeVar("T")
_OFFLINE = "HF_HUB_OFFLINE is set. Unset it"
# Names of exceptions of httpx (used by the hub's client) for requests without an answer.
_UNANSWERED = {"TransportError", "ConnectionError", "TimeoutError"}


@dataclass(frozen=True)
class Repository:
    """A repository. name: OWNER/NAME. private: whether a new repository is private. revision: the branch; None for the
    main branch. key: the command or config key, for messages."""

    name: str
    private: bool = False
    revision: str | None = None
    key: str = "weft push"

    def prepare(self) -> None:
        """Creates the repository and its branch if they are missing. Raises UserError if the hub cannot be reached, or
        the token is missing or may not write."""
        if constants.HF_HUB_OFFLINE:
            raise self._refusal(_OFFLINE)
        if get_token() is None:
            raise self._refusal("no token of the hub on this machine. Run `hf auth login`, or set HF_TOKEN")
        self._call(lambda api: api.create_repo(self.name, private=self.private or None, exist_ok=True))
        if self.revision is not None:
            branch = self.revision
            self._call(lambda api: api.create_branch(self.name, branch=branch, exist_ok=True))

    def upload(self, folder: Path, message: str) -> str:
        """Uploads the files of a folder in one commit. Returns the URL of the commit. Raises UserError if the hub
        refuses."""
        done = self._call(
            lambda api: api.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message, revision=self.revision
            )
        )
        return str(done.commit_url)

    def _call(self, ask: Callable[[HfApi], T]) -> T:
        try:
            return ask(HfApi(library_name="weft"))
        except Exception as error:  # from the client, httpx, or hf_xet
            raise self._refusal(_reason(self.name, error)) from error

    def _refusal(self, reason: str) -> UserError:
        return UserError(f"{self.key}: the upload to {self.name} failed: {reason}.")


def _reason(name: str, error: Exception) -> str:
    """Explains an error of the hub, and how to fix it."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status is None:
        if isinstance(error, OfflineModeIsEnabled):
            return _OFFLINE
        if {cls.__name__ for cls in type(error).__mro__} & _UNANSWERED:
            return (
                f"{constants.ENDPOINT} (HF_ENDPOINT) cannot be reached ({first_line(error)}). Check the network, then "
                "try again"
            )
        return f"{type(error).__name__}: {first_line(error)}"
    server_message = getattr(error, "server_message", None) or ""
    answer = f"the hub answers {status}" + (f" ({first_line(ValueError(server_message))})" if server_message else "")
    if status == 401:
        return f"{answer}, the token is invalid. Run `hf auth login`, or set HF_TOKEN to another token"
    if status == 403:
        return (
            f"{answer}, the token has no write access there. Create a token with write access at "
            f"{constants.ENDPOINT}/settings/tokens, or name another repository"
        )
    if status == 404:
        return f"{answer}: is {name.partition('/')[0]} the name of a user or an organisation that you can write to?"
    if status == 429:
        return f"{answer}, too many requests. Try again in a few minutes"
    if status >= 500:
        return f"{answer}, an internal error of the hub. Try again later"
    return f"{answer}: {first_line(error)}"


# ---------------------------------------------------------------- uploads

_POLL_SECONDS = 0.5
# Parts of a checkpoint that weft does not upload: trainer state, digests, the critic, and files of other tools.
_NOT_UPLOADED = (TRAINER_STATE, DIGESTS, "critic", ".cache", ".git")


def push_checkpoint(repository: Repository, checkpoint: Path, message: str, links: Path) -> str:
    """Uploads the files that a user of the model needs, and a model card if the checkpoint has none. Returns the
    commit's URL.

    links: a folder for hard links, created and removed here, preferably on the checkpoint's file system. The links stay
    valid if retention removes the checkpoint during the upload. Raises UserError if the hub refuses, and
    FileNotFoundError if the checkpoint is removed before it is linked.
    """
    try:
        link_files(checkpoint, files_of_model(checkpoint), links)
        if not (links / CARD).exists():
            (links / CARD).write_text(model_card(checkpoint, repository.name), encoding="utf-8")
        return repository.upload(links, message)
    finally:
        shutil.rmtree(links, ignore_errors=True)


def repeated(checkpoint: Path, repository: Repository) -> str:
    """The command that repeats the upload of a checkpoint."""
    private = " --private" if repository.private else ""
    branch = "" if repository.revision is None else f" --revision {repository.revision}"
    return f"weft push {shlex.quote(str(checkpoint))} {repository.name}{private}{branch}"


class Pusher:
    """Uploads the checkpoints of a run, one at a time, in a thread of the process that writes the run folder.

    With checkpoint.push_at=save, each upload sends the newest complete checkpoint; older checkpoints saved during the
    last upload are skipped. A failed upload never ends the run: a message gives the reason and the command that repeats
    it.
    """

    def __init__(self, repository: Repository, config: CheckpointConfig, run: Path) -> None:
        self.repository, self.config, self.run = repository, config, run
        self._news: list[str] = []
        self._done: Path | None = None  # the last checkpoint that was uploaded, or whose upload failed
        self._stop, self._cancelled = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._began = max(complete_steps(self._checkpoints), default=0)

    @property
    def _checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def start(self) -> None:
        """Starts the thread."""
        disable_progress_bars()  # the hub's progress bars would overwrite the training bar
        shutil.rmtree(self._links, ignore_errors=True)
        self._thread = threading.Thread(target=self._work, name="push", daemon=True)
        self._thread.start()

    def pop_messages(self) -> list[str]:
        """The messages for the user since the last call."""
        news, self._news = self._news, []
        return news

    def finish(self, stopped: bool, beat: Callable[[], None]) -> list[str]:
        """Waits for the uploads at the end of the run. Returns messages for the user. stopped: whether a signal stopped
        the run; then no more uploads are started. beat: called regularly while waiting."""
        self._cancelled = stopped
        self._stop.set()
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            beat()
        return self.pop_messages()

    def give_up(self) -> None:
        """Starts no more uploads, because the run ends with an error. A running upload ends with the process."""
        self._cancelled = True
        self._stop.set()

    # ------------------------------------------------------------ the thread

    @property
    def _links(self) -> Path:
        return self.run / "pushing"

    def _work(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            steps = complete_steps(self._checkpoints) if self.config.push_at == "save" else []
            if steps and steps[-1] > self._began:
                self._push(step_folder(self._checkpoints, steps[-1]))
        last = self._last()
        if last is not None and last != self._done:
            if self._cancelled:
                self._news.append(
                    f"push     {last} is not uploaded, because the run was stopped: {repeated(last, self.repository)}"
                )
            else:
                self._push(last)

    def _last(self) -> Path | None:
        """The checkpoint that the hub must have at the end: the best (checkpoint.keep_best), else the last."""
        steps = complete_steps(self._checkpoints)
        best = best_step(self._checkpoints) if self.config.keep_best else None
        step = best if best is not None else steps[-1] if steps else None
        return None if step is None else step_folder(self._checkpoints, step)

    def _push(self, checkpoint: Path) -> None:
        if checkpoint == self._done:
            return
        try:
            url = push_checkpoint(self.repository, checkpoint, message_of(checkpoint, self.run), self._links)
            self._news.append(f"pushed   {checkpoint.name} to {url}")
        except FileNotFoundError:
            return  # retention removed it during the upload, so a newer one exists
        except Exception as error:  # training does not depend on uploads, whatever they raise
            retry = repeated(checkpoint, self.repository)
            self._news.append(f"push     {str(error).rstrip('.')}. The run continues. To upload it: {retry}")
        self._done = checkpoint


def files_of_model(checkpoint: Path) -> list[Path]:
    """The files that a user of the model needs, relative to the checkpoint: all except _NOT_UPLOADED."""
    files = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    return sorted(path for path in files if path.parts[0] not in _NOT_UPLOADED)


def message_of(checkpoint: Path, run: Path | None = None) -> str:
    """The default commit message. run: the run folder that the message names."""
    return f"Upload {checkpoint.name}" + ("" if run is None else f" of {run.resolve().name}")
