"""Distillation: `weft distill`. The loop is that of training.py; before each step teachers read its documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from weft.config.distill_schema import (
    AVERAGE,
    BASE,
    DATA,
    DIVERGENCES,
    DistillConfig,
    DistillSection,
    is_served,
)
from weft.data.documents import Documents
from weft.data.same_tokenizer import check_same_tokenizer
from weft.engine.batch.document import Document, choose, datasets_of
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.engine.losses.distillation import DistillationLoss
from weft.engine.step_plan.plan import StepPlan
from weft.engine.teacher_cache import CachedTeacher, HiddenCache, with_cached_teachers
from weft.engine.teachers import RowLists, Teacher, TeacherSource, with_teachers
from weft.errors import UserError
from weft.importing import import_named
from weft.inference.served_teacher import ServedTeacher, open_served
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
from weft.recipes.student_samples import StudentSampler
from weft.recipes.training import run as train
from weft.terminal import byte_count

# Teachers that are no models beside the student, as messages name them.
_ELSEWHERE = {
    BASE: "the base under the adapters", AVERAGE: "the average of the student's weights", DATA: "lists in the data",
}  # fmt: skip


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
        self._teachers: list[TeacherSource] = []
        self._sampler: StudentSampler | None = None
        self._data: dict[str | None, Sequence[Document]] = {}  # None: the training data

    @property
    def held_out_objective(self) -> DistillationLoss:
        return self._measured

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        super().open_models(engine, data, progress)
        self._data = {None: data.documents} | dict(data.held_out.documents)
        is_cached = self.config.distill.cache == "disk"
        if is_cached:
            check_cache(self.config, engine)
        self._teachers = open_teachers(self.config, engine, progress, cached=is_cached)
        self._set_heads()
        if self.config.distill.on_policy:
            self._sampler = StudentSampler(self.config, engine, data.ends.ids)
        return [
            cache_line(teacher.cache, data) if isinstance(teacher, CachedTeacher) else teacher_line(teacher, data)
            for teacher in self._teachers
        ]

    def dry_run_lines(self) -> list[str]:
        distill = self.config.distill
        teachers = ", ".join(_ELSEWHERE.get(teacher, teacher) for teacher in distill.named)
        return [
            f"loss     {distill.loss} at temperature {distill.temperature:g}, {distill.alpha:g} x cross entropy",
            f"teacher  {teachers}",
            *([f"samples  {distill.on_policy:.0%} of the answers, from the student"] if distill.on_policy else []),
        ]

    def before_step(self, step: PreparedStep) -> PreparedStep:
        documents, plan, local = step.documents, step.plan, step.local
        if self._sampler is not None:
            documents = self._sampler(step.number, documents)
            plan, local = self.engine.plan_step(documents)
        local = self._taught(None, step.indices, documents, local)
        rows = self.engine.rows(plan, local, self.objective, step.number)
        return replace(step, documents=documents, plan=plan, local=local, rows=rows)

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        return self._taught(name, indices, choose(self._data[name], indices), local)

    def _taught(
        self, name: str | None, indices: Sequence[int], documents: Sequence[Document], local: Mapping[int, Document]
    ) -> dict[int, Document]:
        """This rank's documents with what their teachers read. indices: of the step's documents in the data set
        `name`."""
        flight.enter("teacher")
        distill = self.config.distill
        if distill.teacher == AVERAGE:
            self._set_heads()
        chosen: list[int] | None = None
        if distill.teachers is not None:
            data = self._data[name]
            if distill.teacher_column is None:
                order = list(distill.teachers)
                chosen = [order.index(dataset) for dataset in datasets_of(choose(data, indices))]
            else:
                assert isinstance(data, Documents)
                chosen = data.teachers[np.array(indices, np.int64)].tolist()
        read = with_cached_teachers if distill.cache == "disk" else with_teachers
        return read(self._teachers, chosen, documents, local, self.engine)

    def _set_heads(self) -> None:
        heads = [head for teacher in self._teachers if (head := teacher.head(self.engine)) is not None]
        self.objective.heads = self._measured.heads = heads


def open_teachers(
    config: DistillConfig, engine: Engine, progress: Progress | None = None, *, cached: bool = False
) -> list[TeacherSource]:
    """The teachers of a student's engine, in order. cached: whether what they read is kept in distill.cache_dir; a
    teacher is opened when it is needed then. Collective."""
    distill = config.distill

    def kept(name: str) -> TeacherSource:
        if name == DATA:
            return RowLists()
        open = partial(open_teacher, config, name, engine, progress)
        if is_served(name):
            identity = {"server": name, "model": str(distill.served_model), "top_k": str(distill.top_k)}
            digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
            folder = Path(distill.cache_dir) / digest
            return CachedTeacher(HiddenCache(folder, 2 * distill.top_k, torch.int32, identity), open, None)
        dtype = Precision.from_config(teacher_beside(config, "", engine.config).fsdp, engine.ranks.device).compute
        shape, content = hf.read_config(name), hashlib.sha256(str(dtype).encode())
        for row in sample_rows(name):
            content.update(row.view(torch.uint8).numpy().tobytes())
        folder, text = Path(distill.cache_dir) / content.hexdigest()[:16], shape.get_text_config()
        cache = HiddenCache(folder, text.hidden_size, dtype, {"weights": content.hexdigest()})
        return CachedTeacher(cache, open, logit_transform(text))

    return [kept(name) if cached else open_teacher(config, name, engine, progress) for name in distill.named]


def open_teacher(config: DistillConfig, name: str, engine: Engine, progress: Progress | None = None) -> TeacherSource:
    """A teacher of a student's engine. name: as distill.teacher. Collective."""
    if name in (BASE, AVERAGE):
        return Teacher(engine, "base" if name == BASE else "average")
    if name == DATA:
        return RowLists()
    if is_served(name):
        distill = config.distill
        return open_served(name, distill.served_model, distill.top_k, engine, float(config.train.timeout))
    beside = teacher_beside(config, name, engine.config)
    return Teacher(open_frozen("teacher", beside, engine.ranks, shares_with=engine, progress=progress))


def check_cache(config: DistillConfig, engine: Engine) -> None:
    """Raises UserError if nothing can be kept on disk."""
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


def cache_line(cache: HiddenCache, data: RunData) -> str:
    """What the opening says of a folder of hidden states."""
    tokens = data.report.loss_tokens
    held_out = sum(report.loss_tokens for report in data.held_out.reports.values())
    size = byte_count((tokens + held_out) * cache.row_bytes)
    return f"cache    what the teacher reads, in {cache.folder}: {tokens + held_out:,} trained tokens would take {size}"


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


def teacher_line(teacher: TeacherSource, data: RunData) -> str:
    """What the opening says of a teacher."""
    if isinstance(teacher, ServedTeacher):
        return f"teacher  {teacher.model} at {teacher.url}: its {teacher.top_k} likeliest tokens, and a tail"
    if not isinstance(teacher, Teacher):
        widths = data.documents.widths if isinstance(data.documents, Documents) else np.zeros(0, np.int32)
        return f"teacher  lists in the data, of up to {widths.max(initial=0)} tokens, and a tail"
    if teacher.weights != "own":
        return f"teacher  {_ELSEWHERE[teacher.weights]}"
    engine = teacher.engine
    dtype = str(engine.precision.compute).removeprefix("torch.")
    kind = engine.module.facts.model_type
    width = engine.built.config.get_text_config().hidden_size
    return f"teacher  {engine.config.model.path} ({kind}, width {width}, {dtype}): {engine.memory}"
