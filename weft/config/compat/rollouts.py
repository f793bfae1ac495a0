"""Settings of reinforcement learning that other trainers spread over several names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from weft.config.compat.draft import Draft, numbers_of
from weft.config.compat.names import entry_of
from weft.config.compat.ranks import devices_of
from weft.config.compat.trainer import TABLES, RlDraft
from weft.config.server_checks import KEEPS_ALL, SERVERS

_PARTS = (
    "{} does not say how much of the distribution the kept tokens have, without which samples cannot be trained: all "
    "tokens are drawn from. `rollout.engine: hf` says it."
)


def needs_another(rl: RlDraft, entry: str, value: Any, found: Mapping[str, Any]) -> str | None:
    """Why a value has no effect, if its switch is not on; "" if the value is off, too. None if the value counts."""
    switch = rl.needs.get(entry)
    if switch is None or any(given is True for name, given in found.items() if entry_of(name, {switch: 0})):
        return None
    return f"without {switch} it says nothing." if value else ""


def take_rl_columns(draft: Draft, given: Mapping[str, str]) -> None:
    """Set data.columns. given: the trainer's key -> the column."""
    columns = {draft.trainer.rl_columns[draft.entry(name)]: column for name, column in given.items()}
    others = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if others:
        draft.take("data.columns", others, next(iter(given)), ", ".join(map(draft.entry, given)))


def take_rewards(draft: Draft, rl: RlDraft, found: Mapping[str, Any]) -> None:
    """Set rl.reward from the classes of the rewards."""
    known: dict[str, str] = {}
    for name, value in found.items():
        if not fnmatchcase(name, rl.reward):
            continue
        own = next((reward for end, reward in rl.rewards.items() if str(value).endswith(end)), None)
        if own is None:
            draft.left[name] = f"{value}: write it as a function (docs/how-to/write-a-reward.md), named in `rl.reward`."
        else:
            draft.left.pop(name, None)
            known[own] = name
    if known:
        draft.take("rl.reward", [*known], next(iter(known.values())), ", ".join(known.values()))


def settle_rollouts(
    draft: Draft, rl: RlDraft, found: Mapping[str, Any], gpus: int | None, data_ranks: int | None
) -> None:
    """Set the keys that follow from sizes: lengths, devices, and the optimizer steps of a rollout step. gpus,
    data_ranks: of the old run, if known."""
    _settle_lengths(draft, rl, found)
    _settle_devices(draft, rl, found, gpus)
    per_rollout = _settle_updates(draft, found, data_ranks) * draft.value("rl.epochs", 1)
    for key in rl.per_rollout:
        count = draft.value(key)
        if isinstance(count, int) and count > 0 and per_rollout > 1:
            origin, name = draft.taken[key][1:]
            draft.take(key, count * per_rollout, name, f"{origin}: {count} rollout steps of {per_rollout} updates")


def _settle_lengths(draft: Draft, rl: RlDraft, found: Mapping[str, Any]) -> None:
    """Set the longest completion, if only the longest sample is given, and a row that holds a sample."""
    by_entry = {draft.entry(name): value for name, value in found.items()}
    whole, prompt = (by_entry.get(name) for name in rl.longest)
    prompt = prompt or draft.value("rollout.max_prompt_tokens")
    if "rollout.max_new_tokens" not in draft.taken and isinstance(whole, int) and isinstance(prompt, int):
        draft.take("rollout.max_new_tokens", whole - prompt, rl.longest[0], " - ".join(rl.longest))
    draft.left.pop(next((name for name in found if draft.entry(name) == rl.longest[0]), ""), None)
    draft.fit_row(
        draft.value("rollout.max_prompt_tokens", 1024) + draft.value("rollout.max_new_tokens", 1024), "sample"
    )


def _settle_devices(draft: Draft, rl: RlDraft, found: Mapping[str, Any], gpus: int | None) -> None:
    """Set cluster.trainer, rollout.engines and cluster.placement; drop sampling that servers cannot report."""
    train, engines = _devices(draft.trainer.table.devices, found), _devices((rl.engines,), found)
    ranks = (*TABLES.shared.ranks.machines, *TABLES.shared.ranks.gpus)
    if gpus:
        draft.take("cluster.trainer", gpus, draft.trainer.table.devices[0], f"{gpus} GPUs")
    for name, value in found.items():
        if draft.entry(name) in ranks or (train and set(devices_of(value)) == train):
            draft.left.pop(name, None)  # covered by cluster.trainer; roles on the trainers' devices need nothing
    if draft.value("rollout.engine") not in SERVERS:
        return
    for leaf, whole in KEEPS_ALL.items():
        if draft.value(f"rollout.{leaf}", whole) != whole:
            draft.drop(f"rollout.{leaf}", _PARTS.format(draft.value("rollout.engine")))
    if engines:
        each = draft.value("rollout.tp", 1)
        draft.take("rollout.engines", len(engines) // each, rl.engines, f"{len(engines)} GPUs / {each}")
        shared = "colocated" if engines & train else "disaggregated"
        draft.take("cluster.placement", shared, rl.engines, f"GPUs of trainers and engines: {shared}")


def _devices(names: tuple[str, ...], found: Mapping[str, Any]) -> set[int]:
    return {device for name, value in found.items() if name in names for device in devices_of(value)}


def _settle_updates(draft: Draft, found: Mapping[str, Any], data_ranks: int | None) -> int:
    """Set rl.updates from the samples of an optimizer step. Returns it; 1 if the samples are not known."""
    sizes = draft.trainer.table.per_device
    given = {name: value for name, value in found.items() if draft.entry(name) in sizes}
    factors = {**sizes, **{draft.entry(name): next(numbers_of(value), 0) for name, value in given.items()}}
    samples = draft.value("rl.prompts", 0) * draft.value("rl.group_size", 1)
    batch = int(math.prod(factors.values())) * (data_ranks or 0)
    updates = samples // batch if batch and samples % batch == 0 else 0
    if not updates or draft.value("rl.prompts", 0) % updates:
        draft.left |= {name: draft.advice(name) or "" for name in given}
        return 1
    terms = " x ".join(str(value) for value in factors.values())
    draft.take("rl.updates", updates, next(iter(given), ""), f"{samples} samples / ({terms} x {data_ranks} data ranks)")
    return updates
