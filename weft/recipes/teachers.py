"""The teachers of `weft distill`, as distill.teacher and distill.teachers name them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from weft.config.distill_schema import AVERAGE, BASE, DATA, DistillConfig, is_served
from weft.data.documents import Documents
from weft.data.same_tokenizer import check_same_tokenizer
from weft.engine.batch.document import Document, choose, datasets_of
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.engine.losses.distillation import Listed
from weft.engine.teacher_cache import CachedTeacher, HiddenCache, with_cached_teachers
from weft.engine.teachers import RowLists, Teacher, TeacherSource, with_teachers
from weft.errors import UserError
from weft.inference.served_teacher import ServedTeacher, open_served
from weft.launch import flight
from weft.models import hf
from weft.models.facts import logit_transform
from weft.observe.resume import sample_rows
from weft.ops.divergence import TeacherHead
from weft.parallel.parallelize import Precision
from weft.parallel.shards.load import Progress
from weft.recipes.frozen_models import teacher_beside, teacher_paths
from weft.recipes.run_data import RunData
from weft.terminal import byte_count

# Teachers that are no models beside the student, as messages name them.
_ELSEWHERE = {
    BASE: "the base under the adapters", AVERAGE: "the average of the student's weights", DATA: "lists in the data",
}  # fmt: skip


class Teachers:
    """The opened teachers of a run: which each document has, what they read of it, and their heads.

    heads: of each teacher, on ranks that compute the loss. A loss may keep this list: `read` fills it anew where the
    teacher's weights move.
    """

    def __init__(self, config: DistillConfig, student: Engine, data: RunData, progress: Progress | None = None) -> None:
        """Collective."""
        self.config, self.student, self.data = config, student, data
        self.sources = open_teachers(config, student, progress)
        self.heads: list[TeacherHead | Listed] = []
        self._fill_heads()

    def read(
        self,
        name: str,
        indices: Sequence[int],
        local: Mapping[int, Document],
        documents: Sequence[Document] | None = None,
    ) -> dict[int, Document]:
        """This rank's documents with what their teachers read. name, indices: the data set, and which of its documents
        a step has. local: this rank's. documents: the step's, where their answers are not those of the data.
        Collective."""
        flight.enter("teacher")
        distill, data = self.config.distill, self.data.data_sets[name]
        if distill.teacher == AVERAGE:
            self._fill_heads()
        chosen: list[int] | None = None
        if distill.teachers is not None and distill.teacher_column is None:
            order = list(distill.teachers)
            chosen = [order.index(dataset) for dataset in datasets_of(choose(data, indices))]
        elif distill.teachers is not None:
            assert isinstance(data, Documents)
            chosen = data.teachers[np.array(indices, np.int64)].tolist()
        read = with_cached_teachers if distill.cache == "disk" else with_teachers
        return read(self.sources, chosen, documents or choose(data, indices), local, self.student)

    def lines(self) -> list[str]:
        """What the opening says of each."""
        return [_line(source, self.data) for source in self.sources]

    def _fill_heads(self) -> None:
        self.heads[:] = [head for source in self.sources if (head := source.head(self.student)) is not None]


def check_teachers(config: DistillConfig) -> None:
    """Raises UserError for a teacher with another tokenizer than the student's."""
    for path in teacher_paths(config):
        key = "distill.teacher" if config.distill.teachers is None else "distill.teachers"
        check_same_tokenizer(config.model.path, path, key)


def dry_run_line(config: DistillConfig) -> str:
    """What a dry run says of the teachers."""
    return f"teacher  {', '.join(_ELSEWHERE.get(name, name) for name in config.distill.named)}"


def open_teachers(config: DistillConfig, student: Engine, progress: Progress | None = None) -> list[TeacherSource]:
    """The teachers of a student's engine, in order. With distill.cache=disk what they read is kept, and one is opened
    when it is needed. Raises UserError if nothing can be kept. Collective."""
    if config.distill.cache != "disk":
        return [open_teacher(config, name, student, progress) for name in config.distill.named]
    if student.built.vision is not None:
        raise UserError(
            "distill.cache is disk, but the student takes images, whose hidden states are not kept: set "
            "distill.cache=off."
        )
    if config.distill.teacher == BASE:
        raise UserError(
            "distill.cache is disk, but distill.teacher=base is in memory anyway: set distill.cache=off, or "
            "distill.teacher to model.path."
        )
    return [open_cached_teacher(config, name, student, progress) for name in config.distill.named]


def open_teacher(config: DistillConfig, name: str, student: Engine, progress: Progress | None = None) -> TeacherSource:
    """A teacher of a student's engine. name: as distill.teacher. Collective."""
    if name in (BASE, AVERAGE):
        return Teacher(student, "base" if name == BASE else "average")
    if name == DATA:
        return RowLists()
    if is_served(name):
        distill = config.distill
        return open_served(name, distill.served_model, distill.top_k, student, float(config.train.timeout))
    beside = teacher_beside(config, name, student.config)
    return Teacher(open_frozen("teacher", beside, student.ranks, shares_with=student, progress=progress))


def open_cached_teacher(
    config: DistillConfig, name: str, student: Engine, progress: Progress | None = None
) -> TeacherSource:
    """As open_teacher, with what it reads below distill.cache_dir, in a folder named by a digest of its weights and
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
    dtype = Precision.from_config(teacher_beside(config, "", student.config).fsdp, student.ranks.device).compute
    shape, content = hf.read_config(name), hashlib.sha256(str(dtype).encode())
    for row in sample_rows(name):
        content.update(row.view(torch.uint8).numpy().tobytes())
    folder, text = Path(distill.cache_dir) / content.hexdigest()[:16], shape.get_text_config()
    cache = HiddenCache(folder, text.hidden_size, dtype, {"weights": content.hexdigest()})
    return CachedTeacher(cache, open, logit_transform(text))


def _line(teacher: TeacherSource, data: RunData) -> str:
    if isinstance(teacher, CachedTeacher):
        tokens = data.report.loss_tokens + sum(report.loss_tokens for report in data.held_out.reports.values())
        size, folder = byte_count(tokens * teacher.cache.row_bytes), teacher.cache.folder
        return f"cache    what the teacher reads, in {folder}: {tokens:,} trained tokens would take {size}"
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
