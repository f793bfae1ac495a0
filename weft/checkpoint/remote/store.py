"""An object store, accessed through fsspec. Operations are retried after temporary errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weft.config.urls import url_problem
from weft.errors import StorageError, UserError, first_line

T = TypeVar("T")
# Seconds between attempts, in addition to the retries of fsspec's file systems: PATIENT for uploads during training,
# BRIEF, a single attempt, for operations that the user waits for.
PATIENT, BRIEF = (1.0, 2.0, 4.0, 8.0), ()
# Errors that are not retried; the names are of botocore's exceptions.
_LASTING = (PermissionError, IsADirectoryError, ValueError, TypeError)
_LASTING_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}
# Keys under which fsspec's file systems report a value that changes with an object's content.
_MARKS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "updated", "mtime")


class StoreError(StorageError):
    """An operation on a store failed."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object. size: in bytes. mark: a value that changes with its content, such as an etag."""

    size: int
    mark: str


class Store:
    """The objects under a URL. Names of objects are relative to the URL, with slashes. delays: seconds between
    attempts. Methods raise StoreError, and the constructor also UserError for a URL that cannot be used."""

    def __init__(self, url: str, delays: tuple[float, ...] = PATIENT) -> None:
        self.url, self.delays = url.rstrip("/"), delays
        if problem := url_problem("the path", self.url):
            raise UserError(problem)
        from fsspec.core import url_to_fs  # imported here: the import is slow, and most runs need no store

        options = {"auto_mkdir": True} if self.url.startswith(("file:", "local:")) else {}
        self._fs, self._root = self._tried("", lambda: url_to_fs(self.url, **options))

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        try:
            return bytes(self._tried(name, lambda: self._fs.cat_file(self._path(name))))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small object, atomically if the store can."""
        self._written(name, lambda: self._fs.pipe_file(self._path(name), content))

    def put(self, local: Path, name: str) -> None:
        """Uploads a file. Raises FileNotFoundError if there is no such local file."""
        local.stat()
        self._written(name, lambda: self._fs.put_file(str(local), self._path(name)))

    def get(self, name: str, local: Path) -> None:
        """Downloads an object. Raises FileNotFoundError if there is none."""
        local.parent.mkdir(parents=True, exist_ok=True)
        self._tried(name, lambda: self._fs.get_file(self._path(name), str(local)))

    def list(self, under: str = "") -> dict[str, StoredObject]:
        """Name -> entry of all objects under a name, at any depth."""
        self._fs.invalidate_cache()
        try:
            infos = self._tried(under, lambda: self._fs.find(self._path(under), detail=True))
        except FileNotFoundError:
            return {}
        return self._entries(infos)

    def match(self, pattern: str) -> dict[str, StoredObject]:
        """Name -> entry of the objects that match a pattern."""
        self._fs.invalidate_cache()
        infos = self._tried(pattern, lambda: self._fs.glob(self._path(pattern), detail=True))
        return self._entries({name: info for name, info in infos.items() if info["type"] == "file"})

    def entry(self, name: str) -> StoredObject | None:
        """The entry of the object of exactly this name; None if there is none."""
        self._fs.invalidate_cache()
        try:
            info = self._tried(name, lambda: self._fs.info(self._path(name)))
        except FileNotFoundError:
            return None
        return _entry(info) if info["type"] == "file" else None

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects; missing ones are ignored."""
        for name in names:
            with suppress(FileNotFoundError):
                self._tried(name, partial(self._fs.rm_file, self._path(name)))

    def _written(self, name: str, do: Callable[[], Any]) -> None:
        try:
            self._tried(name, do)
        except FileNotFoundError as error:
            raise StoreError(f"{self.url}/{name}: there is no such bucket. Create it, or name another") from error

    def _entries(self, infos: Mapping[str, Mapping[str, Any]]) -> dict[str, StoredObject]:
        start = len(self._root.rstrip("/")) + 1
        return {name[start:]: _entry(info) for name, info in sorted(infos.items()) if len(name) >= start}

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _tried(self, name: str, do: Callable[[], T]) -> T:
        for delay in (*self.delays, None):
            try:
                return do()
            except FileNotFoundError:
                raise
            except NotADirectoryError as error:  # local files: the path has a file where it needs a folder
                raise FileNotFoundError(str(error)) from error
            except Exception as error:  # each file system raises its own exceptions
                if delay is None or isinstance(error, _LASTING) or type(error).__name__ in _LASTING_NAMES:
                    raise StoreError(f"{self.url}{'/' * bool(name)}{name}: {_reason(error)}") from error
            time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")


def _entry(info: Mapping[str, Any]) -> StoredObject:
    return StoredObject(int(info.get("size") or 0), "|".join(str(info[key]) for key in _MARKS if info.get(key)))


def _reason(error: Exception) -> str:
    text = first_line(error)
    if isinstance(error, PermissionError):
        return f"access denied ({text}). The credentials must allow listing, reading, writing and deleting there"
    if type(error).__name__ in _LASTING_NAMES:
        return f"{text}: set the store's credentials, as in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return f"{type(error).__name__}: {text}"
