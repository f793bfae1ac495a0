"""cluster.devices: the devices of each role of `weft rl`. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from weft.config.conditions import REWARD_MODEL, SERVERS

DEVICE_ROLES = ("trainer", "rollout", "reference", "critic", "teacher", "reward_model")
_RANGES = re.compile(r"\d+(-\d+)?(, *\d+(-\d+)?)*")
_MOST_DEVICES = 1_000_000


def device_lists(devices: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Role -> numbers of its devices. devices: role -> a list; ranges, as in `0-7` or `0-3, 8-11`; another role, whose
    devices it shares; or a number of devices, which assigns the lowest free devices. Raises ValueError for any other
    value."""
    lists: dict[str, tuple[int, ...]] = {}
    for role, value in devices.items():
        if role not in DEVICE_ROLES:
            raise ValueError(f"`{role}` is not a role: the roles are {', '.join(DEVICE_ROLES)}")
        if isinstance(value, list | tuple):
            lists[role] = tuple(value)
        elif isinstance(value, str) and _RANGES.fullmatch(value.strip()):
            lists[role] = tuple(_numbers(value))
    for role, value in devices.items():
        if isinstance(value, int):
            used = {device for numbers in lists.values() for device in numbers}
            free = (device for device in range(len(used) + value) if device not in used)
            lists[role] = tuple(device for device, _ in zip(free, range(value), strict=False))
    for role, value in devices.items():
        if role not in lists:
            if value not in lists:
                raise ValueError(
                    f"{role} is {value!r}: write a number, a list, ranges as in '0-7' or '0-3, 8-11', or another role "
                    "that has devices"
                )
            lists[role] = lists[value]
    for role, numbers in lists.items():
        if not numbers:
            raise ValueError(f"{role} has no device")
        if not all(type(device) is int and 0 <= device < _MOST_DEVICES for device in numbers):
            raise ValueError(f"{role} has devices that are not numbers from 0 to {_MOST_DEVICES - 1:,}")
        if repeated := [device for device, count in Counter(numbers).items() if count > 1]:
            raise ValueError(f"{role} names device {repeated[0]} twice")
    return {role: lists[role] for role in DEVICE_ROLES if role in lists}


def _numbers(text: str) -> Sequence[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if int(last or first) - int(first) >= _MOST_DEVICES:
            raise ValueError(f"{part.strip()} is {_MOST_DEVICES:,} devices or more")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def show_devices(numbers: Collection[int]) -> str:
    """Numbers of devices as ranges, such as `0-3, 6`."""
    rows: list[list[int]] = []
    for device in sorted(numbers):
        if rows and device == rows[-1][-1] + 1:
            rows[-1].append(device)
        else:
            rows.append([device])
    return ", ".join(str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows)


def device_presets(devices: Any, engine: Any, tp: Any) -> dict[str, Any]:
    """The keys that cluster.devices sets, with their values. engine, tp: the values of rollout.engine and rollout.tp.
    Empty for devices that device_problem refuses."""
    try:
        lists = device_lists(devices if isinstance(devices, dict) else {})
    except (ValueError, TypeError):
        return {}
    presets: dict[str, Any] = {}
    if "trainer" in lists:
        presets["cluster.trainer_ranks"] = len(lists["trainer"])
    if "rollout" in lists:
        per_engine = tp if engine in SERVERS and isinstance(tp, int) and tp > 0 else 1
        presets["rollout.num_engines"] = max(1, len(lists["rollout"]) // per_engine)
        presets["cluster.placement"] = "colocated" if roles_on(lists, "rollout") else "disaggregated"
    for role in ("reference", "critic", "reward_model"):
        if role in lists and set(lists[role]) != set(lists.get("trainer", ())):
            presets[f"{role}.ranks"] = len(lists[role])
    return presets


def roles_on(lists: Mapping[str, Sequence[int]], role: str) -> list[str]:
    """The other roles that share a device with `role`."""
    return [name for name in lists if name != role and not set(lists[role]).isdisjoint(lists[name])]


def teacher_ranks(config: Any) -> int | None:
    """The number of separate ranks of rl.teacher; None if it is in the trainer's ranks. config: of `weft rl`."""
    lists = device_lists(config.cluster.devices)
    teacher = lists.get("teacher", ())
    return None if set(teacher) in (set(), set(lists.get("trainer", ()))) else len(teacher)


def device_problem(config: Any) -> str | None:
    """Why cluster.devices is impossible in this config of `weft rl`, and which value to set; None if it is possible."""
    rollout, rl, staleness = config.rollout, config.rl, config.cluster.max_staleness
    try:
        lists = device_lists(config.cluster.devices)
    except ValueError as error:
        return f"cluster.devices: {error}."
    if not lists:
        return None
    has_engines = rollout.engine != "embedded"
    reasons = {
        "reference": "" if rl.has_reference else "rl.kl_coef is 0: there is no reference",
        "critic": "" if rl.has_critic else "only rl.advantage=gae has a critic",
        "teacher": "" if rl.teacher is not None else "rl.teacher is not set",
        "reward_model": "" if any(p.startswith(REWARD_MODEL) for p in rl.reward) else "rl.reward names no model:PATH",
        "rollout": "" if has_engines else "rollout.engine=embedded is in the trainers' ranks",
    }
    if config.lora.on and config.reference.path is None and not config.lora.modules_to_save and rl.has_reference:
        reasons["reference"] = "with adapters the reference is the base, on the trainer's ranks"
    if absent := [role for role in lists if reasons.get(role)]:
        return f"cluster.devices names {absent[0]}, but {reasons[absent[0]]}: remove {absent[0]}."
    if missing := [role for role in ("trainer", "rollout")[: 1 + has_engines] if role not in lists]:
        return f"cluster.devices does not name {missing[0]}: add the devices of {missing[0]}."
    sharing = roles_on(lists, "rollout") if has_engines else []
    if sharing and staleness:
        shared = show_devices([device for device in lists["rollout"] if device in lists[sharing[0]]])
        return (
            f"cluster.devices: {sharing[0]} and rollout share {shared}, but with cluster.max_staleness = {staleness} "
            f"they do not alternate: engines generate while {sharing[0]} computes. Give rollout separate devices, or "
            f"set cluster.max_staleness=0."
        )
    if rollout.engine in SERVERS:
        if len(lists["rollout"]) % rollout.tp:
            return (
                f"cluster.devices gives rollout {len(lists['rollout'])} devices, which is no multiple of rollout.tp = "
                f"{rollout.tp}, the devices of an engine: give rollout a multiple."
            )
        outside = [device for device in lists["rollout"] if device not in lists["trainer"]]
        if sharing and outside:
            return (
                f"cluster.devices: rollout shares devices with {sharing[0]}, but {show_devices(outside)} "
                f"{'is' if len(outside) == 1 else 'are'} not a trainer's: all engines of "
                f"rollout.engine={rollout.engine} must be on devices of trainer ranks, or none of them. Change the "
                f"devices of rollout, or set rollout.engine=hf."
            )
    if teacher_ranks(config) is not None and rl.teacher_in == "loss":
        return (
            "cluster.devices gives the teacher other devices than the trainer, but with rl.teacher_in=loss the teacher "
            "must be on the trainer's ranks: write teacher: trainer, or set rl.teacher_in=advantage."
        )
    return None


def device_lines(config: Any) -> list[str]:
    """A line for each set of devices with the same roles. Empty without cluster.devices."""
    lists = device_lists(config.cluster.devices)
    groups: dict[tuple[str, ...], list[int]] = {}
    for device in sorted({device for numbers in lists.values() for device in numbers}):
        groups.setdefault(tuple(role for role in lists if device in lists[role]), []).append(device)
    return [
        f"devices  {show_devices(numbers)}: {', '.join(roles)}{', alternating' if len(roles) > 1 else ''}"
        for roles, numbers in groups.items()
    ]
