"""`weft sft --resume RUN`: which checkpoint a run goes on from, what may differ, and taking everything up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from weft.checkpoint import rng
from weft.checkpoint.retention import forget_best, point_best, point_latest, set_aside, step_folder, whole_steps
from weft.checkpoint.state import DamagedError, TrainerState, check_contents, load_state, read_rng, read_state
from weft.cluster.process import Ranks
from weft.config import to_dict
from weft.config.keys import schema_keys
from weft.config.load import show_default
from weft.config.schema import ScheduleConfig, SftConfig
from weft.config.yaml12 import show
from weft.data.documents import DataReport
from weft.engine.engine import Engine
from weft.engine.schedule import learning_rate
from weft.errors import UserError
from weft.models.adapter_files import CONFIG as ADAPTER
from weft.observe.summary import versions
from weft.recipes.folder import cut_lines, dropped_of, write_config
from weft.recipes.identity import model_fingerprint
from weft.recipes.sampling import SAMPLES

T = TypeVar("T")

# Keys that change how a run computes, not what; all others are refused. Data and model are compared by content.
MAY_CHANGE = (
    "mesh", "fsdp", "checkpoint", "eval", "track", "profile", "run", "data.path", "data.sources", "data.split",
    "data.subset", "data.columns", "data.max_length", "data.long_documents", "data.workers", "data.cache",
    "data.chat_template", "model.path", "model.attention", "model.recompute", "model.compile",
    "step.max_tokens_per_device", "step.shapes", "train.timeout", "train.max_nonfinite", "train.deterministic",
)  # fmt: skip
MAY_NOT = ("fsdp.master_dtype",)
_SCHEDULED = ("schedule", "train.steps", "train.epochs")  # judged by the rates of the steps that are done


@dataclass(frozen=True)
class Start:
    """Where a run begins. step, updates: those that are done; the rest counts on. state: None for a fresh start."""

    step: int = 0
    updates: int = 0
    bad_in_a_row: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    state: TrainerState | None = None
    notes: tuple[str, ...] = ()


def find_start(config: SftConfig, folder: Path, data: DataReport, steps: int, ranks: Ranks) -> Start:
    """The newest whole checkpoint of RUN, after checking that this config goes on with the same training.

    steps: of the whole run. Raises UserError, the same on every rank. Nothing in RUN is changed yet.
    """
    state, skipped = newest_whole(folder / "checkpoints", ranks)
    notes = [f"skipped  {text}" for text in skipped]
    if state is None:
        if skipped:
            raise UserError(_nothing_whole(folder, skipped))
        return Start(notes=(f"resumed  {folder} has no checkpoint yet: from step 1",))
    content = state.content
    changed = dict(changes(content["config"], to_dict(config), SftConfig))
    problems = [
        *refused(changed),
        *_rates_changed(content, config, steps),
        *_contents_changed(state, config, data),
    ]
    if problems:
        raise UserError(
            f"--resume {folder}: this config would go on with another training than the one up to step {state.step}:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + f"\nSet them back, or start a new run from the weights alone: {_from_weights(state.checkpoint)}"
        )
    notes.append(f"resumed  step {state.step} of {steps}, from {state.checkpoint}")
    notes += [f"changed  {key}: {before} -> {now}" for key, (before, now) in changed.items()]
    notes += _version_notes(content["versions"])
    return Start(
        step=state.step,
        updates=content["updates"],
        bad_in_a_row=content["bad_in_a_row"],
        summary=content["summary"],
        seconds=content["seconds"],
        evaluation=content.get("evaluation", {}),
        state=state,
        notes=tuple(notes),
    )


def newest_whole(checkpoints: Path, ranks: Ranks) -> tuple[TrainerState | None, list[str]]:
    """The newest checkpoint that all ranks find whole, with trainer state; and why newer ones were skipped."""
    listed = [whole_steps(checkpoints)]
    dist.broadcast_object_list(listed, src=0)
    skipped: list[str] = []
    for step in reversed(listed[0]):
        folder = step_folder(checkpoints, step)
        state, reason = agreed(partial(_whole, folder, ranks), ranks)
        if state is not None:
            return state, skipped
        skipped.append(f"{folder}: {reason}")
    return None, skipped


def _whole(checkpoint: Path, ranks: Ranks) -> TrainerState:
    state = read_state(checkpoint)
    check_contents(state, ranks.rank, ranks.world)
    return state


def agreed(function: Callable[[], T], ranks: Ranks) -> tuple[T | None, str]:
    """What `function` returns; on all ranks None and the first reason where it found damage on any."""
    result, mine = None, None
    try:
        result = function()
    except DamagedError as error:
        mine = str(error)
    reasons: list[str | None] = [None] * ranks.world
    dist.all_gather_object(reasons, mine)
    reason = next((text for text in reasons if text is not None), None)
    return (result, "") if reason is None else (None, reason)


def take_up(config: SftConfig, engine: Engine, start: Start, folder: Path) -> list[str]:
    """Put masters, moments and generators back, then the run folder in order; what there is to say of it.

    Raises UserError where the state does not fill this model; RUN is as it was then.
    """
    notes = list(start.notes)
    if start.state is None:
        rng.seed_rank(config.train.seed, engine.ranks.rank)
    else:
        notes += fill_from(engine, start.state, config.train.seed)
    if engine.ranks.is_first:
        notes += put_in_order(folder, start.step, start.evaluation)
        write_config(config, folder)
    return notes


def fill_from(engine: Engine, state: TrainerState, seed: int) -> list[str]:
    """Masters, moments and generators of a checkpoint; what there is to say of it. Collective."""

    def load() -> bool:
        load_state(engine, state)
        return True

    loaded, reason = agreed(load, engine.ranks)
    if loaded is None:
        raise UserError(
            f"{state.checkpoint} cannot be resumed from: {reason}. To go on from its weights alone, as a new run: "
            f"{_from_weights(state.checkpoint)}"
        )
    return _take_up_rng(engine, state, seed)


def _take_up_rng(engine: Engine, state: TrainerState, seed: int) -> list[str]:
    ranks = engine.ranks
    rng.seed_rank(seed, ranks.rank, state.step)
    if state.world != ranks.world:
        return [f"ranks    {ranks.world}, {state.world} before: their random numbers are seeded anew"]
    rng.restore(read_rng(state, ranks.rank), engine.device)
    return []


def put_in_order(folder: Path, step: int, evaluation: Mapping[str, Any]) -> list[str]:
    """What came after the checkpoint of this step makes way for what comes now. evaluation: its."""
    notes, checkpoints = [], folder / "checkpoints"
    aside = set_aside(checkpoints, step)
    if aside:
        notes.append(f"aside    checkpoints after step {step} are now {', '.join(aside)}")
    if step:
        point_latest(step_folder(checkpoints, step))
        notes += put_best_in_order(checkpoints, evaluation)
    for name in ("metrics.jsonl", SAMPLES):
        dropped = cut_lines(folder / name, step)
        if dropped:
            moved = dropped_of(folder / name).name
            notes.append(f"dropped  {dropped} lines of {name} after step {step}, moved to {moved}")
    return notes


def put_best_in_order(checkpoints: Path, evaluation: Mapping[str, Any]) -> list[str]:
    """Let `best` name what was the best up to the checkpoint; a later one was taken as such, or is set aside."""
    forget_best(checkpoints)
    best = evaluation["step"] if evaluation.get("kept") else 0
    target = step_folder(checkpoints, best)
    if target.is_dir():
        point_best(target)
    elif best:
        return [f"best     step {best} was the best so far, and {target} is gone"]
    return []


# ---------------------------------------------------------------- what may differ


def constants(config: SftConfig, data: DataReport, steps: int) -> dict[str, Any]:
    """What every checkpoint says of its run, for the comparison with the run that goes on from it."""
    return {
        "steps": steps,
        "config": to_dict(config),
        "data": {"documents": data.documents, "digest": data.digest},
        "model": {"sha256": model_fingerprint(config)},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], schema: type) -> Iterator[tuple[str, tuple[str, str]]]:
    """(key, (before, now)) of the keys that differ; one that a config does not read has its default."""
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


def refused(changed: Mapping[str, tuple[str, str]], more: Sequence[str] = ()) -> list[str]:
    """What may not change, of what has; more: keys and sections that may, beside MAY_CHANGE."""
    may = (*MAY_CHANGE, *_SCHEDULED, *more)
    return [
        f"{key}: {before} -> {now}: it changes what is trained, and how"
        for key, (before, now) in changed.items()
        if key in MAY_NOT or not any(key == name or key.startswith(name + ".") for name in may)
    ]


def _rates_changed(content: Mapping[str, Any], config: SftConfig, steps: int) -> list[str]:
    """Longer runs and other schedules are the same training as long as the steps that are done had the same rates."""
    old, before, done = content["config"], content["steps"], content["updates"]
    schedule, lr = ScheduleConfig(**old["schedule"]), old["optimizer"]["lr"]
    if steps < content["step"]:
        return [f"train.steps, train.epochs: a run of {steps} steps ends before step {content['step']}"]
    for update in range(1, done + 1):
        was = learning_rate(update, before, lr, schedule)
        now = learning_rate(update, steps, lr, config.schedule)
        if was != now:
            return [
                f"the learning rate of update {update} was {was:.6g} in a run of {before} steps with schedule.name="
                f"{schedule.name}, and would be {now:.6g} in one of {steps} with {config.schedule.name}: what is done "
                "cannot be planned anew. A run grows with schedule.name=constant, or with wsd before its decay, and "
                "schedule.warmup_steps instead of warmup_ratio"
            ]
    return []


def _contents_changed(state: TrainerState, config: SftConfig, data: DataReport) -> list[str]:
    problems = []
    if state.content["data"]["digest"] != data.digest:
        before = state.content["data"]["documents"]
        problems.append(
            f"the data ({data.path}) gives other documents than before ({data.documents:,}; {before:,} before): "
            "the place in the data would mean nothing"
        )
    if state.content["model"]["sha256"] != model_fingerprint(config):
        what = "config.json or the weights" if config.lora.on else "config.json"
        problems.append(f"model.path: {what} of {config.model.path} differ from before")
    return problems


def _version_notes(before: Mapping[str, str | None]) -> list[str]:
    now = versions()
    differing = [f"{name} {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]
    return [f"versions {'; '.join(differing)}: results may differ in their last bits"] if differing else []


def _nothing_whole(folder: Path, skipped: Sequence[str]) -> str:
    with_weights = [
        step_folder(folder / "checkpoints", step)
        for step in reversed(whole_steps(folder / "checkpoints"))
        if any((step_folder(folder / "checkpoints", step) / name).exists() for name in ("config.json", ADAPTER))
    ]
    advice = f"\nTo go on from weights alone, as a new run: {_from_weights(with_weights[0])}" if with_weights else ""
    return f"--resume {folder}: no checkpoint can be resumed from:\n" + "\n".join(f"  {t}" for t in skipped) + advice


def _from_weights(checkpoint: Path) -> str:
    config = checkpoint.parent.parent / "config.yaml"
    if (checkpoint / ADAPTER).is_file():  # what the adapter says itself cannot be set beside it
        unset = " ".join(f"lora.{leaf}=null" for leaf in ("rank", "alpha", "rslora", "targets", "modules_to_save"))
        return f"weft sft {config} lora.path={checkpoint} {unset} run.dir=NEW"
    return f"weft sft {config} model.path={checkpoint} model.init=pretrained run.dir=NEW"
