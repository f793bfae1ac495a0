"""The protocol of a weight sync between trainer ranks and a rollout engine, and the engine's side of it.

This file is also loaded in the processes of other engines (vLLM's workers). So it imports only checksums.py from weft,
and torch only if tensors travel through a process group or lie on a device.

The sender listens, and every worker of every engine connects with its ticket. They exchange JSON messages, each
preceded by its length in 4 bytes. Tensors do not use this connection. They travel a bucket at a time, through memory of
the host or of a device that both map, through a process group, or through files:

    engine                                    sender
    {hello, key, name, member, version, has, holds, base, joined, mapped, torch, nccl}
                                              {begin: kind, version, verify, transport, manifest, adapter, form,
                                               deltas}
                                              {bucket: k, path | bytes | slot, rows: [[name, dtype, shape, offset, ..]]}
    {took: k}                                 .. more buckets; up to two are in flight
                                              {end: buckets}
    {received: {name: sum}, placed: {..},     compares these with what was sent
     mismatched: [name, ..]}
                                              {commit: version}, or {again: version}: the part comes again, without
                                              patches
    {committed: version}                      .. another part (an adapter after its base), or
                                              {done: version}

A row of a bucket may have two more fields: the number of changed elements of a patch, and the checksum of the resulting
tensor. holds: the version whose bytes the engine still has, which patches need.

Either side may send {error: text} instead of any message. An engine that has not received `commit` has no weights to
sample with. Every wait ends with an error after the ticket's timeout. A message of more than 64 MiB is an error.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.inference.weight_sync.checksums import checksum

PROTOCOL = 7
POSITION_BYTES = 4  # of a changed element in a patch: int32
WORKER_DIED = -1  # sent instead of a version, on behalf of a worker that has died
LONGEST = 1 << 26  # most bytes of a message
WIDTHS = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

Bytes = NDArray[np.uint8]


class SyncError(RuntimeError):
    """A weight sync failed. The message names engine, version and tensor. late: whether the peer did not answer in
    time. engine: the name of the engine at which it failed; "" if unknown."""

    def __init__(self, message: str, late: bool = False, engine: str = "") -> None:
        super().__init__(message)
        self.late, self.engine = late, engine


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a worker of an engine needs to receive weights. host, port: the sender's address. key: a secret that
    authenticates the connection. name, member: the engine's name, and the worker's number in it. timeout: limit on any
    single wait, in seconds."""

    host: str
    port: int
    key: str
    name: str
    member: int = 0
    timeout: float = 120.0

    def to_json(self) -> dict[str, Any]:
        """The ticket as JSON, for another process."""
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Ticket:
        """The inverse of to_json()."""
        return Ticket(**fields)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor of the manifest. name: as in a checkpoint. dtype: torch's name, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * WIDTHS[self.dtype]

    @property
    def patch_width(self) -> int:
        """The bytes of a changed element in a patch: its position and its value."""
        return POSITION_BYTES + WIDTHS[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


# ---------------------------------------------------------------- messages


def parsed(text: bytes) -> dict[str, Any]:
    """Parse a message. ValueError if it is malformed."""
    try:
        message = json.loads(text)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message is {type(message).__name__}, not an object")
    return message


@contextmanager
def understood(peer: str) -> Iterator[None]:
    """Inside, errors from missing or mistyped fields of this peer's message become a SyncError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SyncError(f"{peer} sent a malformed message: {reason:.200}") from error


class SyncChannel:
    """JSON messages over a connected socket. peer: name of the other side, for errors. timeout: seconds."""

    def __init__(self, connection: socket.socket, peer: str, timeout: float) -> None:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.peer, self.timeout = connection, peer, timeout

    def write(self, **message: Any) -> None:
        """Send a message. SyncError if the peer is gone, with the last error that it sent, or does not read in time."""
        text = json.dumps(message).encode()
        self.socket.settimeout(self.timeout)
        try:
            self.socket.sendall(len(text).to_bytes(4, "big") + text)
        except OSError as error:
            late = isinstance(error, TimeoutError)
            if not late and (peer_error := self._last_words()):
                raise SyncError(peer_error) from error
            raise SyncError(f"could not write to {self.peer}: {_reason(error, self.timeout)}", late) from error

    def read(self, awaited: str, *expected: str) -> dict[str, Any]:
        """Receive the next message, which must have one of the `expected` keys. awaited: describes the message in
        errors. SyncError if the peer reports an error, is gone, sends another message, or nothing in time."""
        try:
            message = self._message()
        except (OSError, ValueError) as error:
            text = f"{self.peer}: while waiting for {awaited}: {_reason(error, self.timeout)}"
            raise SyncError(text, isinstance(error, TimeoutError)) from error
        if "error" in message:
            raise SyncError(str(message["error"]))
        if not any(key in message for key in expected):
            raise SyncError(f"{self.peer}: while waiting for {awaited}, it sent {', '.join(message)} instead")
        return message

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _last_words(self) -> str:
        """The error that the peer sent before it left, or ""; other unread messages are skipped."""
        with suppress(OSError, ValueError):
            while True:
                message = self._message()
                if "error" in message:
                    return str(message["error"])
        return ""

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout
        length = int.from_bytes(self._exactly(4, deadline), "big")
        if length > LONGEST:
            raise ValueError(f"a message of {length} bytes is announced")
        return parsed(self._exactly(length, deadline))

    def _exactly(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise ConnectionError("it has closed the connection")
            parts += part
        return bytes(parts)


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came for {timeout:g} s"
    return str(error) or type(error).__name__


# ---------------------------------------------------------------- manifest


class Checklist:
    """Checks that each tensor of a manifest arrives exactly once, with its dtype, shape and size. Methods raise
    SyncError, which names the tensor."""

    def __init__(self, manifest: Mapping[str, TensorHeader], version: int) -> None:
        self.manifest, self.version, self.missing = manifest, version, dict.fromkeys(manifest)

    def take(self, entry: TensorHeader, length: int, changed: int | None = None) -> None:
        """Record the arrival of a tensor. length: announced bytes. changed: elements of a patch, if it is one."""
        promised = self.manifest.get(entry.name)
        if promised is None:
            raise SyncError(f"{entry.name} came with version {self.version} and is not in its manifest")
        if entry.name not in self.missing:
            raise SyncError(f"{entry.name} came twice with version {self.version}")
        if entry != promised:
            raise SyncError(
                f"{entry.name} came with version {self.version} as {entry}, but the manifest has {promised}"
            )
        expected = promised.length if changed is None else changed * promised.patch_width
        if length != expected:
            unit = promised if changed is None else f"a patch of {changed} elements of {promised}"
            raise SyncError(
                f"{entry.name} came with version {self.version} in {length} bytes, but {unit} has {expected}"
            )
        del self.missing[entry.name]

    def complete(self) -> None:
        """Check that all tensors of the manifest have arrived."""
        if self.missing:
            first = ", ".join(list(self.missing)[:3])
            raise SyncError(
                f"{len(self.missing)} of {len(self.manifest)} tensors did not come with version {self.version}: {first}"
            )


def check_manifest(manifest: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise SyncError, naming tensors, if the manifest differs from the engine's own model. expected: name -> shape in
    that model."""
    lacking, unknown = sorted(expected.keys() - manifest.keys()), sorted(manifest.keys() - expected.keys())
    if lacking:
        raise SyncError(f"the sync does not contain {', '.join(lacking[:3])} ({len(lacking)} tensors in all)")
    if unknown:
        raise SyncError(f"the model has no tensors for {', '.join(unknown[:3])} ({len(unknown)} tensors in all)")
    for name, shape in expected.items():
        if manifest[name].shape != tuple(shape):
            raise SyncError(
                f"the sync contains {name} as {manifest[name]}, but in the model its shape is {list(shape)}"
            )


# ---------------------------------------------------------------- the engine's side


class Delivery:
    """One weight sync, on the side of an engine's worker. As a context manager, it reports errors to the sender.

        with Delivery(ticket, version) as delivery:
            for part in delivery.parts():
                load(part.tensors())
                part.finish()

    version: the version to receive. has: version of the weights that the engine has, or None; must not be later than
    `version`. base: False if the engine needs the base model of an adapter first. holds: the version whose tensors
    SyncPart.tensors can read back, or None.
    """

    def __init__(
        self, ticket: Ticket, version: int, *, has: int | None = None, base: bool = True, holds: int | None = None
    ) -> None:
        self.ticket, self.version, self.has = ticket, version, has
        peer = f"the sender at {ticket.host}:{ticket.port}"
        self.channel = SyncChannel(_connect(ticket, version), peer, ticket.timeout)
        identity = {"key": ticket.key, "name": ticket.name, "member": ticket.member}
        joined = None if _GroupReceiver.joined is None else _GroupReceiver.joined[0]
        mapped = None if _DeviceReceiver.mapped is None else _DeviceReceiver.mapped[0]
        self.channel.write(
            hello=PROTOCOL,
            version=version,
            has=has,
            holds=holds,
            base=base,
            joined=joined,
            mapped=mapped,
            **identity,
            **software(),
        )

    def parts(self) -> Iterator[SyncPart]:
        """Yield the parts of the sync: the weights; or an adapter, after its base model if this engine lacks that. Each
        part must be received and finished before the next. SyncError if it is not."""
        while True:
            message = self.channel.read(f"version {self.version} to begin", "begin", "done")
            if "done" in message:
                return
            part = SyncPart(self, message)
            yield part
            if not part.finished:
                raise SyncError(f"version {self.version} was not finished")

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            text = str(error) if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"
            with suppress(SyncError):  # the engine's error is raised, and has more details
                self.channel.write(error=text)
        self.channel.close()


def software() -> dict[str, str]:
    """The versions of torch and NCCL in this process; "" for a library that is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {"torch": "", "nccl": ""}
    nccl = ""
    with suppress(AttributeError, RuntimeError):  # a build without NCCL
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": str(torch.__version__), "nccl": nccl}


def opens_handles(receiver: str, sender: str) -> bool:
    """Whether a process with one version of torch can open CUDA IPC handles of another version. "": not known yet;
    hello will contain it.

    Handles begin with the version of their format: 2 up to torch 2.12, 3 in 2.13. torch refuses formats newer than its
    own. A later version is only assumed to open its own handles.
    """
    if not receiver or not sender:
        return True
    made_by, opened_by = (tuple(int(number) for number in re.findall(r"\d+", text)[:2]) for text in (sender, receiver))
    return made_by == opened_by or (max(made_by, opened_by) <= (2, 13) and (made_by <= (2, 12) or opened_by == (2, 13)))


def _connect(ticket: Ticket, version: int) -> socket.socket:
    """Connect to the sender; retried until it listens, because the two sides start independently."""
    deadline = time.monotonic() + ticket.timeout
    while True:
        try:
            return socket.create_connection((ticket.host, ticket.port), timeout=ticket.timeout)
        except OSError as error:
            if time.monotonic() > deadline:
                raise SyncError(
                    f"{ticket.name} found no sender of version {version} at {ticket.host}:{ticket.port} for "
                    f"{ticket.timeout:g} s: {error}"
                ) from error
            time.sleep(0.02)


class SyncPart:
    """One manifest and its tensors. kind: `weights`; `base`, the weights under an adapter; or `adapter`, in peft's
    format. adapter: the content of its adapter_config.json, else None. form: of weights that are sent in quantised
    form: name, rows and columns of a block; else None. verify: whether checksums must be reported. deltas: whether
    later syncs may bring patches of these tensors."""

    def __init__(self, delivery: Delivery, message: Mapping[str, Any]) -> None:
        with understood(delivery.channel.peer):
            self.kind, self.version = str(message["begin"]), int(message["version"])
            self.verify, self.adapter = bool(message["verify"]), _of_type(message["adapter"], dict, type(None))
            self.form = None if message["form"] is None else _form(message["form"])
            self.deltas = bool(message["deltas"])
            self.manifest = {entry.name: entry for entry in map(_entry, message["manifest"])}
            transport_of, transport = _transports[message["transport"]["kind"]], message["transport"]
        self.received: dict[str, int] = {}
        self.mismatched: list[str] = []  # tensors for which the patched result differs from the sent tensor
        self.finished = False
        self._delivery, self._channel = delivery, delivery.channel
        self._transport = transport_of(transport, delivery.ticket)
        if self.version != delivery.version or self.version < (delivery.has or 0):
            raise SyncError(
                f"stale weights: version {self.version} was sent, but version {delivery.version} was requested, and "
                f"the engine has version {delivery.has}"
            )

    def tensors(self, stored: Callable[[str], Bytes] | None = None) -> Iterator[tuple[TensorHeader, Bytes]]:
        """Yield (entry, bytes) of every tensor that changed. stored: returns a copy of the engine's bytes of a tensor;
        needed for patches. If a patch does not result in the announced digest, the tensor is recorded and not yielded.
        Bytes are a NumPy array, or a uint8 tensor on a CUDA device. They are valid until the next tensor is requested;
        a bucket in device memory is released only after this process's pending work on it. SyncError, naming the
        tensor, if one differs from the manifest or is missing at the end."""
        checklist = Checklist(self.manifest, self.version)
        while True:
            message = self._channel.read(f"the next bucket of version {self.version}", "bucket", "end")
            if "end" in message:
                break
            with understood(self._channel.peer):
                memory = self._transport.take(message)
                rows = [(_entry(row[:3]), _number(row[3]), _number(row[4]), row[5:]) for row in message["rows"]]
                patches = [list(map(_number, patch)) for *_, patch in rows]
            for (entry, offset, length, _), patch in zip(rows, patches, strict=True):
                checklist.take(entry, length, *patch[:1])
                data = memory[offset : offset + length]
                if len(data) != length:
                    short = f"cut short: {len(data)} of {length} bytes"
                    raise SyncError(f"{entry.name} came with version {self.version} {short}")
                if patch:
                    if stored is None:
                        raise SyncError(f"{entry.name} came with version {self.version} as a patch, which needs a base")
                    if not length and not self.verify:
                        continue
                    data = patched(stored(entry.name), data, WIDTHS[entry.dtype])
                    if length and (data is None or checksum(data) != patch[1]):
                        self.mismatched.append(entry.name)
                        continue
                if self.verify:
                    self.received[entry.name] = checksum(data if isinstance(data, np.ndarray) else data.cpu().numpy())
                yield entry, data
            self._transport.release()
            del memory
            self._channel.write(took=message["bucket"])
        checklist.complete()

    def finish(self, placed: Mapping[str, int] | None = None) -> None:
        """Report checksums to the sender and wait for its comparison; SyncError if it found a difference. placed:
        checksums of the engine's own weights, in the manifest's layout and dtypes; None if they cannot be read back."""
        self._channel.write(
            received=self.received, placed=None if placed is None else dict(placed), mismatched=self.mismatched
        )
        message = self._channel.read(f"version {self.version} to be confirmed", "commit", "again")
        self.finished = True
        if "commit" in message:
            self._channel.write(committed=self.version)


def patched(base: Bytes, patch: Any, width: int) -> Bytes | None:
    """`base` with the elements of a patch: first the positions of all (int32), then their values, of `width` bytes.
    Changes `base`; None if a position lies outside of it."""
    raw = np.asarray(patch if isinstance(patch, np.ndarray) else patch.cpu().numpy())
    count = raw.size // (POSITION_BYTES + width)
    positions = raw[: count * POSITION_BYTES].view(np.int32)
    values, elements = raw[count * POSITION_BYTES :].view(f"u{width}"), base.view(f"u{width}")
    if count and not (positions.min() >= 0 and positions.max() < len(elements)):
        return None
    elements[positions] = values
    return base


def _of_type(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"{value!r:.40} is not a {kinds[0].__name__}")
    return value


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r:.40} is not a number of bytes or elements")
    return value


def _form(fields: Any) -> tuple[str, int, int]:
    name, rows, columns = _of_type(fields, list)
    return _of_type(name, str), _number(rows), _number(columns)


def _entry(row: Any) -> TensorHeader:
    """Parse an entry of a manifest or of a bucket's table. TypeError or ValueError if it is malformed."""
    name, dtype, shape = row
    if dtype not in WIDTHS:
        raise ValueError(f"{dtype!r:.40} is not a dtype")
    return TensorHeader(_of_type(name, str), dtype, tuple(map(_number, shape)))


def as_torch(entry: TensorHeader, data: Any) -> Any:
    """These bytes as the entry's tensor, without a copy."""
    import torch

    raw = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)


# ---------------------------------------------------------------- transports, on the engine's side


_mapped = dict[str, Bytes]()  # path -> shared memory; kept, because mapping costs half a copy. Paths are never reused


class _MappedReceiver:
    """Receives buckets in mapped files: slots of shared memory, which are reused, or safetensors in a folder."""

    def __init__(self, transport: Mapping[str, Any], ticket: Ticket) -> None:
        self._in_turn = transport["kind"] == "shared"
        for path in list(_mapped):  # a copy, because engines may be threads of one process
            if not os.path.exists(path):
                _mapped.pop(path, None)

    def take(self, message: Mapping[str, Any]) -> Bytes:
        """The bytes of a bucket."""
        path = str(message["path"])
        if path in _mapped:
            return _mapped[path]
        try:
            with Path(path).open("r+b") as file:  # writable only because torch requires it
                memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        except (OSError, ValueError) as error:
            raise SyncError(f"bucket {message['bucket']} cannot be read from {path}: {error}") from error
        if self._in_turn:
            _mapped[path] = memory
        return memory

    def release(self) -> None:
        """Does nothing: reads of mapped memory are synchronous."""


class _GroupReceiver:
    """Receives buckets by broadcast, in a process group of the sender (rank 0) and all receiving workers."""

    joined: tuple[str, Any] | None = None  # (id, group), kept between syncs: joining NCCL takes seconds

    def __init__(self, transport: Mapping[str, Any], ticket: Ticket) -> None:
        self._backend, self._timeout = transport["backend"], ticket.timeout
        self._memory: Any = None  # reused for all buckets, because the first touch of memory is slow
        if _GroupReceiver.joined is None or _GroupReceiver.joined[0] != transport["id"]:
            _GroupReceiver.joined = None
            store = open_store(ticket.host, transport["port"], ticket.timeout)
            group = join_group(
                store, transport["id"], transport["rank"], transport["world"], self._backend, ticket.timeout
            )
            _GroupReceiver.joined = transport["id"], group
        self._group = _GroupReceiver.joined[1]

    def take(self, message: Mapping[str, Any]) -> Any:
        """The bytes of a bucket, on the backend's device."""
        import torch

        device = "cuda" if self._backend == "nccl" else "cpu"
        if self._memory is None or len(self._memory) < message["bytes"]:
            self._memory = torch.empty(message["bytes"], dtype=torch.uint8, device=device)
        memory = self._memory[: message["bytes"]]
        try:
            complete(broadcast(self._group, memory), self._timeout)
        except RuntimeError as error:
            _GroupReceiver.joined = None
            abort(self._group)
            raise SyncError(f"bucket {message['bucket']} did not come through the group: {error}") from error
        return memory if self._backend == "nccl" else memory.numpy()

    def release(self) -> None:
        """Does nothing: the next broadcast is ordered after the readers on the same device."""


class _DeviceReceiver:
    """Receives buckets in memory of the sender's CUDA device (CUDA IPC), in slots that are reused."""

    mapped: tuple[str, list[Any]] | None = None  # (id, memories), kept between syncs

    def __init__(self, transport: Mapping[str, Any], ticket: Ticket) -> None:
        if _DeviceReceiver.mapped is None or _DeviceReceiver.mapped[0] != transport["id"]:
            _DeviceReceiver.mapped = None  # first unmap the previous sender's memory, so that it can be freed
            _DeviceReceiver.mapped = transport["id"], [_opened(handle, ticket) for handle in transport["handles"]]
        self._memories = _DeviceReceiver.mapped[1]
        self._bucket_memory: Any = None

    def take(self, message: Mapping[str, Any]) -> Any:
        """The bytes of a bucket, on the device."""
        self._bucket_memory = self._memories[message["slot"]]
        return self._bucket_memory

    def release(self) -> None:
        """Wait until the device has read the bucket, because the sender will overwrite it."""
        device_memory.wait(self._bucket_memory)


_transports: dict[str, Any] = {
    "shared": _MappedReceiver,
    "files": _MappedReceiver,
    "group": _GroupReceiver,
    "ipc": _DeviceReceiver,
}


def _opened(handle: Mapping[str, Any], ticket: Ticket) -> Any:
    try:
        return device_memory.open(handle)
    except (RuntimeError, ValueError) as error:
        raise SyncError(
            f"{ticket.name} cannot map the sender's memory on device {handle['device']} (CUDA IPC): {error}. If this "
            "machine does not allow CUDA IPC, set rollout.transport=shared"
        ) from error


class DeviceMemory:
    """CUDA memory that processes of one host share (CUDA IPC), through the functions with which torch shares tensors.

    torch.multiprocessing pickles the same eight values (torch/multiprocessing/reductions.py). Devices are named by
    UUID, because CUDA_VISIBLE_DEVICES renumbers them per process.
    """

    # Results of UntypedStorage._share_cuda_, and arguments of _new_shared_cuda, after the device index.
    _FIELDS = ("handle", "size", "offset", "counter", "counter_offset", "event", "event_needed")

    def devices(self, device: Any) -> list[str]:
        """UUIDs of the CUDA devices that this process sees, `device` first; [] if `device` is not a CUDA device."""
        import torch

        if torch.device(device).type != "cuda":
            return []
        uuids = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
        index = torch.device(device).index
        local_uuid = uuids[torch.cuda.current_device() if index is None else index]
        return [local_uuid, *(uuid for uuid in uuids if uuid != local_uuid)]

    def allocate(self, size: int, device: Any) -> Any:
        """An uninitialised uint8 tensor [size] that can be shared. CUDA IPC cannot share expandable segments, so they
        are switched off for this allocation, and the setting is restored."""
        import torch

        from weft.versions import set_allocator  # only the trainer allocates

        before = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        if "expandable_segments:true" not in before.lower().replace(" ", ""):
            return torch.empty(size, dtype=torch.uint8, device=device)
        other_options = [text for text in before.split(",") if not text.strip().startswith("expandable_segments")]
        set_allocator(",".join([*other_options, "expandable_segments:False"]))
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        finally:
            set_allocator(before)

    def share(self, memory: Any) -> dict[str, Any]:
        """A handle, as JSON, with which one other process can open the memory. torch counts a reader per handle."""
        _, *values = memory.untyped_storage()._share_cuda_()
        plain = [base64.b64encode(v).decode() if isinstance(v, bytes) else v for v in values]
        return {"device": self.devices(memory.device)[0], **dict(zip(self._FIELDS, plain, strict=True))}

    def open(self, handle: Mapping[str, Any]) -> Any:
        """The shared tensor in this process, mapped as long as the tensor lives. Memory of another device is read
        through peer access. RuntimeError if this process does not see that device, or mapping fails."""
        import torch

        torch.cuda.init()
        uuids = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
        if handle["device"] not in uuids:
            raise RuntimeError(f"this process sees other devices ({', '.join(uuids) or 'none'})")
        index = uuids.index(handle["device"])
        values = [handle[name] for name in self._FIELDS]
        raw = [base64.b64decode(value) if isinstance(value, str) else value for value in values]
        storage = torch.UntypedStorage._new_shared_cuda(index, *raw)
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)

    def wait(self, memory: Any) -> None:
        """Synchronise the current CUDA device and the device of `memory`."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.synchronize(memory.device)


device_memory = DeviceMemory()


def open_store(host: str, port: int, timeout: float, *, serve: bool = False) -> Any:
    """The TCPStore through which the members of a group meet. serve: whether to serve it, as the sender does, on a free
    port if port is 0. timeout: seconds."""
    import torch.distributed as dist

    wait = timedelta(seconds=timeout)
    if not serve:
        return dist.TCPStore(host, port, is_master=False, timeout=wait)
    listener = socket.create_server((host, port))  # torch's server would listen on every interface
    port = int(listener.getsockname()[1])
    listening = listener.detach()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening, timeout=wait)


def join_group(store: Any, name: str, rank: int, world: int, backend: str, timeout: float) -> Any:
    """Create a process group independent of torch's default group, which trainers and engines use themselves. timeout:
    seconds that members wait for one another; RuntimeError if one does not come.

    NCCL's group has a longer limit than any wait for it (`complete`), because NCCL's watchdog ends the whole process
    at that limit. It joins at its first broadcast, without a limit; so members first wait for one another here.
    """
    import torch.distributed as dist

    prefixed, wait = dist.PrefixStore(name, store), timedelta(seconds=timeout)
    if backend == "gloo":
        return dist.ProcessGroupGloo(prefixed, rank, world, wait)
    prefixed.set(f"here-{rank}", "")
    prefixed.wait([f"here-{member}" for member in range(world)], wait)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait * 4
    return dist.ProcessGroupNCCL(prefixed, rank, world, options)


def broadcast(group: Any, memory: Any) -> Any:
    """Start a broadcast of rank 0's bytes into `memory`; returns the handle for complete()."""
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([memory], options)


def complete(work: Any, timeout: float) -> None:
    """Wait on the host until a broadcast is done; NCCL's own `wait` only orders streams. timeout: seconds.
    RuntimeError if the broadcast fails, BroadcastTimeoutError if it is not done in time."""
    deadline, pause = time.monotonic() + timeout, 0.0001
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise BroadcastTimeoutError(f"nothing came for {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
    work.wait()


class BroadcastTimeoutError(RuntimeError):
    """A broadcast was not done in time."""


def abort(group: Any) -> None:
    """Abort a group's pending operations, so that its watchdog does not end the process because of them."""
    with suppress(RuntimeError):
        group.abort()
