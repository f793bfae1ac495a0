"""A repository of the HuggingFace hub as the target of checkpoints, and the messages about refusals of the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import OfflineModeIsEnabled

from weft.errors import UserError, first_line

T = TypeVar("T")
_OFFLINE = "HF_HUB_OFFLINE is set; unset it"
# Names of the exceptions that httpx, which the hub's client uses, raises without an answer.
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
            raise self._refused(_OFFLINE)
        if get_token() is None:
            raise self._refused("there is no token of the hub: run `hf auth login`, or set HF_TOKEN")
        self._asked(lambda api: api.create_repo(self.name, private=self.private or None, exist_ok=True))
        if self.revision is not None:
            branch = self.revision
            self._asked(lambda api: api.create_branch(self.name, branch=branch, exist_ok=True))

    def upload(self, folder: Path, message: str) -> str:
        """Uploads the files of a folder in one commit. Returns the URL of the commit. Raises UserError if the hub
        refuses."""
        done = self._asked(
            lambda api: api.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message, revision=self.revision
            )
        )
        return str(done.commit_url)

    def _asked(self, ask: Callable[[HfApi], T]) -> T:
        try:
            return ask(HfApi(library_name="weft"))
        except Exception as error:  # from the client, httpx, or hf_xet
            raise self._refused(_reason(self.name, error)) from error

    def _refused(self, reason: str) -> UserError:
        return UserError(f"{self.key}: {self.name} cannot be uploaded to: {reason}.")


def _reason(name: str, error: Exception) -> str:
    """The meaning of an error of the hub, and advice."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status is None:
        return _unanswered(error)
    said = getattr(error, "server_message", None) or ""
    answer = f"the hub answers {status}" + (f" ({first_line(ValueError(said))})" if said else "")
    if status == 401:
        return f"{answer}, it does not know the token: run `hf auth login`, or set HF_TOKEN to another"
    if status == 403:
        return (
            f"{answer}, the token may not write there: make one that may at {constants.ENDPOINT}/settings/tokens, or "
            "name a repository of your own"
        )
    if status == 404:
        return f"{answer}: is {name.partition('/')[0]} the name of a user or an organisation that you can write to?"
    if status == 429:
        return f"{answer}, too many requests: try again in some minutes"
    if status >= 500:
        return f"{answer}, it has trouble of its own: try again later"
    return f"{answer}: {first_line(error)}"


def _unanswered(error: Exception) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return _OFFLINE
    if {cls.__name__ for cls in type(error).__mro__} & _UNANSWERED:
        return (
            f"{constants.ENDPOINT} (HF_ENDPOINT) cannot be reached ({first_line(error)}): try again where there is a "
            "network"
        )
    return f"{type(error).__name__}: {first_line(error)}"
