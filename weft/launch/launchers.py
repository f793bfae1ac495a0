"""Translates the environment variables of ranks that srun or mpirun started to torchrun's.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Slurm, Open MPI and MPICH's
Hydra set the same values under other names, except for the address of the rendezvous.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import psutil

from weft.errors import UserError
from weft.launch.machine import PORTS, cpu_cores

_LOOPBACK, _LAST_PORT = "127.0.0.1", 65535
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # torchrun sets it in its ranks


@dataclass(frozen=True)
class Launcher:
    """Names of a launcher's variables."""

    command: str
    rank: str
    world: str
    local_rank: str
    local_world: str


# Slurm comes last, because mpirun may start its daemons with srun. The table has the variables of a Slurm step. The
# variables of the job (SLURM_NTASKS) are also set in a batch script, which is one process.
LAUNCHERS = (
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)  # fmt: skip


def join_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables if another launcher has started several processes. Raises UserError if the host of the
    first rank is unknown, or if variables are invalid."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        for launcher in LAUNCHERS:
            world = _number(environment, launcher.world, 1)
            if world > 1 and launcher.rank in environment:
                environment.update(_torchrun_variables(launcher, environment, world))
                break
    check_ranks(environment)


def process_of_launcher(environment: Mapping[str, str] = os.environ) -> psutil.Process | None:
    """The process that started this rank: torchrun's agent, Slurm's slurmstepd or MPI's daemon. None for ranks whose
    variables were set manually.

    It is the nearest ancestor without the variable that the launcher sets in its ranks. A shell or another program in
    between inherits the variable. An ancestor whose environment cannot be read belongs to another user, so it is the
    launcher (slurmstepd belongs to root).
    """
    names = (_TORCHRUN, *(launcher.rank for launcher in LAUNCHERS))
    variable = next((name for name in names if name in environment), None)
    if variable is None:
        return None
    for ancestor in psutil.Process().parents():
        try:
            if variable not in ancestor.environ():
                return ancestor
        except psutil.Error:
            return ancestor
    return None


def check_ranks(environment: Mapping[str, str]) -> None:
    """Raise UserError if torchrun's variables are not numbers, or out of range."""
    world, rank = _number(environment, "WORLD_SIZE", sys.maxsize, minimum=1), _number(environment, "RANK", 0)
    if rank >= world:
        raise UserError(
            f"the environment has RANK={rank} and WORLD_SIZE={world}, but ranks count from 0: start with torchrun, or "
            "unset RANK and WORLD_SIZE, so that weft starts the ranks."
        )
    _number(environment, "LOCAL_RANK", 0)
    _number(environment, "LOCAL_WORLD_SIZE", 1, minimum=1)
    _number(environment, "MASTER_PORT", 0, maximum=_LAST_PORT)


def _number(
    environment: Mapping[str, str], name: str, default: int, minimum: int = 0, maximum: int = sys.maxsize
) -> int:
    """The number in a variable, or `default` if it is not set. Raises UserError outside `minimum` to `maximum`."""
    text = environment.get(name)
    if text is None:
        return default
    number = int(text) if re.fullmatch(r"\d{1,18}", text.strip(), re.ASCII) else -1
    if not minimum <= number <= maximum:
        upper = f" to {maximum}" if maximum < sys.maxsize else " or more"
        raise UserError(
            f"the environment has {name}={text[:80]!r}, which is not a number, {minimum}{upper}: correct it or unset "
            "it."
        )
    return number


def _torchrun_variables(launcher: Launcher, environment: Mapping[str, str], world: int) -> dict[str, str]:
    # Slurm lists all hosts, as in 4(x2),3. The number for the first host counts.
    first_count = re.match(r"\d+", environment.get(launcher.local_world, ""))
    local_world = int(first_count[0]) if first_count else world
    address = environment.get("MASTER_ADDR") or (_LOOPBACK if local_world == world else _first_host(environment))
    if not address:
        raise UserError(
            f"{launcher.command} has started {world} processes on several hosts, but weft does not know the first "
            f"host: set MASTER_ADDR to its name and MASTER_PORT to a free port there, equal in all processes."
        )
    variables = {
        "RANK": environment[launcher.rank],
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(PORTS[_job(environment) % len(PORTS)]),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(max(1, cpu_cores() // local_world)),
    }
    if launcher.local_rank in environment:
        variables["LOCAL_RANK"] = environment[launcher.local_rank]
    return variables


def _first_host(environment: Mapping[str, str]) -> str:
    """The first host of Slurm's list, such as node[03-05,07],login. The first number of a bracket is used."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).partition(",")[0]


def _job(environment: Mapping[str, str]) -> int:
    """A number that is equal on all ranks of a run and differs between runs on a host: from Slurm's step, or the id of
    the parent process."""
    if "SLURM_JOB_ID" in environment:
        return _number(environment, "SLURM_JOB_ID", 0) * 7 + _number(environment, "SLURM_STEP_ID", 0)
    return os.getppid()
