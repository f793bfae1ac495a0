"""The ranks of the old run: their number, and the conversion of numbers that count ranks which share documents."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from weft.config.migrate.draft import Draft
from weft.config.migrate.names import entry_of
from weft.config.migrate.trainer import TABLES, Trainer

_LIST = re.compile(r"\[ *\d+( *, *\d+)* *\]")
_ONLY_READ = ("reference", "teacher")  # frozen models that may have separate ranks
_RANGE = re.compile(r"list\(range\((?:(\d+), *)?(\d+)\)\)")


def gpus_of(settings: Mapping[str, Any], trainer: Trainer) -> int | None:
    """The number of GPUs that trained; None if the config does not determine it."""
    for name, value in settings.items():
        if entry_of(name, dict.fromkeys(trainer.table.devices)) is not None and (devices := devices_of(value)):
            return len(devices)
    by_entry = {entry_of(name): value for name, value in settings.items() if isinstance(value, int)}
    names = TABLES.shared.ranks
    for name in names.all:
        if name in by_entry:
            return int(by_entry[name])
    machines = next((by_entry[name] for name in names.machines if by_entry.get(name)), 1)
    per_machine = next((by_entry[name] for name in names.gpus if by_entry.get(name)), None)
    return None if per_machine is None else int(machines) * int(per_machine)


def devices_of(value: Any) -> list[int]:
    """ROLL's list of devices, as in [0, 1], "[0, 1]" or "list(range(0, 8))"; empty for any other value."""
    if isinstance(value, list) or _LIST.fullmatch(str(value)):
        return [int(device) for device in re.findall(r"\d+", str(value))]
    matches = [_RANGE.fullmatch(part.strip()) for part in str(value).split("+")]
    if any(match is None for match in matches):
        return []
    return [device for match in matches if match for device in range(int(match[1] or 0), int(match[2]))]


def shared_by(settings: Mapping[str, Any]) -> int:
    """The number of GPUs of the old run that processed the same documents."""
    trained = {name: value for name, value in settings.items() if name.partition(".")[0] not in _ONLY_READ}
    sizes = (value for name, value in trained.items() if entry_of(name) in TABLES.shared.ranks.sharing)
    return math.prod(value for value in sizes if isinstance(value, int) and value > 0)


def settle_mesh(draft: Draft, settings: Mapping[str, Any], gpus: int | None) -> None:
    """Convert the number of shards to mesh.dp_shard, and the tokens of a row to those of one rank. The old numbers
    count all ranks that share documents; weft's do not count mesh.cp."""
    names, cp = TABLES.shared.ranks, draft.value("mesh.cp", 1)
    if entry_of(_name(draft, "mesh.dp_shard")) in names.shards:
        _settle_shards(draft, settings, gpus, cp)
    row = "step.max_tokens_per_device"
    if cp > 1 and entry_of(_name(draft, row)) in names.rows:
        tokens = draft.value(row)
        draft.take(row, -(-tokens // cp), _name(draft, row), f"{tokens} / mesh.cp, per rank")


def _settle_shards(draft: Draft, settings: Mapping[str, Any], gpus: int | None, cp: int) -> None:
    size, name = draft.value("mesh.dp_shard"), _name(draft, "mesh.dp_shard")
    over = (
        None if gpus is None else max(1, gpus * cp // shared_by(settings))
    )  # ranks that have parts of the same tensors
    if over is not None and size >= over:  # all of these ranks, even if the number is larger
        if size > over:
            draft.values.pop("mesh.dp_shard")
            return
    elif over is not None and over % size == 0:
        draft.take("mesh.dp_replicate", over // size, name, f"{over} ranks / {entry_of(name)} {size}")
    if size % cp:
        draft.drop("mesh.dp_shard", f"{size} ranks cannot be split into groups of mesh.cp = {cp}.")
        draft.values.pop("mesh.dp_replicate", None)
    elif cp > 1:
        draft.take("mesh.dp_shard", size // cp, name, f"{entry_of(name)} {size} / mesh.cp, which also shards")


def _name(draft: Draft, key: str) -> str:
    """The trainer's name from which a key was converted; "" if there is none."""
    return draft.values[key][2] if key in draft.values else ""
