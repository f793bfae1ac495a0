"""The forwards of a command before its step, of frozen models or of the trained model, in a simulation or on real
ranks. The calls are those of the recipes' `before_step`, without data sets.

The peak memory of these forwards does not depend on the number of rows. If there are many rows, a simulation computes
the documents of the longest rows (fewest_micro_batches).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from weft.config.distill_schema import AVERAGE, DATA, TOP_IDS, TOP_LOGPROBS, DistillConfig, is_served
from weft.config.dpo_schema import DpoConfig
from weft.config.schema import SftConfig
from weft.engine.batch.document import Document, choose, take
from weft.engine.batch.rows import StepRows
from weft.engine.document_sums import read_sums
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.engine.losses.distillation import DistillationLoss, Listed
from weft.engine.losses.preference.objective import PreferenceLoss, StepAnswers, split_examples
from weft.engine.losses.reward import BradleyTerryLoss
from weft.engine.scores import parts_pairs, step_scores
from weft.engine.step_plan.plan import StepPlan
from weft.engine.teachers import Teacher, exchange, read_hidden, with_readings
from weft.errors import UserError
from weft.launch.simulated import host_memory, on_host
from weft.ops.divergence import TeacherHead
from weft.parallel.mesh import local_shard
from weft.parallel.pp.schedule import in_flight
from weft.recipes.plan.other_models import list_other_models
from weft.recipes.teachers import open_teacher


class SimulatedReadings:
    """For `weft sft` and `weft rl`, which have no such forwards. section: of the config's keys of frozen models.
    models: the opened models."""

    section = ""

    def __init__(self) -> None:
        self.models: list[Engine] = []

    def open(self, engine: Engine) -> None:
        """Opens the frozen models. engine: the trained model. Collective."""

    def read(self, engine: Engine, plan: StepPlan, documents: Sequence[Document], rows: StepRows) -> StepRows:
        """Computes documents of a step, and returns the rows to train. documents: all of the step. plan, rows: of the
        trained model; in a simulation they have only the longest rows. Collective."""
        return rows

    @property
    def frozen_tensors(self) -> list[Tensor]:
        """The tensors of frozen models on this rank."""
        return [local_shard(p) for model in self.models for p in (*model.module.parameters(), *model.module.buffers())]


class AnswerReadings(SimulatedReadings):
    """For `weft dpo`: the reference's logprob sums, and the trained model's if the loss needs them first."""

    section = "reference"

    def __init__(self, config: DpoConfig, objective: PreferenceLoss) -> None:
        super().__init__()
        self.config, self.objective = config, objective

    def open(self, engine: Engine) -> None:
        self.other_models = list_other_models(self.config, engine.config)
        self.models = [
            open_frozen(model.section, model.config, engine.ranks, shares_with=engine)
            for model in self.other_models
            if model.config is not None
        ]

    def read(self, engine: Engine, plan: StepPlan, documents: Sequence[Document], rows: StepRows) -> StepRows:
        preference, places = self.config.preference, range(len(documents))
        columns = [places[::2], places[1::2]] if preference.is_paired else [places]
        reference = self.models[0] if self.models else engine
        for _ in range(sum(round(model.reads) for model in self.other_models)):
            with nullcontext() if self.models else engine.without_adapter():
                read_sums(reference, documents_of_longest(reference, documents))
        whole_step = any(facts.whole_step for facts in preference.facts)
        examples = range(len(columns[0])) if whole_step else split_examples(columns, plan)
        read_first = sorted(column[example] for column in columns for example in examples)
        mismatched = [places] if "kto" in preference.losses else []
        for read in filter(None, [*mismatched, read_first]):
            read_sums(engine, documents_of_longest(engine, choose(documents, read)))
        with on_host(), host_memory():
            zeros, policy = torch.zeros(2, len(documents), dtype=torch.float64)
            policy.fill_(torch.nan)[read_first] = 0.0
            chosen, *rejected = torch.tensor(columns)
            answers = StepAnswers(
                chosen, rejected[0] if rejected else chosen[:0], zeros, tokens=zeros + 1, margin=zeros[chosen],
                desired=zeros[chosen], kl=0.0, policy=policy,
            )  # fmt: skip
            self.objective.begin(answers)
        return rows


class ScoreReadings(SimulatedReadings):
    """For `weft reward` with pairs: the scores of answers in another row than their pair's other answer."""

    def __init__(self, objective: BradleyTerryLoss) -> None:
        super().__init__()
        self.objective = objective

    def read(self, engine: Engine, plan: StepPlan, documents: Sequence[Document], rows: StepRows) -> StepRows:
        self.objective.scores = {}
        if parts_pairs(plan):
            step_scores(engine, plan, take(documents, engine.planner.local_documents(plan)))
            self.objective.scores = dict.fromkeys(range(len(documents)), 0.0)
        return rows


class TeacherReadings(SimulatedReadings):
    """For `weft distill`: the teachers' outputs for the documents."""

    section = "teacher"

    def __init__(self, config: DistillConfig, objective: DistillationLoss) -> None:
        """Raises UserError for features that are not simulated."""
        super().__init__()
        self.config, self.objective = config, objective
        if config.distill.on_policy:
            raise UserError(
                "--simulate does not support the copy of the student that samples (distill.on_policy): set "
                "distill.on_policy=0, or remove --simulate."
            )
        if DATA in config.distill.named:
            raise UserError(
                f"--simulate does not read rows, which determine the lengths of the lists of the teacher `{DATA}`: "
                "remove --simulate."
            )

    def open(self, engine: Engine) -> None:
        self.teachers: list[Teacher | None] = []  # None: a server
        for name in self.config.distill.named:
            teacher = None if is_served(name) else open_teacher(self.config, name, engine)
            assert teacher is None or isinstance(teacher, Teacher)
            self.teachers.append(teacher)
        simulation = engine.ranks.simulated
        with nullcontext() if simulation is None else simulation.running():
            self.objective.heads = self._heads(engine)
        # Outputs in distill.cache_dir are not computed again, so the teacher is closed.
        self.models = [] if self.config.distill.cache == "disk" else [
            teacher.engine for teacher in self.teachers if teacher is not None and teacher.weights == "own"
        ]  # fmt: skip

    def read(self, engine: Engine, plan: StepPlan, documents: Sequence[Document], rows: StepRows) -> StepRows:
        distill, count = self.config.distill, len(self.teachers)
        chosen = None if count == 1 else [index % count for index in range(len(documents))]
        if distill.teacher == AVERAGE:
            self.objective.heads = self._heads(engine)
        indices = sorted({index for row in plan.rows for of_rank in row for index in of_rank})
        local = take(documents, engine.planner.local_documents(plan))
        served = {n for n, teacher in enumerate(self.teachers) if teacher is None}
        needed = {i: d for i, d in local.items() if (0 if chosen is None else chosen[i]) not in served}
        readers = [_nothing if t is None or distill.cache == "disk" else t.read for t in self.teachers]
        read = read_hidden(readers, chosen, documents, indices)
        if engine.ranks.simulated is not None:
            with host_memory():
                read = {i: read[i] if i in read else self._unread(chosen, i, len(d)) for i, d in needed.items()}
        with host_memory():
            if served:
                local = {index: _listed(document, distill.top_k) for index, document in local.items()}
            read = exchange(read, needed, engine.mesh.world_group, engine.device)
            local = with_readings(local, read, chosen)
        return engine.rows(plan, local, self.objective, 1)

    @property
    def frozen_tensors(self) -> list[Tensor]:
        heads = [head for head in self.objective.heads if isinstance(head, TeacherHead)]
        return [
            *super().frozen_tensors,
            *(part for head in heads for part in (head.weight, head.bias) if part is not None),
        ]

    def _heads(self, engine: Engine) -> list[TeacherHead | Listed]:
        """The teachers' heads on this rank; empty if the rank computes no loss."""
        pp, pipeline = engine.mesh.pp, engine.pipeline
        is_last = pp is None or pipeline is None or pp.rank == pipeline.placement.last
        if engine.ranks.simulated is not None and not is_last:  # in a simulation no other rank sends its heads
            return []
        heads = [Listed() if teacher is None else teacher.head(engine) for teacher in self.teachers]
        return [head for head in heads if head is not None]

    def _unread(self, chosen: Sequence[int] | None, index: int, tokens: int) -> Tensor:
        """Hidden states that come from another rank, or from distill.cache_dir."""
        teacher = self.teachers[0 if chosen is None else chosen[index]]
        assert teacher is not None
        width = int(teacher.engine.built.config.get_text_config().hidden_size)
        return torch.zeros(tokens, width, dtype=teacher.engine.precision.compute)


def readings_of(config: SftConfig, objective: object) -> SimulatedReadings:
    """The forwards of a command before its step with this loss. Raises UserError for features that are not
    simulated."""
    if isinstance(config, DpoConfig):
        assert isinstance(objective, PreferenceLoss)
        return AnswerReadings(config, objective)
    if isinstance(config, DistillConfig):
        assert isinstance(objective, DistillationLoss)
        return TeacherReadings(config, objective)
    return ScoreReadings(objective) if isinstance(objective, BradleyTerryLoss) else SimulatedReadings()


def documents_of_longest(engine: Engine, documents: Sequence[Document]) -> Sequence[Document]:
    """In a simulation, the documents of the longest of this engine's rows; otherwise all documents."""
    if engine.ranks.simulated is None:
        return documents
    with on_host(), host_memory():
        plan = longest(engine.plan(engine.planner.metadata(documents)), fewest_micro_batches(engine))
        return choose(documents, sorted({index for row in plan.rows for of_rank in row for index in of_rank}))


def fewest_micro_batches(engine: Engine) -> int:
    """The number of micro-batches beyond which a rank's peak memory does not change: when the last backward begins,
    there are gradients of earlier micro-batches, and the pipeline has had its maximum number of rows."""
    pp, schedule, stages = engine.mesh.pp, engine.config.mesh.pp_schedule, engine.stages
    if pp is None or stages is None:
        return 2
    if schedule == "GPipe":
        return 1 << 30
    full = 4 * stages.placement.stages
    return full if stages.placement.chunks > 1 else in_flight(schedule, stages.placement, pp.rank, full) + 1


def longest(plan: StepPlan, count: int) -> StepPlan:
    """The plan with at most `count` micro-batches, those with the longest rows."""
    order = sorted(range(plan.micro_batches), key=lambda micro: -max(plan.lengths[micro]))
    chosen = sorted(order[:count])
    return replace(
        plan,
        rows=tuple(plan.rows[micro] for micro in chosen),
        lengths=tuple(plan.lengths[micro] for micro in chosen),
        costs=tuple(plan.costs[micro] for micro in chosen),
        pieces=tuple(plan.pieces[micro] for micro in chosen) if plan.pieces else (),
    )


def _nothing(documents: Iterable[Document]) -> dict[int, Tensor]:
    return {}


def _listed(document: Document, top_k: int) -> Document:
    """The document with lists of `top_k` tokens."""
    lists = torch.zeros(len(document), top_k)
    return replace(document, arrays={**document.arrays, TOP_IDS: lists.int(), TOP_LOGPROBS: lists})
