"""Settings of reinforcement learning for which other trainers have several names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from weft.config.conditions import SERVERS
from weft.config.devices import show_devices
from weft.config.migrate.draft import Draft, numbers_of
from weft.config.migrate.names import weft_value
from weft.config.migrate.ranks import devices_of
from weft.config.migrate.trainer import TABLES, RlDraft


def take_rl_columns(draft: Draft, column_settings: Mapping[str, str]) -> None:
    """Set data.columns. column_settings: the trainer's key -> the column."""
    columns = {}
    for name, column in column_settings.items():
        if (weft_column := draft.trainer.rl_columns.get(draft.entry(name))) is not None:
            columns[weft_column] = column
        else:
            draft.notes[name] = draft.advice(name) or ""
    renamed = {our_name: foreign for our_name, foreign in columns.items() if our_name != foreign}
    if renamed:
        draft.take("data.columns", renamed, next(iter(column_settings)), ", ".join(map(draft.entry, column_settings)))


def take_rewards(draft: Draft, rl: RlDraft, settings: Mapping[str, Any]) -> None:
    """Set rl.reward from the classes of the rewards: weft's function if it computes the same; otherwise a function that
    the user must write, without which the draft does not load."""
    names: dict[str, str] = {}
    for name, value in settings.items():
        if not fnmatchcase(name, rl.reward):
            continue
        reward_name = next((reward for end, reward in rl.rewards.items() if str(value).endswith(end)), None)
        if reward_name is None:
            reward_name = f"my_rewards:{name.split('.')[-2]}"
            draft.notes[name] = (
                f"{value}: write it as a function (docs/how-to/write-a-reward.md), {reward_name} in `rl.reward`."
            )
        else:
            draft.notes.pop(name, None)
        names[reward_name] = name
    if names:
        draft.take("rl.reward", [*names], next(iter(names.values())), ", ".join(names.values()))


def settle_rollouts(
    draft: Draft, rl: RlDraft, settings: Mapping[str, Any], gpus: int | None, data_ranks: int | None
) -> int | None:
    """Set the keys that follow from sizes: lengths, devices, and the optimizer steps of a rollout step. gpus,
    data_ranks: of the old run, if known. Returns the samples of an optimizer step; None if they are unknown."""
    _settle_lengths(draft, rl, settings)
    _settle_devices(draft, rl, settings, gpus)
    samples = _settle_updates(draft, settings, data_ranks)
    if samples is not None:
        updates = draft.value("rl.minibatches", 1) * int(next(numbers_of(settings.get("ppo_epochs", 1)), 1))
        draft.count_updates(rl.per_rollout, updates)
        return samples
    for key in rl.per_rollout:
        count = draft.value(key)
        if isinstance(count, int) and count > 0:
            name = draft.values[key][2]
            draft.values[key] = (None, f"set it: {count} rollout steps x rl.minibatches x rl.epochs", name)
    return samples


def _settle_lengths(draft: Draft, rl: RlDraft, settings: Mapping[str, Any]) -> None:
    """Set the maximum completion length from the maximum sample length, which takes precedence if the config has it;
    and make a row large enough for a sample."""
    by_entry = {draft.entry(name): value for name, value in settings.items()}
    longest, prompt = (by_entry.get(name) for name in rl.longest)
    prompt = prompt or draft.value("rollout.max_prompt_tokens")
    if isinstance(longest, int) and isinstance(prompt, int):
        draft.take("rollout.max_new_tokens", longest - prompt, rl.longest[0], " - ".join(rl.longest))
    draft.notes.pop(next((name for name in settings if draft.entry(name) == rl.longest[0]), ""), None)
    draft.fit_row(
        draft.value("rollout.max_prompt_tokens", 1024) + draft.value("rollout.max_new_tokens", 1024), "sample"
    )


def _settle_devices(draft: Draft, rl: RlDraft, settings: Mapping[str, Any], gpus: int | None) -> None:
    """Set cluster.trainer_ranks, rollout.num_engines and cluster.placement."""
    train, engines = _devices(draft.trainer.table.devices, settings), _devices((rl.engines,), settings)
    ranks = (*TABLES.shared.ranks.machines, *TABLES.shared.ranks.gpus)
    if gpus:
        draft.take("cluster.trainer_ranks", gpus, draft.trainer.table.devices[0], f"{gpus} GPUs")
    for name, value in settings.items():
        if draft.entry(name) in ranks or (train and set(devices_of(value)) == train):
            draft.notes.pop(name, None)  # cluster.trainer_ranks covers it; roles on the trainers' devices need no key
    engine = draft.value("rollout.engine", "embedded")
    if not engines or engine == "embedded":
        return
    per_engine = draft.value("rollout.tp", 1) if engine in SERVERS else 1
    draft.take("rollout.num_engines", len(engines) // per_engine, rl.engines, f"{len(engines)} GPUs / {per_engine}")
    if engine not in SERVERS and train and engines & train and engines - train:
        return  # settle_roles sets the devices
    if engines <= train or not engines & train:
        shared = "colocated" if engines <= train else "disaggregated"
        draft.take("cluster.placement", shared, rl.engines, f"GPUs of trainers and engines: {shared}")
        draft.notes.pop(rl.engines, None)
        return
    sharing = (
        f"trainers on {show_devices(train)}, engines on {show_devices(engines)}: {len(train | engines)} in all, of "
        f"which both use {show_devices(train & engines)}"
    )
    draft.compare("devices", sharing, "engines on the trainers' devices, or none of them", is_equal=False)
    draft.values["cluster.placement"] = (
        None,
        "set it: disaggregated (and devices that no trainer has), or colocated (and at most as many engines)",
        rl.engines,
    )


def _take_devices(draft: Draft, rl: RlDraft, settings: Mapping[str, Any], train: set[int]) -> bool:
    """Set cluster.devices, if roles share devices in a way that numbers of ranks cannot express. Returns whether it was
    set."""
    engine = draft.value("rollout.engine", "embedded")
    names = {
        "rollout": rl.engines if engine != "embedded" else "",
        "reference": "reference.device_mapping" if draft.value("rl.kl_coef", 0) > 0 else "",
        "critic": "critic.device_mapping" if draft.value("rl.advantage") == "gae" else "",
    }
    lists = {role: _devices((name,), settings) for role, name in names.items() if name}
    lists = {"trainer": train} | {role: devices for role, devices in lists.items() if devices}

    def is_apart(role: str) -> bool:
        return all(role == other or not lists[role] & devices for other, devices in lists.items())

    numbers_say_it = all(
        lists[role] == train or (role == "rollout" and lists[role] <= train) or is_apart(role) for role in lists
    )
    engines = lists.get("rollout", set())
    if not train or numbers_say_it:
        return False
    if engine in SERVERS and engines - train and not is_apart("rollout"):  # servers share all their devices, or none
        for role in lists.keys() - {"trainer", "rollout"}:
            if shared := engines & lists[role] - train:
                draft.compare(
                    f"devices of engines and {role}",
                    f"both on {show_devices(shared)}",
                    f"{len(engines)} for engines and {len(lists[role])} separate ones for {role}",
                    is_equal=False,
                )
        return False
    draft.values.pop("cluster.placement", None)
    shown = {role: show_devices(devices) for role, devices in lists.items()}
    draft.take("cluster.devices", shown, draft.trainer.table.devices[0], "device_mapping of each role")
    return True


def settle_roles(draft: Draft, settings: Mapping[str, Any], gpus: int | None) -> None:
    """Set how reference and critic are sharded, if their strategies differ from the policy's. gpus: trainer ranks."""
    train = _devices(draft.trainer.table.devices, settings)
    has_lists = draft.rl is not None and _take_devices(draft, draft.rl, settings, train)
    for role in ("reference", "critic"):
        strategy = f"{role}.strategy_args.strategy_config"
        devices = _devices((f"{role}.device_mapping",), settings)
        has_own_devices = bool(devices and train) and (devices != train if has_lists else not devices & train)
        if has_lists:
            draft.notes.pop(f"{role}.device_mapping", None)
        elif has_own_devices:
            draft.take(f"{role}.ranks", len(devices), f"{role}.device_mapping", f"{len(devices)} separate GPUs")
        elif devices and train and devices != train:
            draft.notes[f"{role}.device_mapping"] = (
                f"{show_devices(devices)} of the trainers' {show_devices(train)}: in weft the {role} is on all of "
                f"them, or on separate devices (`{role}.ranks`, `cluster.devices`)."
            )
        for leaf, key in (("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp")):
            size = settings.get(f"{strategy}.{leaf}")
            inherited = 1 if has_own_devices else draft.value(f"mesh.{key}", 1)
            if isinstance(size, int) and size != inherited:
                draft.take(f"{role}.{key}", size, f"{strategy}.{leaf}", f"{role}: {leaf}")
            draft.notes.pop(f"{strategy}.{leaf}", None)
        dtype = next(
            (name for name in (f"{strategy}.param_dtype", f"{role}.model_args.dtype") if settings.get(name)), None
        )
        if dtype is not None and f"{role}.param_dtype" in draft.keys:
            draft.notes.pop(dtype, None)
            dtype_value = weft_value("fsdp.param_dtype", settings[dtype]) or settings[dtype]
            draft.take(f"{role}.param_dtype", dtype_value, dtype, dtype)
        if f"{strategy}.offload_policy" in settings:
            draft.notes.pop(f"{strategy}.offload_policy", None)
            draft.take(
                f"{role}.cpu_offload", bool(settings[f"{strategy}.offload_policy"]), f"{strategy}.offload_policy"
            )
        _settle_shards(
            draft,
            settings,
            role,
            len(devices) if has_own_devices else gpus,
            1 if has_own_devices else draft.value("mesh.cp", 1),
        )


def _settle_shards(draft: Draft, settings: Mapping[str, Any], role: str, ranks: int | None, cp: int) -> None:
    """Set dp_shard and dp_replicate of a role from its fsdp_size, which counts the ranks of cp. ranks: of the role."""
    name = f"{role}.strategy_args.strategy_config.fsdp_size"
    size = settings.get(name)
    if not isinstance(size, int) or ranks is None:
        return
    inside = math.prod(draft.value(f"{role}.{key}") or draft.value(f"mesh.{key}", 1) for key in ("tp", "pp"))
    over = max(1, ranks // inside)
    size = over if size <= 1 or size > over else size
    if over % size or size % cp:
        draft.notes[name] = f"{over} ranks cannot be split into groups of {size}."
        return
    draft.notes.pop(name, None)
    draft.take(f"{role}.dp_replicate", over // size, name, f"{over} ranks / fsdp_size {size}")
    draft.take(f"{role}.dp_shard", size // cp, name, f"fsdp_size {size}" + (" / mesh.cp" if cp > 1 else ""))


def _devices(names: tuple[str, ...], settings: Mapping[str, Any]) -> set[int]:
    return {device for name, value in settings.items() if name in names for device in devices_of(value)}


def _settle_updates(draft: Draft, settings: Mapping[str, Any], data_ranks: int | None) -> int | None:
    """Set rl.minibatches from the samples of an optimizer step. Returns this number; None if it is unknown, or if it
    does not divide the samples of a rollout step."""
    sizes = draft.trainer.table.per_device
    batch_settings = {name: value for name, value in settings.items() if draft.entry(name) in sizes}
    factors = {**sizes, **{draft.entry(name): next(numbers_of(value), 0) for name, value in batch_settings.items()}}
    samples = draft.value("rl.prompts_per_step", 0) * draft.value("rl.group_size", 1)
    batch = int(math.prod(factors.values())) * (data_ranks or 0)
    updates = samples // batch if batch and samples % batch == 0 else 0
    if not updates or draft.value("rl.prompts_per_step", 0) % updates:
        draft.notes |= {name: draft.advice(name) or "" for name in batch_settings}
        return None
    terms = " x ".join(str(value) for value in factors.values())
    draft.take(
        "rl.minibatches",
        updates,
        next(iter(batch_settings), ""),
        f"{samples} samples / ({terms} x {data_ranks} data ranks)",
    )
    return batch
