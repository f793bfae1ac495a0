"""Ranks that must be alike: the same config, data, code and versions, compared before anything is computed."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from weft.errors import RanksDisagreeError
from weft.version import PACKAGE

_MOST = 8


def require_agreement(items: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Compare what this rank says of itself, name -> value, with all others of the group; collective.

    Raises RanksDisagreeError, the same on every rank, that names each difference and the ranks that differ.
    """
    said: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(said, dict(items), group=group)
    found = differences(said, dist.get_process_group_ranks(group or dist.group.WORLD))
    if found:
        more = [f"and {len(found) - _MOST} more differences"] if len(found) > _MOST else []
        raise RanksDisagreeError("ranks disagree:\n" + "\n".join(f"  {line}" for line in [*found[:_MOST], *more]))


def differences(said: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """One line per item that is not the same on all ranks, the few named against the many. ranks: who said it."""
    lines = []
    for name in sorted({name for items in said for name in items}):
        values = [items.get(name, "nothing") for items in said]
        usual, _ = Counter(values).most_common(1)[0]
        others: dict[str, list[int]] = {}
        for rank, value in zip(ranks, values, strict=True):
            if value != usual:
                others.setdefault(value, []).append(rank)
        few = "; ".join(f"{value} on {_names(of)}" for value, of in others.items())
        if few:
            lines.append(f"{name}: {few}; {usual} on the other{'s' if values.count(usual) > 1 else ''}")
    return lines


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST])) + (" ..." if len(ranks) > _MOST else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def code_digest() -> str:
    """16 hexadecimal digits of weft's own source files: another checkout has others, whatever its version says."""
    digest = hashlib.blake2b(digest_size=8)
    root = PACKAGE
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of Python and of this code; those of torch and transformers are in telemetry.summary.versions()."""
    return {"python": platform.python_version(), "weft's files": code_digest()}
