"""Sends weights from the trainer ranks to rollout engines, with versions and verification.

On every rank:  sender = Sender(engine, receivers);  sender.send(version).
Each worker of an engine receives the same version with its ticket from `sender.tickets` (protocol.Delivery).
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint.snapshot import DTYPES
from weft.config.conditions import TAKES_DELTAS, in_own_process
from weft.config.rl_schema import RlConfig
from weft.engine.engine import Engine
from weft.errors import ActorError, UserError
from weft.inference.base import Synced
from weft.inference.weight_sync import buckets as contents
from weft.inference.weight_sync import protocol
from weft.inference.weight_sync.buckets import BucketPlan, Buckets, BucketTensor, SyncContent
from weft.inference.weight_sync.checksums import checksum
from weft.inference.weight_sync.delta import DeltaBase
from weft.inference.weight_sync.protocol import SyncError, Ticket
from weft.inference.weight_sync.server import SyncServer
from weft.inference.weight_sync.transports import SLOTS, BroadcastGroup, DeviceBuckets, IpcBuckets, SharedBuckets
from weft.launch import flight
from weft.launch.machine import host_address
from weft.launch.process import world_group

T = TypeVar("T")
Transport = Literal["ipc", "shared", "group", "files"]
AHEAD = SLOTS - 2  # number of posted buckets that engines may still read while ranks write the next buckets


@dataclass(frozen=True)
class EngineTarget:
    """An engine that receives weights.

    host: address of its machine, as host_address() returns there; None: the first rank's. workers: number of processes
    that each receive all tensors. devices: UUIDs of the CUDA devices that its workers see (protocol.DeviceMemory), its
    own first. torch: the version of its workers' torch; "": not known before they connect.
    """

    name: str
    host: str | None = None
    workers: int = 1
    devices: Sequence[str] = ()
    torch: str = ""


@dataclass(frozen=True)
class SyncOptions:
    """transport: `auto` is CUDA IPC for engines that see a trainer rank's device, shared memory for others on a
    trainer's host, else a process group. bucket_bytes: total size of the bucket buffers. verify_every: every n-th sync
    is verified; 0: only if an engine is new or lacks the last version (verify_is_due). timeout: seconds of any single
    wait. folder: for transport `files`. dtype: of the engines' weights; None: the trainer's compute dtype. sync:
    whether only changed elements are sent (delta.py); `auto`: through a process group on CPU. stored: whether engines
    accept a base in quantised form (buckets.weights)."""

    transport: Literal["auto", "ipc", "shared", "group", "files"] = "auto"
    bucket_bytes: int = 1 << 27
    verify_every: int = 20
    timeout: float = 120.0
    folder: Path | None = None
    dtype: torch.dtype | None = None
    sync: Literal["full", "delta", "auto"] = "full"
    stored: bool = True


@dataclass(frozen=True)
class SyncFailure:
    """A SyncError as a result: every rank has returned, so that the trainers can send again. engine: at which it
    failed; "" if unknown. late: whether it did not answer in time."""

    message: str
    engine: str
    late: bool

    def error(self) -> ActorError:
        """The error that ends a run."""
        if self.late:
            return ActorError(f"{self.message} (rollout.timeout, train.timeout)", "hang")
        return ActorError(f"weight sync failed: {self.message}", "failed")


def options_of(config: RlConfig, run: Path) -> SyncOptions:
    """The options of a config. run: the run's folder."""
    # While a rank waits for an engine, the others wait for that rank in a collective, whose limit is train.timeout.
    timeout = min(config.rollout.timeout, 0.8 * config.train.timeout)
    rollout = config.rollout
    return SyncOptions(
        rollout.transport, rollout.bucket_mb * 10**6, rollout.verify_every, timeout, run / "sync",
        DTYPES[rollout.dtype], rollout.sync if rollout.engine in TAKES_DELTAS else "full",
        in_own_process(rollout.engine),
    )  # fmt: skip


class Sender:
    """The trainer's side of weight sync. Every method is collective."""

    def __init__(
        self,
        engine: Engine,
        receivers: Sequence[EngineTarget],
        options: SyncOptions | None = None,
        *,
        address: str | None = None,
        port: int = 0,
        key: str | None = None,
    ) -> None:
        """address: under which engines reach this rank; None: host_address(). port, key: of the first rank's server, if
        they must be known in advance. UserError if the requested transport cannot reach an engine."""
        self.engine, self.options = engine, options or SyncOptions()
        address = address or host_address()
        self._rank, self._world = engine.ranks.rank, engine.ranks.world
        self._software = protocol.software()
        local_devices = protocol.device_memory.devices(engine.device)[:1]
        addresses = self._gather((address, local_devices, key or secrets.token_hex(16), secrets.token_hex(8)))
        self._hosts = [host for host, *_ in addresses]
        self._devices = [device for _, device, *_ in addresses]  # per rank: [UUID], or [] on CPU
        *_, self._key, self._slots = addresses[0]  # slots: part of shared memory's names, unique to this sender
        self._routes = {receiver.name: self._route(receiver) for receiver in receivers}
        if self.options.sync == "delta" and (dense := [name for name in self._routes if not self._has_deltas(name)]):
            raise UserError(
                f"rollout.sync=delta: weights of {dense[0]} are sent by transport {self._routes[dense[0]][0]}, for "
                "which weft cannot compare versions. Set rollout.transport=shared or rollout.sync=full."
            )
        leads = any(rank == self._rank for _, rank in self._routes.values())
        self.server = SyncServer(address, 0 if self._rank else port, self.options.timeout) if leads else None
        places = self._gather((address, self.server.port if self.server else 0))
        self.tickets = {receiver.name: self._tickets_of(receiver, places) for receiver in receivers}
        self._memories: dict[Transport, SharedBuckets | DeviceBuckets] = {}
        self._plans: dict[tuple[str, Transport], BucketPlan] = {}
        self._group = BroadcastGroup(address, self._backend, self.options.timeout)
        self._adapters = engine.lora is not None
        dtype = self.options.dtype or engine.precision.compute
        self._contents = [contents.weights(engine, dtype, stored=self.options.stored)] + (
            [contents.adapter(engine)] if self._adapters else []
        )
        self._names: Collection[str] = self._routes.keys()  # the engines that the current sync sends to
        self._count, self._waited = 0, 0.0
        self._last: int | None = None  # the version that all engines confirmed
        self._bases = dict[Transport, DeltaBase]()  # of transports that send only changed elements
        self._note = ""
        self._error: SyncError | UserError | None = None
        self._folder: Path | None = None

    def send(self, version: int, names: Collection[str] | None = None, attempt: int | None = None) -> Synced:
        """Send the current weights to the engines `names`, by default to all, as this version. The outcome is the same
        on all ranks: these engines have confirmed, or SyncError, after which an engine that has not confirmed has no
        weights to sample with. attempt: as in SyncServer.welcome."""
        began, self._waited, self._count, self._note = time.perf_counter(), 0.0, self._count + 1, ""
        self._names = self._routes.keys() if names is None else names
        flight.enter("sync")
        sent = list[SyncContent]()
        for transport in sorted({self._routes[name][0] for name in self._names}):
            sent += self._send_by(transport, version, attempt)
        self._last, seconds = version, time.perf_counter() - began
        tensors, total = sum(len(c.manifest) for c in sent), sum(c.bytes for c in sent)
        extra = {"sync/waited_seconds": self._waited, "sync/gb_per_second": total / 1e9 / seconds}
        if self._bases:
            extra["sync/changed"] = float(sum(base.changed for base in self._bases.values()))
            extra["sync/sent_gb"] = sum(base.sent for base in self._bases.values()) / 1e9
        return Synced(version, tensors, total, seconds, extra, self._note)

    def _has_deltas(self, name: str) -> bool:
        """Whether only changed elements are sent to this engine: if its buckets are in host memory."""
        transport, is_host = self._routes[name][0], self._backend == "gloo"
        asks_for_deltas = self.options.sync == "delta" or (self.options.sync == "auto" and transport == "group")
        return (
            asks_for_deltas
            and self.engine.lora is None
            and (transport == "shared" or (transport == "group" and is_host))
        )

    def _sends_deltas(self, transport: Transport) -> bool:
        return any(self._routes[name][0] == transport and self._has_deltas(name) for name in self._routes)

    def close(self) -> None:
        """Free buckets, remove sent files, stop listening."""
        if self._folder is not None and self.engine.ranks.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)
        for memories in self._memories.values():
            memories.close()
        self._memories = {}
        if self.server is not None:
            self.server.close()

    # ------------------------------------------------------------ routes and tickets

    def _route(self, receiver: EngineTarget) -> tuple[Transport, int]:
        """(transport, sending rank) for an engine. UserError if the requested transport cannot reach it."""
        host, requested = receiver.host or self._hosts[0], self.options.transport
        if requested == "files":
            return "files", 0
        if requested in ("auto", "ipc"):
            rank = self._rank_on_device(receiver, host)
            if rank is not None and protocol.opens_handles(receiver.torch, self._software["torch"]):
                return "ipc", rank
            if rank is not None and requested == "ipc":
                raise self._other_handles(receiver.name, receiver.torch)
        if requested == "ipc":
            raise UserError(
                f"rollout.transport=ipc: {receiver.name} sees no CUDA device of a trainer rank (engines share these "
                "only with cluster.placement=colocated). Set rollout.transport=auto."
            )
        if requested == "group" or (requested == "auto" and host not in self._hosts):
            return "group", 0
        if host not in self._hosts:
            raise UserError(
                f"rollout.transport=shared: {receiver.name} is on {host}, but no trainer rank is (they are on "
                f"{', '.join(sorted(set(self._hosts)))}). Set rollout.transport=auto."
            )
        return "shared", self._hosts.index(host)

    def _rank_on_device(self, receiver: EngineTarget, host: str) -> int | None:
        """The rank on the engine's own device, else a rank on another device that the engine sees, else None."""
        locations = [(self._hosts[rank], *uuids) for rank, uuids in enumerate(self._devices)]
        receiver_devices = [(host, device) for device in receiver.devices]
        return next((locations.index(pair) for pair in receiver_devices if pair in locations), None)

    def _tickets_of(self, receiver: EngineTarget, places: Sequence[tuple[str, int]]) -> list[Ticket]:
        address, port = places[self._routes[receiver.name][1]]
        common = (address, port, self._key, receiver.name)
        return [Ticket(*common, member, self.options.timeout) for member in range(receiver.workers)]

    def _local_tickets(self, transport: Transport) -> list[Ticket]:
        """The tickets of the workers that this rank sends to by this transport."""
        receiving = [name for name in self._names if self._routes[name] == (transport, self._rank)]
        return [ticket for name in receiving for ticket in self.tickets[name]]

    # ------------------------------------------------------------ one transport

    def _send_by(self, transport: Transport, version: int, attempt: int | None) -> list[SyncContent]:
        sent = []
        self._error = None
        try:
            self._lead(SyncServer.welcome, self._local_tickets(transport), version, attempt)
            self._lead(self._check_software, transport)
            self._agree()
            for content in self._contents_to_send():
                self._activate(content)
                self._deliver(content, transport, version)
                sent.append(content)
            self._lead(SyncServer.leave, version)
        except BaseException as error:
            if self.server is not None:
                self.server.leave(version, str(error))
            self._group.leave()
            raise
        return sent

    def _check_software(self, server: SyncServer, transport: Transport) -> None:
        """Raise UserError if a connected engine cannot receive by this transport with its versions of torch and
        NCCL."""
        for connection in server.connections:
            if transport == "ipc" and not protocol.opens_handles(connection.torch, self._software["torch"]):
                raise self._other_handles(connection.name, connection.torch)
            sender_nccl, receiver_nccl = self._software["nccl"], connection.nccl
            if (
                transport == "group"
                and self._backend == "nccl"
                and sender_nccl
                and receiver_nccl
                and sender_nccl != receiver_nccl
            ):
                raise UserError(
                    f"rollout.transport: {connection.name} has NCCL {receiver_nccl} (torch {connection.torch}), and "
                    f"this trainer NCCL {sender_nccl} (torch {self._software['torch']}), but a group needs the same "
                    "version on both sides. Install the same torch in both environments; or set "
                    "rollout.transport=shared if engines are on a trainer's host, or rollout.transport=files if all "
                    "hosts share run.dir."
                )

    def _other_handles(self, name: str, receiver_torch: str) -> UserError:
        return UserError(
            f"rollout.transport=ipc: {name} has torch {receiver_torch}, which may not open CUDA IPC handles of this "
            f"trainer's torch {self._software['torch']}. Set rollout.transport=shared, or install the same torch in "
            "both environments."
        )

    def _contents_to_send(self) -> list[SyncContent]:
        """The parts to send: an adapter's base only if a connected engine lacks it; collective."""
        if not self._adapters:
            return self._contents
        lacking = self.server is not None and any(not connection.base for connection in self.server.connections)
        return self._contents if any(self._gather(lacking)) else self._contents[1:]

    def _activate(self, content: SyncContent) -> None:
        if self.server is not None:
            self.server.active = [
                connection for connection in self.server.connections if content.kind != "base" or not connection.base
            ]

    def _deliver(self, content: SyncContent, transport: Transport, version: int) -> None:
        sent = dict[str, int]()
        had = [connection.has for connection in self.server.active] if self.server is not None else []
        verify = verify_is_due(self._count, self.options.verify_every, had, self._last)
        base = self._bases.setdefault(transport, DeltaBase()) if self._sends_deltas(transport) else None
        if self._sent(content, transport, version, verify, sent, base):
            # An engine does not have the expected version: all tensors are sent.
            self._lead(SyncServer.again, version)
            sent.clear()
            self._sent(content, transport, version, verify, sent, base)
        self._lead(SyncServer.commit, version)
        self._agree()
        if base is not None:
            base.confirm(version)

    def _sent(
        self, content: SyncContent, transport: Transport, version: int, verify: bool, sent: dict[str, int],
        base: DeltaBase | None,
    ) -> str:  # fmt: skip
        """Send all tensors of a content; or only elements that have changed since `base`, if every engine has that
        version. Returns the patches that did not fit; then all tensors must be sent again."""
        needed = base.begin() if base is not None else None
        active = [] if self.server is None else self.server.active
        gaps = [c for c in active if c.holds != needed]
        if needed is not None and gaps:
            engine_version = "no version" if gaps[0].holds is None else f"version {gaps[0].holds}"
            self._note = f"sync     all tensors of version {version}: {gaps[0].name} has {engine_version}, not {needed}"
        dense = needed is None or bool(gaps)
        if transport == "files":
            number = self._by_files(content, version, verify, sent)
        else:
            number = self._by_buckets(content, transport, version, verify, sent, base, dense)
        problems = list[str]()
        self._lead(lambda server: problems.append(server.prove(number, version, sent)))
        self._agree()
        problem = next(filter(None, self._gather("".join(problems))), "") if base is not None else ""
        if problem:
            self._note = f"sync     all tensors of version {version} were sent again: {problem}"
        return problem

    def _by_buckets(
        self, content: SyncContent, transport: Transport, version: int, verify: bool, sent: dict[str, int],
        base: DeltaBase | None, dense: bool,
    ) -> int:  # fmt: skip
        """Post every bucket; returns their number. The ranks agree once per bucket k: all have written it, and engines
        have taken bucket k - AHEAD, whose buffer bucket k + 2 reuses. During an agreement, ranks write the next bucket
        and engines read earlier ones."""
        memories, number, post = self._open(transport), 0, _no_action
        self._lead(self._begin, content, transport, version, verify)

        def send(number: int, rows: list[BucketTensor]) -> None:
            if verify:
                sent.update(_sums(rows, memories.memory(number)))
            memory = memories.memory(number)
            if base is not None and self.server is not None and self.server.active and memory is not None:
                rows = base.write(rows, memory.numpy(), dense)
            self._lead(self._post, transport, number, rows)

        for rows in self._fill(content, transport, memories):
            post()
            if number >= AHEAD:
                self._lead(self._wait, transport, number - AHEAD, version)
            post = self._once_agreed(partial(send, number, rows))
            number += 1
        post()
        for last in range(max(0, number - AHEAD), number):
            self._lead(self._wait, transport, last, version)
        return number

    def _fill(self, content: SyncContent, transport: Transport, memories: Buckets) -> Iterator[list[BucketTensor]]:
        if not self._on_one_host(transport):
            return contents.gathered(self.engine, content, memories)
        if (content.kind, transport) not in self._plans:
            self._plans[content.kind, transport] = contents.BucketPlan(self.engine, content, memories.size)
        return self._plans[content.kind, transport].write(self.engine, memories)

    def _begin(
        self, server: SyncServer, content: SyncContent, transport: Transport, version: int, verify: bool
    ) -> None:
        deltas = self._sends_deltas(transport)
        if transport == "ipc":
            memories = self._memories[transport]
            assert isinstance(memories, IpcBuckets)
            server.begin(content, version, memories.describe(server.active), verify, deltas)
        elif transport != "group":
            server.begin(content, version, [{"kind": transport}] * len(server.active), verify, deltas)
        elif server.active:
            server.begin(content, version, self._group.describe(server.active), verify, deltas)
            self._group.join()

    def _post(self, server: SyncServer, transport: Transport, number: int, rows: list[BucketTensor]) -> None:
        memories = self._memories[transport]
        memory = memories.memory(number)
        if memory is None or not server.active:
            return
        if isinstance(memories, IpcBuckets):
            server.post(number, rows, memories.finish(number))
        elif transport == "shared":
            assert isinstance(memories, SharedBuckets)
            server.post(number, rows, {"path": memories.path(number)})
        else:
            size = max(1, rows[-1].end)  # a bucket is never empty, because gloo cannot send an empty tensor
            server.post(number, rows, {"bytes": size})
            self._group.start(number, memory[:size])

    def _wait(self, server: SyncServer, transport: Transport, number: int, version: int) -> None:
        began = time.perf_counter()
        server.wait_taken(number, version)
        if transport == "group" and server.active:
            self._group.wait(number)
        self._waited += time.perf_counter() - began

    def _by_files(self, content: SyncContent, version: int, verify: bool, sent: dict[str, int]) -> int:
        """Post one bucket per file of an export; returns their number. The previous export is removed."""
        assert self.options.folder is not None, "SyncOptions.folder"
        folder, number = self.options.folder / f"{content.kind}-{version:06d}", 0
        self._lead(self._begin, content, "files", version, verify)
        for number, (path, rows) in enumerate(contents.exported(self.engine, content, folder)):
            self._lead(SyncServer.post, number, rows, {"path": str(path)})
            if verify:
                size = path.stat().st_size
                sent |= _sums(rows, torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8))
            self._lead(SyncServer.wait_taken, number, version)
        self._agree()
        if self._folder is not None and self.engine.ranks.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = folder
        return number + 1

    # ------------------------------------------------------------ memory of buckets

    @property
    def _backend(self) -> str:
        return "nccl" if self.engine.device.type == "cuda" else "gloo"

    def _on_one_host(self, transport: Transport) -> bool:
        """Whether all ranks can write to the buffers of this transport, so that tensors need not be gathered."""
        if transport == "ipc":
            return self._world == 1
        return len(set(self._hosts)) == 1 and (transport == "shared" or self._backend == "gloo")

    def _open(self, transport: Transport) -> SharedBuckets | DeviceBuckets:
        """The bucket buffers of a transport, created at its first sync."""
        if transport not in self._memories:
            full = self.options.bucket_bytes // SLOTS
            needed = max(max(c.largest, min(full, c.room)) for c in self._contents)
            room = -(-needed // contents.ALIGNMENT) * contents.ALIGNMENT
            if transport == "shared" or (transport == "group" and self._on_one_host(transport)):
                buckets: SharedBuckets | DeviceBuckets | None = self._open_shared(transport, room, full)
            else:
                kind = IpcBuckets if transport == "ipc" else DeviceBuckets
                buckets = self._attempt(kind, room, full, self.engine.device, bool(self._local_tickets(transport)))
                self._agree()
            self._memories[transport] = buckets or DeviceBuckets(room, full, self.engine.device, False)
        return self._memories[transport]

    def _open_shared(self, transport: Transport, room: int, full: int) -> SharedBuckets | None:
        """Buffers in the host's shared memory: common to all ranks or, with several hosts, of the sending rank alone.
        None on a rank without buffers."""
        is_common = self._on_one_host(transport)
        name, owner, buckets = f"{self._slots}-{transport}", 0 if is_common else self._rank, None
        device = self.engine.device
        if self._local_tickets(transport):
            buckets = self._attempt(SharedBuckets, name, owner, room, full, True, device)
        self._agree()
        return SharedBuckets(name, owner, room, full, False, device) if buckets is None and is_common else buckets

    # ------------------------------------------------------------ agreement between ranks

    def _lead(self, action: Callable[..., None], *args: Any) -> None:
        """Call action(server, *args) on ranks that have a server. An error is kept until all ranks agree on it."""
        if self.server is not None and self._error is None:
            self._attempt(action, self.server, *args)

    def _attempt(self, action: Callable[..., T], *args: Any) -> T | None:
        try:
            return action(*args)
        except (SyncError, UserError) as error:
            self._error = error
            return None

    def _agree(self) -> None:
        """Raise on all ranks an error that one rank has kept; collective (one all-reduce)."""
        self._once_agreed(_no_action)()

    def _once_agreed(self, action: Callable[[], None]) -> Callable[[], None]:
        """Start an agreement; the returned function waits for it and then calls `action`. A single rank calls `action`
        at once."""
        if self._world == 1:
            if self._error is not None:
                raise self._error
            action()
            return _no_action
        failed = torch.tensor(self._error is not None, dtype=torch.int32)
        work = dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=world_group(), async_op=True)

        def finish() -> None:
            work.wait()
            if failed:
                self._error = next(error for error in self._gather(self._error) if error is not None)
                raise self._error
            action()

        return finish

    def _gather(self, value: T) -> list[T]:
        """The value of every rank, by rank; collective."""
        if self._world == 1:
            return [value]
        out: list[Any] = [None] * self._world
        dist.all_gather_object(out, value, group=world_group())
        return out


def verify_is_due(count: int, interval: int, had: Sequence[int | None], last: int | None) -> bool:
    """Whether a sync is verified: every `interval`-th sync, and every sync to an engine without `last`, the last
    version that all confirmed. count: number of this sync, from 1. had: each engine's version, None for none; empty: no
    engine receives from this rank."""
    is_due = interval > 0 and count % interval == 0
    return bool(had) and (is_due or any(version is None or version != last for version in had))


def _no_action() -> None: ...


def _sums(rows: Iterable[BucketTensor], memory: Tensor | None) -> dict[str, int]:
    """Checksums of the tensors in a bucket, by name."""
    assert memory is not None
    return {row.entry.name: checksum(memory[row.offset : row.end].cpu().numpy()) for row in rows}
