"""Object stores for tests: moto's S3 server where it is installed, and fsspec's local files, which need nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from weft.checkpoint.remote import store as stores
from weft.checkpoint.remote.layout import CHECKPOINTS
from weft.checkpoint.remote.mirror import Mirror
from weft.checkpoint.remote.store import Store, StoreError
from weft.checkpoint.retention import complete_steps

KINDS = ("file", "s3")
HAS_S3 = find_spec("moto") is not None and find_spec("s3fs") is not None


@dataclass
class OpenedStore:
    """url: where runs and data go. variables: of the environment of whoever asks the store."""

    url: str
    variables: dict[str, str] = field(default_factory=dict)

    def store(self, name: str = "") -> Store:
        return Store(f"{self.url}/{name}".rstrip("/"), delays=())

    def names(self, name: str = "") -> set[str]:
        return set(self.store(name).list())


@contextmanager
def open_store(kind: str, folder: Path) -> Iterator[OpenedStore]:
    """A store of this kind, empty."""
    if kind == "file":
        (folder / "bucket").mkdir(exist_ok=True)
        yield OpenedStore(f"file://{folder}/bucket")
        return
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        forget()
        bucket = f"bucket-{os.urandom(4).hex()}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        try:
            yield OpenedStore(f"s3://{bucket}", variables)
        finally:
            forget()
            server.stop()


def forget() -> None:
    """fsspec's clients of stores that are gone."""
    with suppress(ImportError):
        from s3fs import S3FileSystem

        S3FileSystem.clear_instance_cache()


def counted(number: int, act: Callable[[], Any]) -> Any:
    """Patches every call that changes a store: before the one of this number, which counts from 1, `act` is called."""
    calls = [0]

    def watched(name: str) -> Any:
        original = getattr(Store, name)

        def call(self: Store, *words: Any) -> Any:
            if name == "remove":
                for word in list(words[0]):
                    count()
                    original(self, [word])
                return None
            count()
            return original(self, *words)

        return call

    def count() -> None:
        calls[0] += 1
        if calls[0] == number:
            act()

    return mock.patch.multiple(stores.Store, **{name: watched(name) for name in ("write", "put", "remove")})


class KilledUpload(BaseException):
    """Where a process would be gone."""


def die() -> None:
    raise KilledUpload


class KillsItself:
    """Called in a process before it begins: the process is killed before this change of a checkpoint on the store.

    Training waits until its first checkpoint is uploaded. A short run would otherwise be over before that, and the
    checkpoint superseded.
    """

    def __init__(self, step: str, number: int) -> None:
        self.step, self.number = step, number

    def __call__(self) -> None:
        put, pop_messages, changes = Store.put, Mirror.pop_messages, [0]

        def put_or_die(store: Store, local: Path, name: str) -> None:
            changes[0] += self.step in name
            if changes[0] == self.number:
                os.kill(os.getpid(), signal.SIGKILL)
            put(store, local, name)

        def pop_after_the_first_upload(mirror: Mirror) -> list[str]:
            deadline = time.monotonic() + 60.0
            while (steps := complete_steps(mirror.run / CHECKPOINTS)) and not is_uploaded(mirror, steps[0]):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return pop_messages(mirror)

        Store.put = put_or_die  # type: ignore[method-assign]
        Mirror.pop_messages = pop_after_the_first_upload  # type: ignore[method-assign]


def is_uploaded(mirror: Mirror, step: int) -> bool:
    """Whether the thread has linked this checkpoint, uploaded it and removed the links."""
    return step in mirror._linked_steps and step not in mirror._linked()


class FailsFor:
    """Done in a process before it begins: nothing can be put there any more once this name has been, until `until` is
    there."""

    def __init__(self, after: str, until: Path | None = None) -> None:
        self.after, self.until = after, until

    def __call__(self) -> None:
        put, write, began = Store.put, Store.write, [False]

        def fails(name: str) -> None:
            if began[0] and not (self.until is not None and self.until.exists()):
                raise StoreError(f"{name}: the store is down")
            began[0] |= self.after in name

        def watched(store: Store, local: Path, name: str) -> None:
            fails(name)
            put(store, local, name)

        def written(store: Store, name: str, content: bytes) -> None:
            fails(name)
            write(store, name, content)

        Store.put, Store.write = watched, written  # type: ignore[method-assign]
