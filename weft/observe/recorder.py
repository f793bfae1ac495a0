"""Records steps: their lines in metrics.jsonl, summary.json, and the run's part of a checkpoint's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.config import resolve_mesh, to_dict
from weft.config.run_schema import TrackConfig
from weft.config.schema import SftConfig
from weft.data.order import SampledStep
from weft.engine.engine import Engine, StepResult
from weft.engine.metrics import MetricsFile
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError
from weft.launch.machine import device_name
from weft.launch.summary import Phases, RunSummary
from weft.launch.timing import StepTimes
from weft.models.flops import Throughput, peak_flops
from weft.observe.closing import print_closing
from weft.observe.resume import Start
from weft.observe.starts import note_end, note_start
from weft.observe.system import SYSTEM, SystemMonitor
from weft.observe.trackers import Trackers
from weft.parallel.fsdp import time_collectives
from weft.parallel.memory import local_ranks
from weft.terminal import say


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of an optimizer step. metrics: reduced over all ranks. seconds: wall time of the step."""

    plan: StepPlan
    metrics: Mapping[str, float | None]
    result: StepResult
    lr: float
    seconds: float


def step_line(
    number: int, epoch: int, outcome: StepOutcome, throughput: Throughput, memory_gib: float
) -> dict[str, object]:
    """The line of metrics.jsonl for step `number`. memory_gib: peak memory of the fullest rank."""
    plan, result, metrics = outcome.plan, outcome.result, dict(outcome.metrics)
    totals, loss = plan.totals, metrics.pop("loss")
    line: dict[str, object] = {
        "step": number,
        "epoch": epoch,
        "loss": None if result.skipped else loss,
        "grad_norm": None if result.skipped else result.grad_norm,
        "lr": None if result.skipped else outcome.lr,
        "documents": totals.documents,
        "tokens": totals.tokens,
        "tokens_forwarded": plan.tokens_forwarded,
        "loss_tokens": totals.loss_tokens,
        "micro_batches": plan.micro_batches,
        "fill": plan.fill,
        "utilisation": plan.utilisation,
        "seconds": outcome.seconds,
        "tokens_per_second": totals.tokens / outcome.seconds,
        "mfu": throughput.mfu(plan.flops, outcome.seconds),
        "memory_gib": memory_gib,
    }
    if result.loss_scale is not None:
        line["loss_scale"] = result.loss_scale
    if result.overflow:
        line["overflow"] = True
    return line | ({"skipped": True, "reason": result.reason} if result.skipped else metrics)


@dataclass
class BadSteps:
    """Counts consecutive non-finite steps. most: train.max_nonfinite."""

    limit: int
    in_a_row: int = 0

    def count(self, line: Mapping[str, object], advice: str) -> None:
        """Counts one step by its line of metrics.jsonl. Ignores steps that were skipped because the loss scale was too
        large, or because they had nothing to train. Raises FloatingPointError at `limit` consecutive non-finite
        steps."""
        if line.get("overflow") or line.get("empty"):
            return
        self.in_a_row = self.in_a_row + 1 if line.get("skipped") else 0
        if self.in_a_row >= self.limit:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row were not finite (train.max_nonfinite). Last: {line.get('reason')}. "
                f"{advice}"
            )


@dataclass
class RunRecorder:
    """Writes metrics.jsonl and summary.json. The context manager records the start and its end in starts.jsonl,
    measures the phases of steps (track.timing), samples the machine (track.system), and finishes the trackers."""

    config: SftConfig
    engine: Engine
    folder: Path
    summary: RunSummary
    start: Start

    def __post_init__(self) -> None:
        self.file = MetricsFile(self.folder / "metrics.jsonl") if self.engine.ranks.is_first else None
        self.throughput = Throughput(self.engine.ranks.world, peak_flops(self.engine.ranks.device))
        self.bad = BadSteps(self.config.train.max_nonfinite, self.start.bad_in_a_row)
        self.summary.restore(self.start.summary)
        self.times = StepTimes(self.engine.device, self.engine.ranks.world) if self.config.track.timing else None
        track = self.config.track if self.engine.ranks.is_first else TrackConfig()
        self.trackers = Trackers(to_dict(self.config), track, self.folder, self.start.step)
        self.system: SystemMonitor | None = None
        if self.engine.ranks.is_first and track.system:
            gpus = local_ranks(self.engine.ranks.world) if self.engine.device.type == "cuda" else 0
            path, step = self.folder / SYSTEM, self.start.step
            self.system = SystemMonitor(path, track.system_seconds, gpus, step, self.trackers.log)

    def __enter__(self) -> RunRecorder:
        for note in self.trackers.notes:
            say(note)
        if self.engine.ranks.is_first:
            world = self.engine.ranks.world
            mesh = resolve_mesh(self.config.mesh, world).named
            device = device_name(self.engine.device.type)
            note_start(self.folder, self.start.step, device=device, ranks=world, mesh=mesh)
        if self.system is not None:
            self.system.__enter__()
        if self.times is not None:
            self.times.open()
            if self.engine.device.type == "cpu":
                time_collectives(self.engine.module)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.times is not None:
            self.times.close()
        if self.system is not None:
            self.system.__exit__(kind, error, trace)
        self.trackers.finish(failed=error is not None)
        if self.engine.ranks.is_first:
            note_end(self.folder, error)

    def record(
        self,
        step: SampledStep,
        outcome: StepOutcome,
        memory_gib: float,
        evaluation: Mapping[str, float | None],
    ) -> dict[str, object]:
        """Returns the line of a step, which the first rank writes. memory_gib: peak memory of the fullest rank.
        evaluation: of the weights after the step, if there was one. Raises UserError if there is no metric `loss`."""
        if "loss" not in outcome.metrics:  # only a user's loss can omit it
            raise UserError(
                f"train.loss: {self.config.train.loss} returns no metric `loss`: add it to the metrics of its "
                "LossOutput, as (sum, weight)."
            )
        line = step_line(step.number, step.epoch, outcome, self.throughput, memory_gib)
        line |= evaluation
        if self.times is not None:
            line |= self.times.take()
        if step.number in self.config.profile.steps:
            line["profiled"] = True
        if self.file is not None:
            self.file.write(line)
        if self.system is not None:
            self.system.step = step.number
        self.trackers.log(line)
        self.summary.add(line)
        return line

    def record_start(self, evaluation: Mapping[str, float | None]) -> None:
        """Writes a line of step 0 if there was an evaluation before the first step."""
        line = {"step": 0, **evaluation}
        if evaluation and self.file is not None:
            self.file.write(line)
            self.trackers.log(line)
        self.summary.add_evaluation(line)

    def stop_if_diverged(self, line: Mapping[str, object], sources: list[str]) -> None:
        """Raises FloatingPointError after train.max_nonfinite consecutive non-finite steps. sources: the names of the
        step's first documents."""
        self.bad.count(
            line, f"The step's first documents: {', '.join(sources[:3])}. Lower optimizer.lr, or check the data."
        )

    def progress(self, step: SampledStep, updates: int, phases: Phases) -> dict[str, Any]:
        """The run's part of a checkpoint's state after this step. First syncs metrics.jsonl to disk."""
        if self.file is not None:
            self.file.sync()
        return {
            "epoch": step.epoch,
            "updates": updates,
            "bad_in_a_row": self.bad.in_a_row,
            "summary": self.summary.counts(),
            "seconds": dict(phases.seconds),
        }

    def finish(self, phases: Phases, saved: Path, stopped: str | None, best: Mapping[str, Any] | None) -> None:
        """Writes summary.json and prints how the run went. saved: the last checkpoint. stopped: the signal or eval key
        that ended the run early. best: the best evaluation."""
        if self.engine.ranks.is_first:
            self.summary.write(self.folder / "summary.json", phases, saved, stopped, best)
            print_closing(self.summary.content(phases, saved, stopped, best), self.folder)
