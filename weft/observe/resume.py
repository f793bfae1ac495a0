"""`weft sft --resume RUN`: chooses a checkpoint, compares the run with it, and restores engine and run folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from weft.checkpoint import rng
from weft.checkpoint.resume import (
    find_newest,
    from_weights,
    no_complete_checkpoint,
    other_training,
    read_verified,
    restore_engine,
    resumed_notes,
    run_on_all_ranks,
)  # fmt: skip
from weft.checkpoint.retention import complete_steps, forget_best, point_best, point_latest, set_aside, step_folder
from weft.checkpoint.state import RUN, TrainerState
from weft.config import to_dict
from weft.config.keys import schema_keys, with_current_names
from weft.config.load import show_default
from weft.config.rl_schema import RlConfig
from weft.config.schema import ScheduleConfig, SftConfig
from weft.config.yaml12 import show
from weft.data.documents import DataReport
from weft.engine.engine import Engine
from weft.engine.optim.schedule import learning_rate
from weft.errors import UserError
from weft.launch.consistency import versions
from weft.launch.process import Ranks
from weft.launch.summary import versions as package_versions
from weft.models import hf
from weft.observe.folder import SAMPLES, cut_lines, dropped_of, write_config
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.source import open_model_weights

# Keys of a frozen model that determine where it computes, and in which micro-batches.
HOW_IT_COMPUTES = ("ranks", "dp_replicate", "dp_shard", "tp", "pp", "cpu_offload", "max_tokens_per_device")
# Keys that change how a run computes but not its training. Changes of other keys are refused. Data and model are
# compared by content.
MAY_CHANGE = (
    "mesh", "fsdp", "checkpoint", "eval", "track", "profile", "run", "data.path", "data.sources", "data.split",
    "data.subset", "data.columns", "data.text_unit", "data.roles", "data.message_keys", "data.ignore", "data.system",
    "data.max_length", "data.long_documents", "data.bad_rows",
    "data.workers", "data.cache", "data.check_images", "data.max_image_pixels", "data.fetch_images",
    "data.chat_template", "model.path", "model.imports", "model.dcp_weights", "model.attention", "model.recompute",
    "model.compile", "step.max_tokens_per_device", "step.padding", "train.timeout", "train.log_every",
    "train.max_nonfinite", "train.deterministic", "optimizer.load_state", "preference.cache", "distill.cache",
    "distill.cache_dir", *(f"{section}.{leaf}" for section in ("reference", "teacher") for leaf in HOW_IT_COMPUTES),
)  # fmt: skip
MAY_NOT = ("fsdp.master_dtype",)
_SCHEDULED = ("schedule", "train.steps", "train.epochs")  # may change if past updates keep their rates: rates_changed


@dataclass(frozen=True)
class Start:
    """The state in which a run begins. step, updates: number of earlier steps, and of those that were not skipped.
    read: of the recipe (Recipe.state). state: None for a new run. notes: for the opening. The other fields have the
    checkpoint's values."""

    step: int = 0
    updates: int = 0
    bad_in_a_row: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)
    state: TrainerState | None = None
    notes: tuple[str, ...] = ()


def find_start(config: SftConfig, folder: Path, data: DataReport, steps: int, ranks: Ranks) -> Start:
    """Finds the newest complete checkpoint of RUN, and checks that this config continues its training. steps: of the
    complete run. Raises UserError, the same on every rank. Changes nothing in RUN. Collective."""
    state, skipped = newest_complete(folder / "checkpoints", ranks)
    notes = [f"skipped  {text}" for text in skipped]
    if state is None:
        if skipped:
            raise UserError(no_complete_checkpoint(folder, skipped, config.command))
        return Start(notes=(f"resumed  {folder} has no checkpoint yet, so the run starts at step 1",))
    content = state.content
    changed = dict(changes(content["config"], to_dict(config), type(config)))
    problems = [
        *refused_changes(changed),
        *rates_changed(content, config, steps, content["updates"]),
        *_contents_changed(state, config, data),
    ]
    if problems:
        raise UserError(other_training(folder, state, problems, config.command))
    notes += resumed_notes(state, steps, changed)
    return Start(
        step=state.step,
        updates=content["updates"],
        bad_in_a_row=content["bad_in_a_row"],
        summary=content["summary"],
        seconds=content["seconds"],
        evaluation=content.get("evaluation", {}),
        read=content.get("read", {}),
        state=state,
        notes=tuple(notes),
    )


def newest_complete(checkpoints: Path, ranks: Ranks) -> tuple[TrainerState | None, list[str]]:
    """(newest checkpoint with trainer state that all ranks can read completely, why newer ones were skipped).
    Collective."""
    listed = [complete_steps(checkpoints)]
    dist.broadcast_object_list(listed, src=0, group=ranks.group)
    return find_newest(
        checkpoints,
        listed[0],
        lambda folder: run_on_all_ranks(partial(read_verified, folder, ranks.rank, ranks.world, RUN), ranks),
    )


def restore(config: SftConfig, engine: Engine, start: Start, folder: Path) -> list[str]:
    """Restores master weights, moments and random generators. Then moves files in RUN of later steps aside. Returns
    messages for the user. Raises UserError, with RUN unchanged, if the state does not fit this model."""
    notes = list(start.notes)
    if start.state is None:
        rng.seed_rank(config.train.seed, engine.mesh.loss_rank)
    else:
        notes += restore_engine(engine, start.state, config.train.seed, command=config.command)
    if engine.ranks.is_first:
        notes += set_aside_later(folder, start.step, start.evaluation)
        write_config(config, folder)
    return notes


def set_aside_later(folder: Path, step: int, evaluation: Mapping[str, Any]) -> list[str]:
    """Moves checkpoints and lines of later steps aside, and sets `latest` and `best`. evaluation: the evaluator's part
    of the checkpoint's state. Returns messages for the user."""
    notes, checkpoints = [], folder / "checkpoints"
    aside = set_aside(checkpoints, step)
    if aside:
        notes.append(f"aside    checkpoints after step {step} are now {', '.join(aside)}")
    if step:
        point_latest(step_folder(checkpoints, step))
        notes += reset_best(checkpoints, evaluation)
    for name in ("metrics.jsonl", SAMPLES):
        dropped = cut_lines(folder / name, step)
        if dropped:
            moved = dropped_of(folder / name).name
            notes.append(f"dropped  {dropped} lines of {name} after step {step}, moved to {moved}")
    return notes


def reset_best(checkpoints: Path, evaluation: Mapping[str, Any]) -> list[str]:
    """Points `best` at the best checkpoint in `evaluation`, because a later one may have been moved aside. Returns
    messages for the user."""
    forget_best(checkpoints)
    best = evaluation["step"] if evaluation.get("kept") else 0
    target = step_folder(checkpoints, best)
    if target.is_dir():
        point_best(target)
    elif best:
        return [f"best     step {best} was the best so far, but {target} no longer exists"]
    return []


# ---------------------------------------------------------------- differences that are allowed


def constants(config: SftConfig | RlConfig, documents: int, digest: str, steps: int) -> dict[str, Any]:
    """The constant part of state.json, which is compared with a resumed run's. digest: of the data."""
    return {
        "steps": steps,
        "config": to_dict(config),
        "data": {"documents": documents, "digest": digest},
        "model": {"sha256": model_fingerprint(config)},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], schema: type) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields (key, (before, now)) of the keys that differ. A key that a config lacks counts as its default."""
    before = with_current_names(before, schema)
    for name, key in schema_keys(schema).items():
        section, _, leaf = name.partition(".")
        old, new = (
            show(config[section][leaf])
            if leaf in config.get(section, {})
            else ""
            if key.required
            else show_default(key)
            for config in (before, now)
        )
        if old != new and name != "run.dir":
            yield name, (old, new)


def refused_changes(changed: Mapping[str, tuple[str, str]], also_allowed: Sequence[str] = ()) -> list[str]:
    """Messages about changed keys that must not change. also_allowed: keys and sections in addition to MAY_CHANGE."""
    may = (*MAY_CHANGE, *_SCHEDULED, *also_allowed)
    return [
        f"{key}: {before} -> {now}: it changes the training"
        for key, (before, now) in changed.items()
        if key in MAY_NOT or not any(key == name or key.startswith(name + ".") for name in may)
    ]


def rates_changed(content: Mapping[str, Any], config: SftConfig | RlConfig, steps: int, done: int) -> list[str]:
    """Messages about learning rates that would differ. A longer run or another schedule may continue a training only if
    past updates had the same rates. content: of the checkpoint's state. steps: of the new run. done: past updates."""
    old, before = content["config"], content["steps"]
    schedule, lr = ScheduleConfig(**old["schedule"]), old["optimizer"]["lr"]
    if steps < content["step"]:
        return [f"train.steps, train.epochs: a run of {steps} steps ends before step {content['step']}"]
    for update in range(1, done + 1):
        was = learning_rate(update, before, lr, schedule)
        now = learning_rate(update, steps, lr, config.schedule)
        if was != now:
            return [
                f"the learning rate of update {update} was {was:.6g} in a run of {before} steps with schedule.name="
                f"{schedule.name}, and would be {now:.6g} in a run of {steps} steps with {config.schedule.name}. A run "
                "can be extended with schedule.name=constant or inverse_sqrt, or with wsd before its decay, and with "
                "schedule.warmup_steps instead of warmup_ratio"
            ]
    return []


def advice_after_last_step(start: Start, config: SftConfig | RlConfig, steps: int, folder: Path) -> str:
    """Advice for a finished run: to train longer if the schedule allows it, otherwise to start a new run from its
    weights; "" without a checkpoint."""
    if start.state is None:
        return ""
    command = config.command
    override = f"train.steps={2 * steps}" if config.train.steps else f"train.epochs={2 * (config.train.epochs or 1)}"
    if not rates_changed(start.state.content, config, 2 * steps, start.updates):
        return f"More steps: weft {command} --resume {folder} {override}"
    return (
        f"Its learning rates (schedule.name={config.schedule.name}) were planned for {steps} steps. To continue from "
        "its weights in a new run with a new schedule: "
        f"{from_weights(start.state.checkpoint, command)} {override}"
    )


def _contents_changed(state: TrainerState, config: SftConfig, data: DataReport) -> list[str]:
    problems = []
    if state.content["data"]["digest"] != data.digest:
        before = state.content["data"]["documents"]
        problems.append(
            f"the data ({data.path}) has other documents than before ({data.documents:,} now, {before:,} before), so "
            f"the position in the data has no meaning"
        )
    if state.content["model"]["sha256"] != model_fingerprint(config):
        changed = "config.json or the weights" if config.lora.on else "config.json"
        problems.append(f"model.path: {changed} of {config.model.path} differ from before")
    return problems


# ---------------------------------------------------------------- identity of a run

# Keys that may differ between ranks, because data are compared by content.
MAY_DIFFER = ("run.dir", "data.path", "eval.path", "data.sources", "eval.sources", "data.workers", "data.cache")
_NUM_SAMPLED = 64  # approximate number of tensors that the fingerprint of a base model samples


def identity(config: SftConfig, data: DataReport) -> dict[str, str]:
    """Name -> value of everything that must be equal on all ranks: config without MAY_DIFFER, versions, model, data."""
    keys = {f"{section}.{key}": str(v) for section, values in to_dict(config).items() for key, v in values.items()}
    keys = {name: value for name, value in keys.items() if name not in MAY_DIFFER}
    packages = {name: str(version) for name, version in package_versions().items()}
    model = hf.read_config(config.model.path).to_json_string()
    return {
        **keys, **packages, **versions(),
        "config.json of the model": hashlib.blake2b(model.encode(), digest_size=8).hexdigest(),
        "documents of the data": f"{data.documents} ({data.digest})",
    }  # fmt: skip


def model_fingerprint(config: SftConfig | RlConfig) -> str:
    """Digest of the model's config.json without keys that do not affect the computation. With adapters, it includes a
    sample of the base weights, which no checkpoint contains."""
    raw, _ = PretrainedConfig.get_config_dict(config.model.path)
    for name in ("_commit_hash", "_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        raw.pop(name, None)
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
    if config.lora.on:
        for row in sample_rows(config.model.path):
            digest.update(row.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sample_rows(path: str) -> Iterator[Tensor]:
    """Yields the middle row of some of a model's tensors, enough to distinguish the weights of two models."""
    with closing(open_model_weights(path)) as source:
        names = sorted(source.files)
        for name in names[:: -(-len(names) // _NUM_SAMPLED)]:
            shape = source.files[name].entries[name].shape
            if 0 in shape:
                continue
            middle, rows = tuple(size // 2 for size in shape[:-1]), (1,) * len(shape[:-1])
            yield source.raw(name, Box((*middle, 0), (*rows, shape[-1])) if shape else None).flatten()
