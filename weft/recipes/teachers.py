"""The teachers of `weft distill`, set by distill.teacher and distill.teachers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.config.distill_schema import AVERAGE, BASE, DATA, DistillConfig, is_opened, is_served
from weft.data.documents import Documents
from weft.data.same_tokenizer import check_same_tokenizer
from weft.engine.batch.document import Document, choose, datasets_of
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.engine.losses.distillation import Listed
from weft.engine.step_plan.plan import StepPlan
from weft.engine.teacher_cache import CachedTeacher, HiddenCache, with_cached_teachers
from weft.engine.teachers import RowLists, Teacher, TeacherSource, read_hidden, with_teachers
from weft.errors import UserError
from weft.inference.served_teacher import ServedTeacher, open_served
from weft.launch import flight
from weft.launch.process import Ranks
from weft.models import hf
from weft.models.facts import logit_transform
from weft.observe.resume import sample_rows
from weft.ops.divergence import TeacherHead
from weft.parallel.parallelize import Precision
from weft.parallel.shards.load import Progress
from weft.recipes.frozen_models import frozen_teacher_config, teacher_paths
from weft.recipes.frozen_ranks import Answer, FrozenSide, ModelRanks
from weft.recipes.recipe import FrozenReadings, PreparedStep
from weft.recipes.remote_teachers import HEADS, RemoteTeacher, RemoteTeachers, TeachersSender
from weft.recipes.run_data import TRAINED, RunData
from weft.terminal import byte_count, counted

# Descriptions of teachers that are not separate models, for messages.
_ELSEWHERE = {
    BASE: "the base under the adapters", AVERAGE: "the average of the student's weights", DATA: "lists in the data",
}  # fmt: skip


class Teachers(FrozenReadings):
    """The opened teachers of a run: the teacher of each document, the teachers' outputs, and their heads.

    heads: of each teacher, on ranks that compute the loss. A loss may store this list: `read` updates it if the
    teacher's weights change.
    """

    def __init__(
        self,
        config: DistillConfig,
        student: Engine,
        data: RunData,
        progress: Progress | None = None,
        side: FrozenSide | None = None,
    ) -> None:
        """side: the side of teachers on separate ranks. Collective."""
        self.config, self.student, self.data = config, student, data
        self.remote = None if side is None else RemoteTeachers(side, student, teacher_models(config))
        remote = {} if self.remote is None else self.remote.heads(student)
        self.sources = open_teachers(config, student, progress, remote)
        self.heads: list[TeacherHead | Listed] = []
        self._fill_heads()

    def read(
        self,
        name: str,
        indices: Sequence[int],
        plan: StepPlan,
        local: Mapping[int, Document],
        documents: Sequence[Document] | None = None,
    ) -> dict[int, Document]:
        """This rank's documents with their teachers' outputs. name, indices: the data set, and the step's documents in
        it. plan, local: the step's plan, and this rank's documents. documents: the step's documents, if their answers
        are not those of the data. Collective."""
        flight.enter("teacher")
        documents = documents or choose(self.data.data_sets[name], indices)
        if self.config.distill.teacher == AVERAGE:
            self._fill_heads()
        chosen = chosen_teachers(self.config, self.data, name, indices)
        if self.config.distill.cache == "disk":
            return with_cached_teachers(self.sources, chosen, documents, local, self.student)
        received = {} if self.remote is None else self.remote.received(name, indices, plan, chosen, local)
        return with_teachers(self.sources, chosen, documents, local, self.student, received)

    def announce(self, step: PreparedStep) -> None:
        if self.remote is not None:
            chosen = chosen_teachers(self.config, self.data, TRAINED, step.indices)
            self.remote.announce(TRAINED, step.indices, step.plan, chosen)

    def lines(self) -> list[str]:
        """The opening's line about each teacher on these ranks."""
        return [_line(source, self.data) for source in self.sources if not isinstance(source, RemoteTeacher)]

    def _fill_heads(self) -> None:
        self.heads[:] = [head for source in self.sources if (head := source.head(self.student)) is not None]


class TeacherRanks(ModelRanks):
    """The ranks of teacher.ranks, which run the teachers that are models."""

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self.config = config

    def open_frozen(self, ranks: Ranks, data: RunData | None, *, weights: bool = True) -> tuple[Answer, list[str]]:
        teachers, first = dict[int, Teacher](), None
        for number, path in teacher_models(self.config).items():
            teacher_config = frozen_teacher_config(self.config, path, EngineConfig.from_config(self.config))
            teachers[number] = Teacher(
                open_frozen("teacher", teacher_config, ranks, weights=weights, shares_with=first)
            )
            first = first or teachers[number].engine
        sender, lists = TeachersSender(ranks), RowLists()
        readers = [teachers.get(number, lists).read for number in range(len(self.config.distill.named))]

        def answer(number: int, request: Mapping[str, Any]) -> bytes:
            if request["name"] == HEADS:
                return sender.send_heads(number, teachers.values())
            assert data is not None
            name, indices = request["name"], request["indices"]
            documents, chosen = choose(data.data_sets[name], indices), chosen_teachers(self.config, data, name, indices)
            return sender.send(number, request, read_hidden(readers, chosen, documents, range(len(documents))))

        return answer, [_model_line(teacher.engine, self.count) for teacher in teachers.values()]


def teacher_models(config: DistillConfig) -> dict[int, str]:
    """The teachers that are models separate from the student, by their number in distill.named."""
    return {number: name for number, name in enumerate(config.distill.named) if is_opened(name)}


def chosen_teachers(config: DistillConfig, data: RunData, name: str, indices: Sequence[int]) -> list[int] | None:
    """The number in distill.named of the teacher of each of these documents; None if there is only one teacher."""
    distill, documents = config.distill, data.data_sets[name]
    if distill.teachers is None:
        return None
    if distill.teacher_column is None:
        order = list(distill.teachers)
        return [order.index(dataset) for dataset in datasets_of(choose(documents, indices))]
    assert isinstance(documents, Documents)
    return list(documents.teachers[np.array(indices, np.int64)].tolist())


def check_teachers(config: DistillConfig) -> None:
    """Raises UserError if a teacher and the student have different tokenizers."""
    for path in teacher_paths(config):
        key = "distill.teacher" if config.distill.teachers is None else "distill.teachers"
        check_same_tokenizer(config.model.path, path, key)


def dry_run_line(config: DistillConfig) -> str:
    """The dry run's line about the teachers."""
    return f"teacher  {', '.join(_ELSEWHERE.get(name, name) for name in config.distill.named)}"


def open_teachers(
    config: DistillConfig,
    student: Engine,
    progress: Progress | None = None,
    remote: Mapping[int, RemoteTeacher] = {},
) -> list[TeacherSource]:
    """The teachers of a student's engine, in order. With distill.cache=disk their outputs are stored, and a teacher is
    opened only when it is needed. remote: teachers on separate ranks, by number. Raises UserError if outputs cannot be
    stored. Collective."""
    if config.distill.cache != "disk":
        return [
            remote[number] if number in remote else open_teacher(config, name, student, progress)
            for number, name in enumerate(config.distill.named)
        ]
    if student.built.vision is not None:
        raise UserError(
            "distill.cache is disk, but the student accepts images, and the cache does not store hidden states of "
            "images: set distill.cache=off."
        )
    if config.distill.teacher == BASE:
        raise UserError(
            "distill.cache is disk, but distill.teacher=base is always in memory: set distill.cache=off, or "
            "distill.teacher to model.path."
        )
    return [open_cached_teacher(config, name, student, progress) for name in config.distill.named]


def open_teacher(config: DistillConfig, name: str, student: Engine, progress: Progress | None = None) -> TeacherSource:
    """A teacher of a student's engine. name: the value of distill.teacher. Collective."""
    if name in (BASE, AVERAGE):
        return Teacher(student, "base" if name == BASE else "average")
    if name == DATA:
        return RowLists()
    if is_served(name):
        distill = config.distill
        return open_served(name, distill.served_model, distill.top_k, student, float(config.train.timeout))
    teacher_config = frozen_teacher_config(config, name, student.config)
    return Teacher(open_frozen("teacher", teacher_config, student.ranks, shares_with=student, progress=progress))


def open_cached_teacher(
    config: DistillConfig, name: str, student: Engine, progress: Progress | None = None
) -> TeacherSource:
    """Like open_teacher, with outputs stored below distill.cache_dir, in a folder named by a digest of its weights and
    dtype, or of a server's URL and model."""
    distill = config.distill
    if name == DATA:
        return RowLists()
    open = partial(open_teacher, config, name, student, progress)
    if is_served(name):
        identity = {"server": name, "model": str(distill.served_model), "top_k": str(distill.top_k)}
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        folder = Path(distill.cache_dir) / digest
        return CachedTeacher(HiddenCache(folder, 2 * distill.top_k, torch.int32, identity), open, None)
    dtype = Precision.from_config(frozen_teacher_config(config, "", student.config).fsdp, student.ranks.device).compute
    shape, content = hf.read_config(name), hashlib.sha256(str(dtype).encode())
    for row in sample_rows(name):
        content.update(row.view(torch.uint8).numpy().tobytes())
    folder, text = Path(distill.cache_dir) / content.hexdigest()[:16], shape.get_text_config()
    cache = HiddenCache(folder, text.hidden_size, dtype, {"weights": content.hexdigest()})
    return CachedTeacher(cache, open, logit_transform(shape))


def _line(teacher: TeacherSource, data: RunData) -> str:
    if isinstance(teacher, CachedTeacher):
        tokens = data.report.loss_tokens + sum(report.loss_tokens for report in data.held_out.reports.values())
        size, folder = byte_count(tokens * teacher.cache.row_bytes), teacher.cache.folder
        return f"cache    the teacher's outputs, in {folder}: {tokens:,} trained tokens would need {size}"
    if isinstance(teacher, ServedTeacher):
        return f"teacher  {teacher.model} at {teacher.url}: its {teacher.top_k} most likely tokens, and a tail"
    if not isinstance(teacher, Teacher):
        widths = data.documents.widths if isinstance(data.documents, Documents) else np.zeros(0, np.int32)
        return f"teacher  lists in the data, of up to {widths.max(initial=0)} tokens, and a tail"
    if teacher.weights != "own":
        return f"teacher  {_ELSEWHERE[teacher.weights]}"
    return _model_line(teacher.engine)


def _model_line(engine: Engine, ranks: int = 0) -> str:
    """The opening's line about a teacher that is a model. ranks: number of its separate ranks, if any."""
    dtype = str(engine.precision.compute).removeprefix("torch.")
    kind = engine.module.facts.model_type
    width = engine.built.config.get_text_config().hidden_size
    where = f", on {counted(ranks, 'separate rank')}" if ranks else ""
    return f"teacher  {engine.config.model.path} ({kind}, width {width}, {dtype}){where}: {engine.memory}"
