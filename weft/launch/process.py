"""One rank: its device, its threads and its process group."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from weft.errors import UserError
from weft.launch import flight
from weft.launch.launchers import check_ranks
from weft.launch.machine import Accelerator, cpu_cores
from weft.launch.options import Device
from weft.launch.simulated import Simulation
from weft.versions import set_allocator


@dataclass(frozen=True)
class Ranks:
    """This rank and the number of all ranks. As a context manager it leaves the process group at the end. owner:
    whether join() created the process group; an existing group is not ended. assumed: the accelerator of each rank in a
    dry run; all tensors are then on meta. simulated: the simulation of this rank's device, if there is one. store:
    shared by the trained model's ranks and the ranks of frozen models, if there are any. is_frozen: whether this rank
    has a frozen model. rank and world count one of the two sides; others is the number of ranks on the other side."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    owner: bool = True
    assumed: Accelerator | None = None
    simulated: Simulation | None = None
    store: dist.Store | None = None
    is_frozen: bool = False
    others: int = 0

    @property
    def tensors_on(self) -> torch.device:
        """The device of this rank's tensors: `device` if this machine has it; cpu in a simulation; otherwise meta."""
        if self.simulated is not None:
            return torch.device("cpu")
        return self.device if self.assumed is None else torch.device("meta")

    @property
    def group(self) -> dist.ProcessGroup:
        return world_group()

    @property
    def mesh_device(self) -> str:
        """The device type of this rank's meshes."""
        return "cpu" if self.assumed is not None else self.device.type

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes for all ranks."""
        return self.rank == 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, other ranks may be in a collective. Leaving the group could then hang, or make them fail
        # before this rank has reported. The process ends immediately after, and its group with it.
        if self.owner and (error is None or self.world == 1 or self.simulated is not None):
            leave()


def join(device: Device = "auto", timeout: float = 600.0, cpu_backend: str = "gloo", frozen: int = 0) -> Ranks:
    """Choose this rank's device and join the process group of all ranks.

    The environment defines the ranks (torchrun's variables, which weft's launcher also sets). Without them this process
    is the only rank, and opens no port. timeout: seconds that a collective waits before it raises. An existing process
    group is used unchanged. Raises UserError if it does not support both the CPU and this rank's device. cpu_backend:
    the backend for tensors on the CPU (cluster.cpu_backend); raises UserError if this torch does not have it. frozen:
    the number of ranks, at the end, that have only a frozen model. They form one process group and the other ranks
    another, so a collective of one model never waits for the other model; Ranks.store connects the groups.
    """
    check_cpu_backend(cpu_backend)
    if frozen and (dist.is_initialized() or "RANK" not in os.environ):
        raise UserError(
            "reference.ranks and teacher.ranks need several ranks: start `weft dpo ... --nproc N`, "
            "`weft distill ... --nproc N` or torchrun, or set the key to null."
        )
    if dist.is_initialized():
        return _present(device)
    environment = _rank_environment(os.environ)
    flight.begin(*(environment or (0, 1)))
    local_rank = _local_rank(environment[0]) if environment else 0
    chosen = choose_device(device, local_rank)
    if chosen.type == "cuda":
        configure_allocator()
        torch.cuda.set_device(chosen)
    backend = _backend(chosen, cpu_backend)
    device_id = chosen if chosen.type == "cuda" else None
    wait = timedelta(seconds=timeout)
    if environment is None:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cpu_cores())
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=wait, device_id=device_id)
        return Ranks(0, 1, 0, chosen)
    rank, world = environment
    with _port_named():
        store = _loopback_store(rank, wait)
        if frozen:
            store = store or next(dist.rendezvous("env://", rank, world, timeout=wait))[0]
            trained, is_frozen = world - frozen, rank >= world - frozen
            rank, world, others = (rank - trained, frozen, trained) if is_frozen else (rank, trained, frozen)
            part = dist.PrefixStore("frozen" if is_frozen else "trained", store)
            dist.init_process_group(backend, store=part, rank=rank, world_size=world, timeout=wait, device_id=device_id)
            return Ranks(rank, world, local_rank, chosen, store=store, is_frozen=is_frozen, others=others)
        store_options = {} if store is None else {"store": store, "rank": rank, "world_size": world}
        dist.init_process_group(backend, timeout=wait, device_id=device_id, **store_options)
    return Ranks(rank, world, local_rank, chosen)


def join_sides(ranks: Ranks) -> dist.ProcessGroupGloo:
    """A group for messages between the trained model's ranks, which come first in it, and the ranks of frozen models.
    Collective on both sides."""
    assert ranks.store is not None
    rank = ranks.others + ranks.rank if ranks.is_frozen else ranks.rank
    # Messages sent ahead may wait through evaluations and saves. Watchdogs end a hang (train.timeout).
    patience = timedelta(days=365)
    return dist.ProcessGroupGloo(dist.PrefixStore("sides", ranks.store), rank, ranks.world + ranks.others, patience)


def configure_allocator() -> None:
    """Let this process's CUDA allocator grow its segments, unless the environment sets another mode. Row lengths differ
    in every step, and segments of fixed sizes leave gaps that later tensors do not fit. Call this before the first use
    of CUDA. The variable is also set, because inference/weight_sync/protocol.py reads it."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if torch.version.cuda is not None and sys.platform == "linux" and not any(os.environ.get(name) for name in names):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        set_allocator("expandable_segments:True")


@contextmanager
def _port_named() -> Iterator[None]:
    """Convert the error of a port that another program uses (MASTER_PORT) to a UserError."""
    try:
        yield
    except (OSError, dist.DistNetworkError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE and "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {os.environ['MASTER_PORT']} of this machine, the rendezvous of the ranks (MASTER_PORT), is in use, "
            "perhaps by another run: start again. If you set MASTER_PORT, set it to a free port, equal for all ranks."
        ) from error


def _loopback_store(rank: int, wait: timedelta) -> dist.Store | None:
    """The store of ranks whose MASTER_ADDR is loopback. The first rank listens only on loopback; torch would listen on
    every interface. None for another address, and for ranks that use the store of their launcher."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if address != "127.0.0.1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if rank:
        return dist.TCPStore(address, port, is_master=False, timeout=wait)
    listener = socket.create_server((address, port), backlog=1024)
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=wait
    )


def fake_ranks(
    world: int,
    device: Device = "cpu",
    assumed: Accelerator | None = None,
    *,
    rank: int = 0,
    simulated: Simulation | None = None,
) -> Ranks:
    """One of `world` ranks that do not exist. Shapes and meshes are real, and collectives send nothing. assumed,
    simulated: as in Ranks."""
    assert not dist.is_initialized(), "a fake process group needs a separate process"
    dist.init_process_group("fake", rank=rank, world_size=world)
    chosen = choose_device(device, 0) if assumed is None else torch.device("cuda")
    return Ranks(rank, world, 0, chosen, assumed=assumed, simulated=simulated)


def world_group() -> dist.ProcessGroup:
    """The group of all ranks, for files, failures and stops. Code about documents or weights must use a group of the
    mesh."""
    group = dist.group.WORLD
    assert group is not None, "there is no process group"
    return group


@contextmanager
def new_groups_inherit_timeout() -> Iterator[None]:
    """Process groups that are created inside have the timeout of the group of all ranks (train.timeout). Otherwise
    torch gives the groups of a mesh its default of 10 or 30 minutes."""
    before = set(c10d._world.pg_map)
    yield
    gloo = world_group()._get_backend(torch.device("cpu"))
    if not isinstance(gloo, dist.ProcessGroupGloo):  # fake_ranks
        return
    for group in c10d._world.pg_map:
        if group not in before and group != dist.GroupMember.NON_GROUP_MEMBER:
            c10d._set_pg_timeout(gloo.options._timeout, group)


def rank_and_world() -> tuple[int, int]:
    """(Rank, number of ranks); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def leave() -> None:
    """Leave the process group. All ranks do so after their last collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device(device: Device, local_rank: int) -> torch.device:
    """The device of a rank: its accelerator, or the CPU if `device` is "cpu", or if it is "auto" on a machine without
    CUDA."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no CUDA device: torch sees {count} here. Start at most {count} ranks on this "
            "machine, or use --device cpu."
        )
    return torch.device("cuda", local_rank)


def _present(device: Device) -> Ranks:
    rank = dist.get_rank()
    local_rank = _local_rank(rank)
    chosen = choose_device(device, local_rank)
    config = dist.get_backend_config()  # such as cpu:gloo,cuda:nccl
    missing = {"cpu", chosen.type} - {part.partition(":")[0] for part in config.split(",")}
    if missing:
        raise UserError(
            f"the existing process group ({config}) does not support tensors on {' and '.join(sorted(missing))}. "
            f"Create it with torch.distributed.init_process_group({_backend(chosen)!r}, ...), or let weft create it."
        )
    return Ranks(rank, dist.get_world_size(), local_rank, chosen, owner=False)


def _backend(device: torch.device, on_cpu: str = "gloo") -> str:
    """The backend of a rank. It always supports CPU tensors, because metrics of a step are on the CPU."""
    return f"cpu:{on_cpu},cuda:nccl" if device.type == "cuda" else on_cpu


def check_cpu_backend(name: str) -> None:
    """Raise UserError if this torch does not support the backend for tensors on the CPU."""
    built = {"gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available(), "ucc": dist.is_ucc_available()}
    devices = dist.Backend.backend_capability
    added = {kind for kind in dist.Backend._plugins if "cpu" in devices.get(kind, ())}
    usable = [kind for kind, is_built in built.items() if is_built] + sorted(added - {*built})
    if name not in usable:
        raise UserError(
            f"cluster.cpu_backend={name}: this torch ({torch.__version__}) has {', '.join(usable)} for tensors on the "
            f"CPU. Set cluster.cpu_backend={usable[0]}, or install a build of torch with {name}."
        )


def _local_rank(rank: int) -> int:
    """LOCAL_RANK; without it, the rank's index on its machine, assuming machines with equally many accelerators."""
    return int(os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))


def _rank_environment(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(Rank, number of ranks) from torchrun's variables; None if they are not set."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} is not: start with torchrun, or unset RANK and "
            "WORLD_SIZE, so that weft starts the ranks."
        )
    check_ranks(environment)
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])
