"""Resuming: chooses a checkpoint and loads it into an engine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from weft.checkpoint import rng
from weft.checkpoint.retention import STATE_FILE, TRAINER_STATE, complete_steps, step_folder
from weft.checkpoint.state import (
    DamagedError,
    TrainerState,
    check_contents,
    check_schema,
    load_state,
    raise_as_damage,
    read_rng,
    read_state,
)
from weft.config.yaml12 import override
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.launch.process import Ranks
from weft.launch.summary import versions
from weft.parallel.shards.adapter_files import CONFIG as ADAPTER
from weft.parallel.shards.digests import DIGESTS, check_digests

T = TypeVar("T")
StateReader = Callable[[Path], tuple[TrainerState | None, str]]


def find_newest(checkpoints: Path, steps: Sequence[int], judge: StateReader) -> tuple[TrainerState | None, list[str]]:
    """The newest usable checkpoint, and the reasons why newer checkpoints were skipped. judge: returns a checkpoint's
    state, or the reason why it is damaged."""
    skipped: list[str] = []
    for step in reversed(steps):
        folder = step_folder(checkpoints, step)
        state, reason = judge(folder)
        if state is not None and state.step == step:
            return state, skipped
        reason = reason if state is None else f"its {STATE_FILE} is of step {state.step}"
        skipped.append(f"{folder}: {reason}")
    return None, skipped


def read_or_reason(checkpoint: Path, parts: Mapping[str, Any]) -> tuple[TrainerState | None, str]:
    """A judge for a single process, which reads all files. parts: as in `read_verified`."""
    try:
        return read_verified(checkpoint, 0, 1, parts), ""
    except DamagedError as error:
        return None, str(error)


def read_verified(
    checkpoint: Path, rank: int, world: int, parts: Mapping[str, Any], *, weights: bool = True
) -> TrainerState:
    """The trainer state of a checkpoint, after verifying this rank's share of its files. Raises DamagedError.

    Compares files, including those of further engines (a critic), with their checksums, and weights with their digests.
    parts: the schema of the run's part of state.json. weights: False if the weights are already verified.
    """
    state = read_state(checkpoint)
    check_schema(state.content, parts)
    if "updates" in parts and state.content["updates"] > state.step:
        raise DamagedError(f"{STATE_FILE} records {state.content['updates']} updates in {state.step} steps")
    for part in [state, *(read_state(folder.parent) for folder in sorted(checkpoint.glob(f"*/{TRAINER_STATE}")))]:
        check_contents(part, rank, world)
        if weights and os.path.lexists(part.checkpoint / DIGESTS):
            raise_as_damage(partial(check_digests, part.checkpoint, rank, world))
    return state


def run_on_all_ranks(function: Callable[[], T], ranks: Ranks) -> tuple[T | None, str]:
    """(Result of `function`, ""). If it raises DamagedError on any rank, (None, the first rank's reason) on all ranks.
    Collective."""
    result, local_reason = None, None
    try:
        result = function()
    except DamagedError as error:
        local_reason = str(error)
    reasons: list[str | None] = [None] * ranks.world
    dist.all_gather_object(reasons, local_reason, group=ranks.group)
    reason = next((text for text in reasons if text is not None), None)
    return (result, "") if reason is None else (None, reason)


def restore_engine(
    engine: Engine,
    state: TrainerState,
    seed: int,
    further_engines: Mapping[str, Engine] | None = None,
    *,
    command: str = "sft",
) -> list[str]:
    """Restore masters, moments and generators from a checkpoint; returns notes for the user. Collective.

    further_engines: folder -> further engine of the checkpoint (a critic). command: weft's command, for messages.
    Raises UserError, on all ranks, if the checkpoint is damaged.
    """

    def load() -> bool:
        load_state(engine, state)
        for folder, further in (further_engines or {}).items():
            load_state(further, read_state(state.checkpoint / folder))
        return True

    loaded, reason = run_on_all_ranks(load, engine.ranks)
    if loaded is None:
        raise UserError(
            f"cannot resume from {state.checkpoint}: {reason}. To start a new run from its weights only: "
            f"{from_weights(state.checkpoint, command)}"
        )
    return _take_up_rng(engine, state, seed)


def _take_up_rng(engine: Engine, state: TrainerState, seed: int) -> list[str]:
    ranks, before = engine.ranks, state.content["mesh"]
    rng.seed_rank(seed, engine.mesh.loss_rank, state.step)
    if state.world != ranks.world:
        return [f"ranks    {ranks.world}, {state.world} in the checkpoint: random number generators are seeded again"]
    for axis, size in (("tp", engine.mesh.tp_size), ("pp", engine.mesh.pp_size)):
        if size != before.get(axis, 1):  # ranks with the same documents draw the same numbers
            sizes = f"{size}, {before.get(axis, 1)} in the checkpoint"
            return [f"mesh.{axis}  {sizes}: random number generators are seeded again"]
    rng.restore(read_rng(state, ranks.rank), engine.device)
    return []


# ---------------------------------------------------------------- messages


def resumed_notes(state: TrainerState, steps: int, changed: Mapping[str, tuple[str, str]]) -> list[str]:
    """Lines about the step at which a run resumes, and about changed settings."""
    notes = [f"resumed  step {state.step} of {steps}, from {state.checkpoint}"]
    notes += [f"changed  {key}: {before} -> {now}" for key, (before, now) in changed.items()]
    before, now = state.content["versions"], versions()
    differing = [f"{name} {before.get(name)}, now {now[name]}" for name in now if before.get(name) != now[name]]
    return notes + ([f"versions {'; '.join(differing)}: results may differ in their last bits"] if differing else [])


def no_complete_checkpoint(folder: Path, skipped: Sequence[str], command: str) -> str:
    """The error if RUN has no checkpoint from which to resume."""
    with_weights = [
        step_folder(folder / "checkpoints", step)
        for step in reversed(complete_steps(folder / "checkpoints"))
        if any((step_folder(folder / "checkpoints", step) / name).exists() for name in ("config.json", ADAPTER))
    ]
    advice = ""
    if with_weights:
        advice = f"\nTo start a new run from the weights only: {from_weights(with_weights[0], command)}"
    return (
        f"--resume {folder}: weft cannot resume from any checkpoint:\n" + "\n".join(f"  {t}" for t in skipped) + advice
    )


def other_training(folder: Path, state: TrainerState, problems: Sequence[str], command: str) -> str:
    """The error if a config differs from that of the run in a key that a resumed run may not change."""
    return (
        f"--resume {folder}: this config differs from the one that trained up to step {state.step}:\n"
        + "\n".join(f"  {problem}" for problem in problems)
        + "\nSet these keys back, or start a new run from the weights only: "
        + from_weights(state.checkpoint, command)
    )


def from_weights(checkpoint: Path, command: str) -> str:
    """The command that starts a new run from a checkpoint's weights."""
    config = shlex.quote(str(checkpoint.parent.parent / "config.yaml"))
    if (checkpoint / ADAPTER).is_file():  # keys that the adapter defines cannot be set with it
        unset = " ".join(f"lora.{leaf}=null" for leaf in ("rank", "alpha", "rslora", "targets", "modules_to_save"))
        return f"weft {command} {config} {override('lora.path', str(checkpoint))} {unset} run.dir=NEW"
    return f"weft {command} {config} {override('model.path', str(checkpoint))} model.init=pretrained run.dir=NEW"
