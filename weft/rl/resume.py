"""`weft rl --resume RUN`: where a run resumes, which keys may differ, and which files are moved aside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.checkpoint.resume import (
    find_newest,
    from_weights,
    no_complete_checkpoint,
    other_training,
    read_or_reason,
    resumed_notes,
)
from weft.checkpoint.retention import complete_steps, point_latest, set_aside, step_folder
from weft.checkpoint.state import RL_RUN, TrainerState
from weft.config import to_dict
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.inference.records import EVALUATIONS, FOLDER, cut_rollouts, has_routes, read_rollouts, rollout_files
from weft.models import hf
from weft.models.cost import expert_counts
from weft.observe import resume
from weft.observe.folder import cut_lines, write_config
from weft.observe.resume import model_fingerprint
from weft.rl.prompts import Prompts
from weft.rl.reference_critic import CRITIC, steps_of_all
from weft.rl.state import RlPlan, RlRun, RlStart

# Keys that a resumed run may change: they affect how it computes or generates, not what it learns.
MAY_CHANGE = (
    "cluster", "rl.reward_timeout", "rl.reward_workers", "rl.environment_timeout", "rl.agent_timeout",
    "rl.agents_at_once", "rl.agent_host", "rl.agent_port",
    *(f"rollout.{leaf}" for leaf in ("engine", "num_engines", "tp", "gpu_memory_utilization", "python", "engine_kwargs",
        "timeout", "sync")),
    *(f"rollout.{leaf}" for leaf in ("transport", "bucket_mb", "verify_every", "kv_cache_tokens")),
    *(f"{section}.{leaf}" for section in ("critic", "reward_model") for leaf in resume.HOW_IT_COMPUTES),
)  # fmt: skip


def constants(run: RlRun) -> dict[str, Any]:
    """The constant part of a checkpoint's state. A resumed run must match it."""
    prompts = run.task.prompts
    common = resume.constants(run.config, len(prompts), prompts.digest, run.plan.steps)
    return common | {"replayed": bool(run.replayed)}


def find_start(config: RlConfig, folder: Path, prompts: Prompts, plan: RlPlan, *, replayed: bool) -> RlStart:
    """The start at the newest complete checkpoint of RUN, or at step 1 without one. UserError if config or data differ
    from that training, or if all checkpoints are damaged. replayed: whether rollouts are read from files (--replay)."""
    checkpoints = folder / "checkpoints"
    state, skipped = find_newest(checkpoints, steps_of_all(folder), _judge_checkpoint)
    notes = [f"skipped  {text}" for text in skipped]
    if state is None:
        if skipped:
            raise UserError(no_complete_checkpoint(folder, skipped, "rl"))
        return RlStart(notes=(f"resumed  {folder} has no checkpoint yet: from step 1",))
    content = state.content
    changed = dict(resume.changes(content["config"], to_dict(config), RlConfig))
    problems = [
        *resume.refused_changes(changed, MAY_CHANGE),
        *resume.rates_changed(content, config, plan.steps, done=content["updates"]),
        *_contents_changed(content, config, prompts, replayed),
    ]
    if problems:
        raise UserError(other_training(folder, state, problems, "rl"))
    return RlStart(
        step=state.step,
        updates=content["updates"],
        rollout=content["rollout"],
        taken=content["taken"],
        bad_in_a_row=content["bad_in_a_row"],
        empty_in_a_row=content["empty_in_a_row"],
        flat_in_a_row=content["flat_in_a_row"],
        summary=content["summary"],
        seconds=content["seconds"],
        state=state,
        notes=(*notes, *resumed_notes(state, plan.steps, changed)),
    )


def _contents_changed(content: Mapping[str, Any], config: RlConfig, prompts: Prompts, replayed: bool) -> list[str]:
    problems = []
    if content["replayed"] and not replayed:
        problems.append("the run was trained from recorded rollouts: name their folder again (--replay)")
    if replayed and not content["replayed"]:
        problems.append("--replay: the run sampled its rollouts so far: remove --replay")
    if content["data"]["digest"] != prompts.digest:
        problems.append("the data gives other prompts than before, so the run cannot continue at its position in them")
    if content["model"]["sha256"] != model_fingerprint(config):
        problems.append(f"model.path: config.json of {config.model.path} differs from before")
    return problems


def find_collected(folder: Path) -> RlStart:
    """The start of `--rollout-only`: after the last complete rollout step of RUN. UserError if the run has trained."""
    if steps := complete_steps(folder / "checkpoints"):
        raise UserError(
            f"--resume {folder} --rollout-only: this run has trained. For rollouts of its weights start another run: "
            f"{from_weights(step_folder(folder / 'checkpoints', steps[-1]), 'rl')} --rollout-only"
        )
    files, metrics, starts, skipped = rollout_files(folder / FOLDER), folder / "metrics.jsonl", [RlStart()], list[str]()
    for text in metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []:
        line = json.loads(text) if text.endswith("\n") else {}
        if line.get("rollout") != len(starts) or line["rollout"] not in files:
            break
        starts.append(RlStart(rollout=line["rollout"], taken=line["taken"]))
    while starts[-1].rollout and (problem := _unreadable(files[starts[-1].rollout])):
        skipped.append(f"skipped  {problem}")
        starts.pop()
    return replace(starts[-1], notes=(*skipped, f"resumed  after rollout step {starts[-1].rollout}"))


def _unreadable(rollouts: Path) -> str:
    """Why a file of rollouts cannot be read; "" if it can."""
    try:
        read_rollouts(rollouts)
    except UserError as error:
        return str(error)
    return ""


def prepare_folder(config: RlConfig, folder: Path, start: RlStart) -> RlStart:
    """Move aside all files in RUN that are newer than this start, and write the config; returns the start with
    messages."""
    if start.step or not start.rollout:
        notes = resume.set_aside_later(folder, start.step, {})
        _set_aside_critic(folder / CRITIC / "checkpoints", start.step)
    else:  # --rollout-only: lines are numbered by rollout steps, and there are no checkpoints
        cut_lines(folder / "metrics.jsonl", start.rollout)
        notes = []
    for after, into in ((start.rollout, FOLDER), (start.step, EVALUATIONS)):
        if aside := cut_rollouts(folder, after, into):
            notes.append(f"aside    {len(aside)} files of {into} after step {after} are now in {into}/dropped")
    write_config(config, folder)
    return replace(start, notes=(*start.notes, *notes))


def _judge_checkpoint(checkpoint: Path) -> tuple[TrainerState | None, str]:
    """(state, reason why it cannot be resumed) of the policy's checkpoint and, with separate ranks, the critic's."""
    state, reason = read_or_reason(checkpoint, RL_RUN)
    critic_folder = checkpoint.parent.parent / CRITIC / "checkpoints" / checkpoint.name
    if state is None or not critic_folder.is_dir():
        return state, reason
    critic, reason = read_or_reason(critic_folder, {})
    return (state, "") if critic is not None else (None, f"its critic, {critic_folder}: {reason}")


def _set_aside_critic(checkpoints: Path, step: int) -> None:
    """Set aside later checkpoints of a critic with separate ranks."""
    set_aside(checkpoints, step)
    if step_folder(checkpoints, step).is_dir():
        point_latest(step_folder(checkpoints, step))


def notes_on_replay(config: RlConfig, replayed: Sequence[Path]) -> list[str]:
    """Warnings before training from recorded rollouts."""
    experts, _ = expert_counts(hf.read_config(config.model.path).get_text_config())
    if not replayed or experts == 1 or has_routes(replayed[0]):
        return []
    return ["replay   without routes, because only --rollout-only records them: routers choose experts anew"]
