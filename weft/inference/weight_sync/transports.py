"""Transports of buckets from the sending ranks to the engines: shared memory, CUDA IPC, and a process group."""

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
from weft.inference.weight_sync import protocol
from weft.inference.weight_sync.protocol import SyncError, broadcast, join_group, open_store
from weft.inference.weight_sync.server import Connection
from weft.launch import scratch
from weft.launch.scratch import MEMORY_PREFIX, remove_abandoned_memory

SLOTS = 4  # buffers: one being written, one being read, and two in between, so that neither side waits


class HostMemory:
    """Host memory registered with CUDA, so that copies to it are asynchronous."""

    def register(self, memory: Tensor) -> bool:
        """Whether CUDA has registered it. If registration is not allowed (a container's limit on locked memory), copies
        still work, synchronously."""
        portable = 1  # for every device's context
        done = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)) == 0
        if not done:
            with suppress(RuntimeError):  # the next kernel raises the error, and clears it
                torch.zeros(1, device="cuda")
        return done

    def release(self, memory: Tensor) -> None:
        """Undo register(), before the memory is unmapped."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


host_memory = HostMemory()


class SharedBuckets:
    """Bucket buffers in files of shared memory, which the ranks and engines of a host map.

    Buffers are kept between syncs, because the first touch of memory costs more than a copy. The rank that creates a
    file keeps it locked, so that later runs recognise and remove the files of a killed process.
    """

    def __init__(
        self, key: str, owner: int, room: int, size: int, create: bool, device: torch.device | None = None
    ) -> None:
        """key: unique, even among ended runs, because engines keep their maps. owner: the rank that creates the files;
        others open them afterwards. room: bytes of each buffer. size: bytes at which a bucket is full. create: whether
        this rank creates the files; UserError if memory is short. device: from which buckets are written; on CUDA the
        maps are registered, so that copies are asynchronous, at several times the rate of pageable memory."""
        self.size = size
        self.paths = [scratch.SHARED_MEMORY / f"{MEMORY_PREFIX}{key}-{owner}-{slot}" for slot in range(SLOTS)]
        self._locks = list[int]()
        if create:
            remove_abandoned_memory()
            for path in self.paths:
                self._locks.append(_create(path, room))
        self._memories = [torch.from_file(str(path), shared=True, size=room, dtype=torch.uint8) for path in self.paths]
        registered = self._memories if device is not None and device.type == "cuda" else []
        self._registered = [memory for memory in registered if host_memory.register(memory)]

    def memory(self, number: int) -> Tensor:
        """The buffer of bucket `number`; buffers are reused in turn."""
        return self._memories[number % SLOTS]

    def path(self, number: int) -> str:
        """The file of that buffer."""
        return str(self.paths[number % SLOTS])

    def close(self) -> None:
        """Unmap the buffers; the rank that created the files removes them."""
        for memory in self._registered:
            host_memory.release(memory)
        self._memories, self._registered = [], []
        for path, lock in zip(self.paths, self._locks, strict=False):
            with suppress(FileNotFoundError):
                path.unlink()
            os.close(lock)
        self._locks = []


def _locked(path: Path) -> int:
    """Create and lock a file; retried if another run removed it as stale before it was locked. Returns the file
    descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _create(path: Path, size: int) -> int:
    """Create a locked file and reserve its memory; returns the file descriptor. Without the reservation, a write would
    kill the process when memory runs out."""
    descriptor = _locked(path)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        path.unlink()
        memory = scratch.SHARED_MEMORY
        free = shutil.disk_usage(memory).free
        raise UserError(
            f"{memory} has {free / 1e6:.0f} MB left, but a sync needs {SLOTS} buckets of {size / 1e6:.0f} MB. Lower "
            f"rollout.bucket_mb (a bucket holds at least the largest tensor), enlarge {memory} (docker run "
            "--shm-size), or set rollout.transport=group."
        ) from error
    return descriptor


class DeviceBuckets:
    """Bucket buffers on the device of a sending rank; none on other ranks."""

    def __init__(self, room: int, size: int, device: torch.device, leads: bool) -> None:
        """room: bytes of each buffer. size: bytes at which a bucket is full. leads: whether this rank sends. UserError
        if memory is short."""
        self.size = size
        try:
            self._memories = [protocol.device_memory.allocate(room, device) for _ in range(SLOTS if leads else 0)]
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{device} has no room for the {SLOTS} buckets of {room / 1e6:.0f} MB that a sync needs. Lower "
                f"rollout.bucket_mb (a bucket holds at least the largest tensor). {first_line(error)}"
            ) from error

    def memory(self, number: int) -> Tensor | None:
        """The buffer of bucket `number`; buffers are reused in turn."""
        return self._memories[number % SLOTS] if self._memories else None

    def close(self) -> None:
        """Free the buffers."""
        self._memories = []


class IpcBuckets(DeviceBuckets):
    """Bucket buffers that engines map by CUDA IPC, if they see this rank's device. Engines keep the maps."""

    def __init__(self, room: int, size: int, device: torch.device, leads: bool) -> None:
        super().__init__(room, size, device, leads)
        self._id = secrets.token_hex(8)

    def describe(self, connections: Sequence[Connection]) -> list[dict[str, Any]]:
        """Per connection, the message fields for mapping the buffers. SyncError if they cannot be shared."""
        return [{"kind": "ipc", "id": self._id, "handles": self._handles(connection)} for connection in connections]

    def _handles(self, connection: Connection) -> list[dict[str, Any]]:
        if connection.mapped == self._id:
            return []
        try:
            return [protocol.device_memory.share(memory) for memory in self._memories]
        except RuntimeError as error:
            raise SyncError(
                f"memory of this device cannot be shared with {connection.name} (CUDA IPC): {first_line(error)}. If "
                "this machine does not allow CUDA IPC, set rollout.transport=shared"
            ) from error

    def finish(self, number: int) -> dict[str, Any]:
        """Wait until bucket `number` is written; returns the message fields with its slot."""
        protocol.device_memory.wait(self._memories[number % SLOTS])
        return {"slot": number % SLOTS}


class BroadcastGroup:
    """A process group of a sending rank (rank 0) and the workers of engines, kept while its members stay the same."""

    def __init__(self, address: str, backend: str, timeout: float) -> None:
        self.address, self.backend, self.timeout = address, backend, timeout
        self._id = ""
        self._group: Any = None
        self._store: Any = None
        self._members = list[tuple[str, int]]()
        self._works = dict[int, Any]()

    def describe(self, connections: Sequence[Connection]) -> list[dict[str, Any]]:
        """Per connection, the message fields for joining the group. A new member leads to a new group."""
        members = [(connection.name, connection.member) for connection in connections]
        is_current = self._group is not None and members == self._members
        if not is_current or any(connection.joined != self._id for connection in connections):
            self._group, self._members, self._id = None, members, secrets.token_hex(8)
            self._store = open_store(self.address, 0, self.timeout, serve=True)
        common = {"kind": "group", "backend": self.backend, "id": self._id, "port": self._store.port}
        return [{**common, "rank": rank, "world": len(connections) + 1} for rank in range(1, len(connections) + 1)]

    def join(self) -> None:
        """Create the group if needed: waits for all members, which must have received describe()'s fields."""
        if self._group is None:
            world = len(self._members) + 1
            try:
                self._group = join_group(self._store, self._id, 0, world, self.backend, self.timeout)
            except RuntimeError as error:
                names = ", ".join(sorted({name for name, _ in self._members}))
                raise SyncError(f"no process group with {names} within {self.timeout:g} s: {error}") from error

    def start(self, number: int, memory: Tensor) -> None:
        """Start sending a bucket; the buffer must stay unchanged until wait(number) returns."""
        self._works[number] = broadcast(self._group, memory)

    def wait(self, number: int) -> None:
        """Wait until a bucket is sent."""
        try:
            protocol.complete(self._works.pop(number), self.timeout)
        except RuntimeError as error:
            late = isinstance(error, protocol.BroadcastTimeoutError)
            raise SyncError(f"bucket {number} did not go through the group: {error}", late) from error

    def leave(self) -> None:
        """Drop the group after a failure; the next sync creates another. Its pending operations are aborted, because
        NCCL's watchdog would end this process because of them. A thread does this, because it may take a while."""
        abandoned = [self._group, self._works]
        self._group, self._works = None, {}

        def destroy() -> None:
            if abandoned[0] is not None:
                protocol.abort(abandoned[0])
            abandoned.clear()

        threading.Thread(target=destroy, name="weft group that is left", daemon=True).start()
