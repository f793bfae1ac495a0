"""Distillation: `weft distill`. The loop is in training.py. Before each step, teachers compute its documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.config.distill_schema import DistillConfig
from weft.config.frozen_ranks import frozen_ranks
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.distillation import DistillationLoss, loss_of
from weft.engine.step_plan.plan import StepPlan
from weft.launch.options import TrainOptions
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.parallel.shards.load import Progress
from weft.recipes.recipe import PreparedStep, Recipe
from weft.recipes.run_data import TRAINED, RunData
from weft.recipes.student_samples import StudentSampler
from weft.recipes.teachers import TeacherRanks, Teachers, check_teachers, dry_run_line
from weft.recipes.training import run as train


class Distillation(Recipe[DistillConfig]):
    """A student and its teachers. Teachers add arrays to documents; some documents get an answer of the student."""

    objective: DistillationLoss
    readings: Teachers
    frozen_ranks: TeacherRanks | None = None
    sampler: StudentSampler | None = None
    lays_out_again = True

    def __init__(self, config: DistillConfig, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, hooks)
        check_teachers(config)
        self.objective = loss_of(config.distill)
        self.measured = loss_of(config.distill, measured=True)
        if frozen_ranks(config):
            self.frozen_ranks = TeacherRanks(config)

    @property
    def held_out_objective(self) -> DistillationLoss:
        return self.measured

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        super().open_models(engine, data, progress)
        side = None if self.frozen_ranks is None else self.frozen_ranks.side
        remote_lines = [] if side is None else side.wait_until_ready(data.digests)
        self.readings = Teachers(self.config, engine, data, progress, side)
        self.objective.heads = self.measured.heads = self.readings.heads
        if self.config.distill.on_policy:
            self.sampler = StudentSampler(self.config, engine, data.ends.ids)
        return [*remote_lines, *self.readings.lines()]

    def dry_run_lines(self) -> list[str]:
        distill = self.config.distill
        loss = f"loss     {distill.loss} at temperature {distill.temperature:g}, {distill.alpha:g} x cross entropy"
        samples = f"samples  {distill.on_policy:.0%} of the answers, from the student"
        teachers = [] if self.frozen_ranks else [dry_run_line(self.config)]
        return [loss, *teachers, *([samples] if distill.on_policy else [])]

    def before_step(self, step: PreparedStep) -> PreparedStep:
        documents, plan, local = step.documents, step.plan, step.local
        if self.sampler is not None:
            documents = self.sampler(step.number, documents)
            plan, local = self.engine.plan_step(documents)
        local = self.readings.read(TRAINED, step.indices, plan, local, documents)
        rows = self.engine.rows(plan, local, self.objective, step.number)
        return replace(step, documents=documents, plan=plan, local=local, rows=rows)

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        return self.readings.read(name, indices, plan, local)


def run(config: DistillConfig, options: TrainOptions, hooks: Hooks = NO_HOOKS) -> None:
    """Entry point of one rank. Raises StoppedError if a signal ended the run early."""
    train(Distillation, config, options, hooks)
