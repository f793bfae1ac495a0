"""How buckets travel from the ranks that send to the engines."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import UserError, first_line
from weft.rollout.sync import protocol
from weft.rollout.sync.protocol import SyncError, broadcast, join_group, open_store
from weft.rollout.sync.server import Link

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 4  # one is written, one is taken, and two are agreed on or wait, so that neither end does
_PREFIX = "weft-sync-"


class Slots:
    """Bucket memories in files of shared memory, which all ranks of a host and its engines map.

    They stay from sync to sync, because the first touch of memory costs more than a copy. The rank that makes them
    holds a lock on each, so that those of a process that was killed can be told, and are removed by the next.
    """

    def __init__(self, key: str, owner: int, room: int, size: int, create: bool) -> None:
        """key: no other's, not even of one that has ended, because engines keep what they have mapped. owner: the rank
        that makes them; others open them after it has. room: bytes of each; size: at which a bucket is full. UserError
        where memory is short."""
        self.size = size
        self.paths = [SHARED_MEMORY / f"{_PREFIX}{key}-{owner}-{slot}" for slot in range(SLOTS)]
        self._locks = list[int]()
        if create:
            _remove_stale()
            for path in self.paths:
                self._locks.append(_create(path, room))
        self._memories = [torch.from_file(str(path), shared=True, size=room, dtype=torch.uint8) for path in self.paths]

    def memory(self, number: int) -> Tensor:
        """Of bucket `number`: slots are used in turn."""
        return self._memories[number % SLOTS]

    def path(self, number: int) -> str:
        """The file of it."""
        return str(self.paths[number % SLOTS])

    def close(self) -> None:
        """Give the memory back, where this rank has made it."""
        self._memories = []
        for path, lock in zip(self.paths, self._locks, strict=False):
            with suppress(FileNotFoundError):
                path.unlink()
            os.close(lock)
        self._locks = []


def _locked(path: Path) -> int:
    """A new file, locked. Another run may remove it as stale before it is: then it is made again."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _create(path: Path, size: int) -> int:
    """A locked file with its memory taken: a write to a map of what is not there would kill the process."""
    descriptor = _locked(path)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        path.unlink()
        free = shutil.disk_usage(SHARED_MEMORY).free
        raise UserError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB left, and a sync needs {SLOTS} buckets of {size / 1e6:.0f} MB: "
            "set rollout.bucket_mb lower (a bucket holds at least the largest tensor), give it more (docker run "
            "--shm-size), or set rollout.transport=group."
        ) from error
    return descriptor


def _remove_stale() -> None:
    """Slots whose owner is gone: nobody holds their lock."""
    for path in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


class Own:
    """Bucket memories on the device of a rank that sends; nothing on others."""

    def __init__(self, room: int, size: int, device: torch.device, leads: bool) -> None:
        """room: bytes of each; size: at which a bucket is full. UserError where memory is short."""
        self.size = size
        try:
            self._memories = [protocol.device_memory.allocate(room, device) for _ in range(SLOTS if leads else 0)]
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{device} has no room for the {SLOTS} buckets of {room / 1e6:.0f} MB that a sync needs: set "
                f"rollout.bucket_mb lower (a bucket holds at least the largest tensor). {first_line(error)}"
            ) from error

    def memory(self, number: int) -> Tensor | None:
        """Of bucket `number`: slots are used in turn."""
        return self._memories[number % SLOTS] if self._memories else None

    def close(self) -> None:
        """Give the memory back."""
        self._memories = []


class DeviceSlots(Own):
    """Bucket memories that engines on the same device, or one that they see, map (CUDA IPC); they stay mapped."""

    def __init__(self, room: int, size: int, device: torch.device, leads: bool) -> None:
        super().__init__(room, size, device, leads)
        self._id = secrets.token_hex(8)

    def describe(self, links: Sequence[Link]) -> list[dict[str, Any]]:
        """What each link must know to map them, where it has not. SyncError where they cannot be shared."""
        return [{"kind": "ipc", "id": self._id, "handles": self._handles(link)} for link in links]

    def _handles(self, link: Link) -> list[dict[str, Any]]:
        if link.mapped == self._id:
            return []
        try:
            return [protocol.device_memory.share(memory) for memory in self._memories]
        except RuntimeError as error:
            raise SyncError(
                f"memory of this device cannot be shared with {link.name} (CUDA IPC): {first_line(error)}. Where this "
                "machine does not allow it, set rollout.transport=shared"
            ) from error

    def finish(self, number: int) -> dict[str, Any]:
        """Wait until bucket `number` is written; where it is."""
        protocol.device_memory.wait(self._memories[number % SLOTS])
        return {"slot": number % SLOTS}


class Group:
    """A process group of a sending rank, its rank 0, and the workers of engines; kept while these stay the same."""

    def __init__(self, address: str, backend: str, timeout: float) -> None:
        self.address, self.backend, self.timeout = address, backend, timeout
        self._id = ""
        self._group: Any = None
        self._store: Any = None
        self._members = list[tuple[str, int]]()
        self._works = dict[int, Any]()

    def describe(self, links: Sequence[Link]) -> list[dict[str, Any]]:
        """What each link must know to join; a new group where one of them is new."""
        members = [(link.name, link.member) for link in links]
        known = self._group is not None and members == self._members
        if not known or any(link.joined != self._id for link in links):
            self._group, self._members, self._id = None, members, secrets.token_hex(8)
            self._store = open_store(self.address, 0, self.timeout, serve=True)
        common = {"kind": "group", "backend": self.backend, "id": self._id, "port": self._store.port}
        return [{**common, "rank": rank, "world": len(links) + 1} for rank in range(1, len(links) + 1)]

    def join(self) -> None:
        """After the links were told; waits for them."""
        if self._group is None:
            world = len(self._members) + 1
            try:
                self._group = join_group(self._store, self._id, 0, world, self.backend, self.timeout)
            except RuntimeError as error:
                names = ", ".join(sorted({name for name, _ in self._members}))
                raise SyncError(f"no process group with {names} within {self.timeout:g} s: {error}") from error

    def start(self, number: int, memory: Tensor) -> None:
        """Send a bucket; memory must stay as it is until wait(number)."""
        self._works[number] = broadcast(self._group, memory)

    def wait(self, number: int) -> None:
        """Until a bucket has left."""
        try:
            self._works.pop(number).wait()
        except RuntimeError as error:
            raise SyncError(f"bucket {number} did not go through the group: {error}") from error

    def leave(self) -> None:
        """After a failure: the next sync makes another. A group ends when what it was sending has come to its end, by
        the timeout where nobody takes it; that is not waited for."""
        left = [self._group, self._works]
        self._group, self._works = None, {}
        threading.Thread(target=left.clear, name="weft group that is left", daemon=True).start()
