"""`weft rl --resume RUN`: which checkpoint a run goes on from, and what may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoint.retention import step_folder, whole_steps
from weft.checkpoint.state import DamagedError, TrainerState, read_state
from weft.config import to_dict
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.recipes.identity import model_fingerprint
from weft.recipes.resume import changes, refused
from weft.rl.prompts import Prompts

if TYPE_CHECKING:
    from weft.recipes.rl import Plan, Run

# Keys that change how a run computes or generates, not what it learns.
MAY_CHANGE = ("cluster", "rollout.engine")


@dataclass(frozen=True)
class RlStart:
    """Where a run begins. step: optimizer steps that are done; rollout: rollout steps; taken: prompts."""

    step: int = 0
    rollout: int = 0
    taken: int = 0
    bad_in_a_row: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    state: TrainerState | None = None
    notes: tuple[str, ...] = ()


FRESH = RlStart()


def constants(run: Run) -> dict[str, Any]:
    """What every checkpoint says of its run, for the comparison with the run that goes on from it."""
    return {
        "steps": run.plan.steps,
        "config": to_dict(run.config),
        "data": {"documents": len(run.task.prompts), "digest": run.task.prompts.digest},
        "model": {"sha256": model_fingerprint(run.config)},
    }


def find_start(config: RlConfig, folder: Path, prompts: Prompts, plan: Plan) -> RlStart:
    """The newest whole checkpoint of RUN, after checking that this config goes on with the same training."""
    state, skipped = _newest(folder / "checkpoints")
    notes = [f"skipped  {text}" for text in skipped]
    if state is None:
        if skipped:
            raise UserError(f"--resume {folder}: no checkpoint can be resumed from:\n" + "\n".join(skipped))
        return RlStart(notes=(f"resumed  {folder} has no checkpoint yet: from step 1",))
    content = state.content
    changed = dict(changes(content["config"], to_dict(config), RlConfig))
    problems = refused(changed, MAY_CHANGE)
    if content["data"]["digest"] != prompts.digest:
        problems.append("the data gives other prompts than before: the place in them would mean nothing")
    if content["model"]["sha256"] != model_fingerprint(config):
        problems.append(f"model.path: config.json of {config.model.path} differs from before")
    if plan.steps < state.step:
        problems.append(f"train.steps, train.epochs: a run of {plan.steps} steps ends before step {state.step}")
    if problems:
        raise UserError(
            f"--resume {folder}: this config would go on with another training than the one up to step {state.step}:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nSet them back, or start a new run from the weights alone: "
            f"weft rl {folder}/config.yaml model.path={state.checkpoint} run.dir=NEW"
        )
    notes.append(f"resumed  step {state.step} of {plan.steps}, from {state.checkpoint}")
    notes += [f"changed  {key}: {before} -> {now}" for key, (before, now) in changed.items()]
    return RlStart(
        step=state.step,
        rollout=content["rollout"],
        taken=content["taken"],
        bad_in_a_row=content["bad_in_a_row"],
        summary=content["summary"],
        seconds=content["seconds"],
        state=state,
        notes=tuple(notes),
    )


def _newest(checkpoints: Path) -> tuple[TrainerState | None, list[str]]:
    skipped: list[str] = []
    for step in reversed(whole_steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        try:
            return read_state(folder), skipped
        except DamagedError as error:
            skipped.append(f"{folder}: {error}")
    return None, skipped
