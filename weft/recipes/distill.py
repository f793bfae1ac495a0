"""Distillation: `weft distill`. The loop is that of training.py; before each step teachers read its documents."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from weft.config.distill_schema import AVERAGE, BASE, DIVERGENCES, DistillConfig, DistillSection
from weft.data.same_tokenizer import check_same_tokenizer
from weft.engine.batch.document import Document, choose, datasets_of
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.engine.losses.distillation import DistillationLoss
from weft.engine.step_plan.plan import StepPlan
from weft.engine.teacher_cache import CachedTeacher, HiddenCache, with_cached_teachers
from weft.engine.teachers import Teacher, with_teachers
from weft.errors import UserError
from weft.importing import import_named
from weft.launch import flight
from weft.launch.options import TrainOptions
from weft.models import hf
from weft.models.facts import logit_transform
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.observe.resume import sample_rows
from weft.ops import divergence
from weft.ops.divergence import Terms
from weft.parallel.parallelize import Precision
from weft.parallel.shards.load import Progress
from weft.recipes.frozen_models import teacher_beside, teacher_paths
from weft.recipes.recipe import PreparedStep, Recipe
from weft.recipes.run_data import RunData
from weft.recipes.training import run as train
from weft.terminal import byte_count

# Teachers that are the student itself, as messages name them.
_OF_STUDENT = {BASE: "the base under the adapters", AVERAGE: "the average of the student's weights"}


def run(config: DistillConfig, options: TrainOptions, hooks: Hooks = NO_HOOKS) -> None:
    """Entry point of one rank. Raises StoppedError if a signal ended the run early."""
    train(Distillation, config, options, hooks)


class Distillation(Recipe[DistillConfig]):
    """What `weft distill` adds to the loop."""

    lays_out_again = True

    def __init__(self, config: DistillConfig, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, hooks)
        for path in teacher_paths(config):
            key = "distill.teacher" if config.distill.teachers is None else "distill.teachers"
            check_same_tokenizer(config.model.path, path, key)
        self.objective: DistillationLoss = make_loss(config.distill)
        self._measured = make_loss(config.distill, measured=True)
        self._teachers: list[Teacher] = []
        self._cached: list[CachedTeacher] = []
        self._held_out: Mapping[str, Sequence[Document]] = {}

    @property
    def held_out_objective(self) -> DistillationLoss:
        return self._measured

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        super().open_models(engine, data, progress)
        self._held_out = data.held_out.documents
        if self.config.distill.cache == "disk":
            self._cached = open_caches(self.config, engine, progress)
            self._set_heads()
            return [line for teacher in self._cached for line in cache_lines(teacher.cache, data)]
        self._teachers = open_teachers(self.config, engine, progress)
        self._set_heads()
        return [line for teacher in self._teachers for line in teacher_lines(teacher)]

    def dry_run_lines(self) -> list[str]:
        distill = self.config.distill
        teachers = ", ".join(teacher_paths(self.config)) or _OF_STUDENT[str(distill.teacher)]
        return [
            f"loss     {distill.loss} at temperature {distill.temperature:g}, {distill.alpha:g} x cross entropy",
            f"teacher  {teachers}",
        ]

    def before_step(self, step: PreparedStep) -> PreparedStep:
        local = self._taught(step.documents, step.local)
        return replace(step, local=local, rows=self.engine.rows(step.plan, local, self.objective, step.number))

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        return self._taught(choose(self._held_out[name], indices), local)

    def _taught(self, documents: Sequence[Document], local: Mapping[int, Document]) -> dict[int, Document]:
        """This rank's documents with what their teachers read."""
        flight.enter("teacher")
        if self.config.distill.teacher == AVERAGE:
            self._set_heads()
        names = self.config.distill.teachers
        order = list(names or ())
        chosen = None if names is None else [order.index(dataset) for dataset in datasets_of(documents)]
        if self._cached:
            return with_cached_teachers(self._cached, chosen, documents, local, self.engine)
        return with_teachers(self._teachers, chosen, documents, local, self.engine)

    def _set_heads(self) -> None:
        teachers: tuple[Teacher | CachedTeacher, ...] = (*self._teachers, *self._cached)
        heads = [head for teacher in teachers if (head := teacher.head(self.engine)) is not None]
        self.objective.heads = self._measured.heads = heads


def open_teachers(config: DistillConfig, engine: Engine, progress: Progress | None = None) -> list[Teacher]:
    """The teachers of a student's engine. Collective."""
    if config.distill.teacher in (BASE, AVERAGE):
        return [Teacher(engine, "base" if config.distill.teacher == BASE else "average")]
    return [open_teacher(config, path, engine, progress) for path in teacher_paths(config)]


def open_teacher(config: DistillConfig, path: str, engine: Engine, progress: Progress | None = None) -> Teacher:
    """A teacher beside a student's engine. Collective."""
    beside = teacher_beside(config, path, engine.config)
    return Teacher(open_frozen("teacher", beside, engine.ranks, shares_with=engine, progress=progress))


def open_caches(config: DistillConfig, engine: Engine, progress: Progress | None = None) -> list[CachedTeacher]:
    """The teachers' folders of hidden states, in distill.cache_dir. Collective."""
    if engine.built.vision is not None:
        raise UserError(
            "distill.cache is disk, but the student takes images, whose hidden states are not kept: set "
            "distill.cache=off."
        )
    if config.distill.teacher == BASE:
        raise UserError(
            "distill.cache is disk, but distill.teacher=base is in memory anyway: set distill.cache=off, or "
            "distill.teacher to model.path."
        )
    dtype = Precision.from_config(teacher_beside(config, "", engine.config).fsdp, engine.ranks.device).compute
    out = []
    for path in teacher_paths(config):
        shape, digest = hf.read_config(path), hashlib.sha256(str(dtype).encode())
        for row in sample_rows(path):
            digest.update(row.view(torch.uint8).numpy().tobytes())
        folder, text = Path(config.distill.cache_dir) / digest.hexdigest()[:16], shape.get_text_config()
        cache = HiddenCache(folder, text.hidden_size, dtype, {"weights": digest.hexdigest()})
        out.append(CachedTeacher(cache, partial(open_teacher, config, path, engine, progress), logit_transform(text)))
    return out


def cache_lines(cache: HiddenCache, data: RunData) -> list[str]:
    """What the opening says of a folder of hidden states."""
    tokens = data.report.loss_tokens
    held_out = sum(report.loss_tokens for report in data.held_out.reports.values())
    size = byte_count((tokens + held_out) * cache.row_bytes)
    return [f"cache    hidden states in {cache.folder}: {tokens + held_out:,} trained tokens would take {size}"]


def make_loss(config: DistillSection, *, measured: bool = False) -> DistillationLoss:
    """The loss without teachers' heads. measured: as in DistillationLoss."""
    scale = config.temperature**2 if config.temperature_squared else 1.0
    return DistillationLoss(
        divergence_of(config), temperature=config.temperature, alpha=config.alpha, scale=scale, measured=measured
    )


def divergence_of(config: DistillSection) -> Terms:
    """The divergence of distill.loss. Raises UserError if its import path leads to no function."""
    if config.loss in DIVERGENCES:
        return divergence.terms_of(config.loss, config.beta)
    function = import_named(config.loss, "distill.loss")
    if not callable(function):
        raise UserError(
            f"distill.loss: {config.loss} is no function of (student's log-probabilities, teacher's), [tokens, "
            "vocabulary] each."
        )
    return divergence.differentiated(function, f"distill.loss: {config.loss}")


def teacher_lines(teacher: Teacher) -> list[str]:
    """What the opening says of a teacher."""
    if teacher.weights != "own":
        return [f"teacher  {_OF_STUDENT[teacher.weights]}"]
    engine = teacher.engine
    dtype = str(engine.precision.compute).removeprefix("torch.")
    kind = engine.module.facts.model_type
    width = engine.built.config.get_text_config().hidden_size
    return [f"teacher  {engine.config.model.path} ({kind}, width {width}, {dtype}): {engine.memory}"]
