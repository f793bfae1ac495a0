"""Agreement between ranks: on config, data, code and versions at the start, and on numbers and decisions later."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import RanksDisagreeError, UserError
from weft.files import LOCK
from weft.launch.process import Ranks
from weft.version import PACKAGE

_MAX_SHOWN = 8


def require_agreement(items: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Compare the values of named items across all ranks of the group; collective. If they differ, raises the same
    RanksDisagreeError on every rank. It lists each difference and the ranks that differ from the majority."""
    items_by_rank: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(items_by_rank, dict(items), group=group)
    _raise_for("ranks disagree", differences(items_by_rank, dist.get_process_group_ranks(group)))


@dataclass(frozen=True, slots=True)
class ReplicaChecksum:
    """A checksum of content that several ranks have a copy of. checksum: below 2**24. index, size: this rank's index
    among the ranks with a copy, and their number."""

    name: str
    checksum: int
    index: int
    size: int


Checksum = TypeVar("Checksum", int, Tensor)


def checksum_term(checksum: Checksum, index: int, size: int) -> Checksum:
    """A rank's term of a sum over ranks, which is 0 if all copies have the same checksum. The sum is exact in fp64 for
    up to a million ranks. index, size: as in ReplicaChecksum."""
    return checksum * (size - 1) if index == 0 else -checksum


def raise_mismatch(problem: str, items: Mapping[str, str], group: dist.ProcessGroup) -> NoReturn:
    """Raise RanksDisagreeError after a checksum differed. The message lists each item that differs between the ranks
    that have it, or reports that no item differs now. Collective."""
    items_by_rank: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(items_by_rank, dict(items), group=group)
    ranks, values = dist.get_process_group_ranks(group), dict[str, dict[str, list[int]]]()
    for rank, rank_items in zip(ranks, items_by_rank, strict=True):
        for name, value in rank_items.items():
            values.setdefault(name, {}).setdefault(value, []).append(rank)
    _raise_for(problem, [
        f"{name}: " + "; ".join(f"{value} on {_format_ranks(holders)}" for value, holders in ranks_by_value.items())
        for name, ranks_by_value in sorted(values.items())
        if len(ranks_by_value) > 1
    ])  # fmt: skip
    raise RanksDisagreeError(f"{problem}, but a second comparison found no difference: memory or network is faulty")


def _raise_for(problem: str, lines: Sequence[str]) -> None:
    if lines:
        hidden = [f"and {len(lines) - _MAX_SHOWN} more differences"] if len(lines) > _MAX_SHOWN else []
        raise RanksDisagreeError(f"{problem}:\n" + "\n".join(f"  {line}" for line in [*lines[:_MAX_SHOWN], *hidden]))


def differences(items_by_rank: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """One line for each item that differs between ranks, with the ranks of the minority. ranks: the rank of each entry
    of `items_by_rank`."""
    lines = []
    for name in sorted({name for items in items_by_rank for name in items}):
        values = [items.get(name, "nothing") for items in items_by_rank]
        usual, _ = Counter(values).most_common(1)[0]
        ranks_by_value: dict[str, list[int]] = {}
        for rank, value in zip(ranks, values, strict=True):
            if value != usual:
                ranks_by_value.setdefault(value, []).append(rank)
        minority = "; ".join(f"{value} on {_format_ranks(holders)}" for value, holders in ranks_by_value.items())
        if minority:
            lines.append(f"{name}: {minority}; {usual} on the other{'s' if values.count(usual) > 1 else ''}")
    return lines


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN])) + (" ..." if len(ranks) > _MAX_SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


@cache
def code_digest() -> str:
    """Digest of weft's source files at the first call, 16 hexadecimal digits. Checkouts of one version may differ."""
    digest = hashlib.blake2b(digest_size=8)
    root = PACKAGE
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python and of this code. weft.launch.summary.versions() has those of torch and transformers."""
    return {"python": platform.python_version(), "weft's files": code_digest()}


def check_shared(folder: Path, token: str, ranks: Ranks) -> None:
    """Raise UserError if a rank does not see the first rank's lock, and so writes into another run folder.
    Collective."""
    try:
        sees_lock = json.loads((folder / LOCK).read_text(encoding="utf-8"))["token"] == token
    except (OSError, ValueError, KeyError):
        sees_lock = False
    hosts: list[str | None] = [None] * ranks.world
    dist.all_gather_object(hosts, None if sees_lock else socket.gethostname(), group=ranks.group)
    blind = [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host is not None]
    if blind:
        raise UserError(
            f"run.dir: {folder.absolute()} is not the same folder for all ranks: {', '.join(blind[:4])}"
            f"{' and others' * (len(blind) > 4)} cannot see the files that rank 0 wrote there. Set run.dir (or "
            "run.staging, if run.dir is on an object store) to a folder on a file system that all ranks share."
        )


def max_over_ranks(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The maximum of each number over the ranks of `group`, by one all-reduce; collective. If the group has gloo, the
    reduction is on the host, so that nothing waits for the device; otherwise it is on `device`."""
    if dist.get_world_size(group) == 1:
        return [float(value) for value in values]
    if "gloo" in dist.get_backend_config(group):
        device = torch.device("cpu")
    vector = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    return list(vector.tolist())


def run_on_first_rank(call: Callable[[], None], ranks: Ranks) -> None:
    """Call `call` on the first rank. If it raises UserError, all ranks raise it. Collective."""
    message: list[str | None] = [None]
    if ranks.is_first:
        try:
            call()
        except UserError as error:
            message = [str(error)]
    dist.broadcast_object_list(message, src=0, group=ranks.group)
    if message[0] is not None:
        raise UserError(message[0])
