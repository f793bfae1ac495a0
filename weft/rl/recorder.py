"""The recorded results of rollout steps: lines of metrics.jsonl, Parquet files in RUN/rollouts, and summary.json."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.config import resolve_mesh, to_dict
from weft.config.conditions import KEEPS_ALL
from weft.config.devices import device_lines
from weft.config.rl_schema import RlConfig, RolloutConfig
from weft.engine.metrics import MetricsFile
from weft.inference.base import Synced
from weft.inference.records import EVALUATIONS, write_rollouts
from weft.inference.types import Sample
from weft.launch.summary import Phases, RunSummary
from weft.models.lora import samples_separate
from weft.observe.closing import print_closing
from weft.observe.hooks import OnStep
from weft.observe.opening import ModelOpening, few_rollout_steps, show_opening
from weft.observe.recorder import BadSteps
from weft.observe.starts import note_end, note_start
from weft.observe.system import SYSTEM, SystemMonitor
from weft.observe.trackers import Trackers
from weft.rl.agents.agents import Agents
from weft.rl.corrections import note_on_staleness
from weft.rl.documents import is_trained
from weft.rl.evaluate import EvaluationResult
from weft.rl.state import RlPlan, RlRun, RlStart, RolloutStep
from weft.rl.stop_conditions import CutSamples, EmptySteps, FlatSteps
from weft.terminal import counted, say


@dataclass
class RlRecorder:
    """Writes the results of rollout steps. As a context manager, it samples this machine (track.system), records how
    the run ends, and finishes the trackers. on_step: called with the line of each optimizer step. cuda: whether on
    GPUs."""

    config: RlConfig
    folder: Path
    start: RlStart
    on_step: OnStep | None = None
    cuda: bool = False

    def __post_init__(self) -> None:
        self.file = MetricsFile(self.folder / "metrics.jsonl")
        self.summary = RunSummary(model=self.config.model.path, data=str(self.config.data.path or "several sources"))
        self.summary.restore(self.start.summary)
        done = self.start.step or self.start.rollout  # lines of --rollout-only are of rollout steps
        self.trackers = Trackers(to_dict(self.config), self.config.track, self.folder, done)
        self.system: SystemMonitor | None = None
        if self.config.track.system:
            path, seconds = self.folder / SYSTEM, self.config.track.system_seconds
            self.system = SystemMonitor(path, seconds, None if self.cuda else 0, done, self.trackers.log)
        self.bad = BadSteps(self.config.train.max_nonfinite, self.start.bad_in_a_row)
        self.empty = EmptySteps(self.config.train.max_nonfinite, self.start.empty_in_a_row)
        self.flat = FlatSteps(self.start.flat_in_a_row)
        self.cut = CutSamples(self.config.rollout.max_new_tokens)
        self._saved_at = time.monotonic()

    def __enter__(self) -> RlRecorder:
        for note in self.trackers.notes:
            say(note)
        if self.system is not None:
            self.system.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.system is not None:
            self.system.__exit__(kind, error, trace)
        self.trackers.finish(failed=error is not None)
        note_end(self.folder, error)

    def record(
        self,
        step: RolloutStep,
        lines: Sequence[Mapping[str, object]],
        synced: Synced,
        evaluated: EvaluationResult | None,
    ) -> list[dict[str, object]]:
        """Record a rollout step. lines: of its optimizer steps. Returns the written lines; the last one also has the
        metrics of the rollouts."""
        samples = step.samples
        write_rollouts(self.folder, step.number, step.groups)
        metrics = step.metrics | {f"seconds/{name}": value for name, value in step.phases.seconds.items()}
        metrics |= {
            "sync/seconds": synced.seconds,
            "sync/mb": synced.bytes / 1e6,
            "sync/gb_per_second": synced.bytes / 1e9 / max(synced.seconds, 1e-9),
            **{name: value for name, value in synced.extra.items() if name in ("sync/changed", "sync/sent_gb")},
        }
        metrics |= {} if evaluated is None else evaluated.metrics
        untrained = sum(not is_trained(sample, self.config) for sample in samples)
        unused = metrics.get("rollout/dropped_samples", 0.0)
        unused += metrics.get("rollout/replaced", 0.0) * self.config.rl.group_size
        metrics["rollout/untrained"] = float(untrained)
        metrics["rollout/keep_rate"] = (len(samples) - untrained) / max(1.0, len(samples) + unused)
        written = [dict(line) for line in lines]
        for line in written:
            line["rollout"] = step.number
        written[-1] |= length_metrics(samples) | metrics
        for line in written:
            self.file.write(line)
            if self.system is not None:
                self.system.step = int(str(line["step"]))
            self.trackers.log(line)
            self.summary.add(line)
            if self.on_step is not None:
                self.on_step(line)
        return written

    def record_rollout(self, step: RolloutStep) -> dict[str, object]:
        """Record a rollout step without training; returns its line."""
        write_rollouts(self.folder, step.number, step.groups, routes=True)  # the files are for --replay
        seconds = {f"seconds/{name}": value for name, value in step.phases.seconds.items()}
        line: dict[str, object] = {
            "step": step.number,
            "rollout": step.number,
            "taken": step.taken,
            **length_metrics(step.samples),
        }
        line |= {**step.metrics, **seconds}
        self.file.write(line)
        if self.system is not None:
            self.system.step = step.number
        self.trackers.log(line)
        return line

    def record_evaluation(self, step: int, evaluated: EvaluationResult | None) -> list[str]:
        """Write an evaluation's answers to RUN/evaluations; returns the lines to print. Step 0 also gets a line in
        metrics.jsonl."""
        if evaluated is None:
            return []
        groups = [group for part in (evaluated.greedy, evaluated.drawn) for named in part.values() for group in named]
        write_rollouts(self.folder, step, groups, EVALUATIONS)
        if not step:
            line: dict[str, object] = {"step": 0, **evaluated.metrics}
            self.file.write(line)
            self.trackers.log(line)
            self.summary.add_evaluation(line)
        return [evaluated.line(step)]

    def due(self, rollout: int, plan: RlPlan) -> bool:
        """Whether to save after this rollout step: one of its optimizer steps is a multiple of checkpoint.every, or the
        last save is longer ago than checkpoint.every_minutes."""
        interval, minutes = self.config.checkpoint.every, self.config.checkpoint.every_minutes
        last = rollout * plan.per_rollout
        by_steps = interval > 0 and last // interval > (last - plan.per_rollout) // interval
        return by_steps or (minutes is not None and time.monotonic() - self._saved_at >= 60.0 * minutes)

    def stop_if_unproductive(self, step: RolloutStep, lines: Sequence[Mapping[str, object]]) -> list[str]:
        """Raise UserError after train.max_nonfinite consecutive steps that were not finite, or that had no sample to
        train. Returns lines to print after consecutive steps whose advantages were all zero."""
        for line in lines:
            self.bad.count(line, "Lower optimizer.lr, or inspect the rollouts with `weft rollouts`.")
        self.empty.count(step.samples, self.config)
        return [*self.flat.count(step.samples, self.config), *self.cut.count(step.samples)]

    def progress(self, step: RolloutStep, updates: int, phases: Phases) -> dict[str, Any]:
        """The run's part of a checkpoint that is saved now. Also syncs metrics.jsonl to disk."""
        self.file.sync()
        self._saved_at = time.monotonic()
        return {
            "rollout": step.number,
            "taken": step.taken,
            "updates": updates,
            "bad_in_a_row": self.bad.in_a_row,
            "empty_in_a_row": self.empty.in_a_row,
            "flat_in_a_row": self.flat.in_a_row,
            "summary": self.summary.counts(),
            "seconds": dict(phases.seconds),
        }

    def finish(self, phases: Phases, saved: Path, stopped: int) -> None:
        """Write summary.json and print the outcome. stopped: number of the signal that ended the run, or 0."""
        name = signal.Signals(stopped).name if stopped else None
        self.summary.write(self.folder / "summary.json", phases, saved, name)
        print_closing(self.summary.content(phases, saved, name), self.folder)


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Statistics of completion lengths, under TRL's names. `terminated`: completions with finish `end`."""
    lengths = [sample.length for sample in samples]
    ended = [sample.length for sample in samples if sample.finish == "end"]
    metrics = {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(sample.finish == "length" for sample in samples) / len(samples),
    }
    if ended:
        metrics["completions/mean_terminated_length"] = sum(ended) / len(ended)
    return metrics


def truncation_line(rollout: RolloutConfig) -> str:
    """A line about the effect of rollout.top_p, top_k and min_p on training."""
    cut = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p}
    keys = ", ".join(f"{name} {value:g}" for name, value in cut.items() if value != KEEPS_ALL[name])
    text = f"with {keys}: excluded tokens are never sampled, but the policy is trained as if they could be"
    if rollout.allow_truncated:
        text += f"; {rollout.engine} does not report the kept probability mass, which biases the correction"
    return f"{text} (metric sampling/kept_share)"


def note_rl_start(run: RlRun) -> None:
    """Records the start of a run in RUN/starts.jsonl."""
    config, actors, start = run.config, run.actors, run.start
    ranks = len(actors.trainers)
    note_start(
        run.run_lock.folder,
        start.step or start.rollout,
        device=run.device_name,
        ranks=ranks,
        mesh=resolve_mesh(config.mesh, ranks).named,
        engines="" if actors.engines is None else f"{len(actors.engines)} {config.rollout.engine}",
    )


def print_rl_opening(run: RlRun, model: ModelOpening, notes: Sequence[str]) -> None:
    """Print the first lines of the run, and write all of them to RUN/opening.txt. model: the trainers' description of
    the model. notes: further lines."""
    config, plan = run.config, run.plan
    rl, rollout = config.rl, config.rollout
    like = "" if rl.preset is None else f" like {rl.preset}"
    bounds = [(config.cluster.engines["min"], config.cluster.engines["max"])] if config.cluster.engines else []
    rewards = [*rl.reward, *(f"those of {giver}" for giver in (rl.environment, rl.agent) if giver is not None)]
    lines = [
        f"run      {run.run_lock.folder}",
        f"prompts  {run.task.prompts}",
        f"template {run.task.prompts.template_use()}",
        *run.task.held_out.leaks(run.task.prompts),
        *run.start.notes,
        *notes,
        f"rl       {rl.algorithm}{like}: {counted(plan.rollouts, 'rollout step')} of "
        f"{counted(rl.prompts_per_step, 'prompt')} x {counted(rl.group_size, 'sample')}, "
        f"{counted(plan.per_rollout, 'optimizer step')} each; rewards {', '.join(rewards)}",
        *few_rollout_steps(config, plan.rollouts, run.task.stream.in_epoch),
        f"rollout  {rollout.engine} engine; up to {rollout.max_prompt_tokens} + {rollout.max_new_tokens} tokens, "
        f"temperature {rollout.temperature:g}{_on_adapters(config)}",
        *device_lines(config),
        *(f"engines  {least} to {most}: others join when there is room" for least, most in bounds),
        *note_on_staleness(config),
    ]
    if isinstance(run.task.episodes, Agents):
        agents = f"{rl.agents_at_once} at once, up to {counted(rl.max_turns, 'call')} each"
        lines.append(f"agent    {rl.agent}, {agents}, to {run.task.episodes.endpoint.base_url}")
    if rollout.truncated:
        lines.append(f"sampled  {truncation_line(rollout)}")
    show_opening(lines, model, run.run_lock.folder, run.detail)


def _on_adapters(config: RlConfig) -> str:
    if not config.lora.on:
        return ""
    separate = samples_separate(config.lora) or config.rollout.engine == "vllm"
    return "; adapters separate from the base" if separate else "; adapters merged into the base"
