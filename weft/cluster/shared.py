"""RUN is one folder for all ranks: each sees the lock that the process which holds it has taken."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import torch.distributed as dist

from weft.cluster.process import Ranks
from weft.errors import UserError

LOCK = "lock"


def check_shared(folder: Path, token: str, ranks: Ranks) -> None:
    """Every rank must see the first rank's lock: shards and weights are written by all of them into one folder."""
    try:
        seen = json.loads((folder / LOCK).read_text(encoding="utf-8"))["token"] == token
    except (OSError, ValueError, KeyError):
        seen = False
    hosts: list[str | None] = [None] * ranks.world
    dist.all_gather_object(hosts, None if seen else socket.gethostname())
    blind = [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host is not None]
    if blind:
        raise UserError(
            f"run.dir: {folder.absolute()} is not the same folder for all ranks: {', '.join(blind[:4])}"
            f"{' and others' * (len(blind) > 4)} cannot see what rank 0 wrote there. Set run.dir, or "
            "run.staging where run.dir is on an object store, to a folder on a file system that all ranks share."
        )
