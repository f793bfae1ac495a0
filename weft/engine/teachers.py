"""Teachers of distillation: frozen engines, their heads, and the exchange of their hidden states with the student's
ranks.

H is a teacher's hidden width. Teachers send last hidden states instead of logits, which are vocabulary / H times as
large. Teachers that are given as lists of their most likely tokens (Listed) send these lists, of K tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.config.distill_schema import TOP_IDS, TOP_LOGPROBS
from weft.engine.batch.document import Document, choose
from weft.engine.engine import Engine
from weft.engine.losses.distillation import HIDDEN, TEACHER, Listed
from weft.launch import flight
from weft.launch.simulated import host_memory, is_simulated, read
from weft.launch.timing import waiting
from weft.ops.communicator import GroupCommunicator
from weft.ops.divergence import TeacherHead


class TeacherSource(Protocol):
    """The interface of a teacher. head: for the student's ranks; None on ranks that compute no loss. Both methods are
    collective."""

    def read(self, documents: Sequence[Document]) -> dict[int, Tensor]:
        """Index -> hidden states [T, H], or lists packed by pack_lists, of some of the documents. Each document is read
        by at least one rank."""
        ...

    def head(self, student: Engine) -> TeacherHead | Listed | None: ...


class RowLists:
    """A teacher whose lists are in the rows of the data, and therefore in the arrays of documents."""

    def read(self, documents: Sequence[Document]) -> dict[int, Tensor]:
        return {}

    def head(self, student: Engine) -> Listed:
        return Listed()


def pack_lists(ids_TK: Tensor, logprobs_TK: Tensor) -> Tensor:
    """[T, 2 K] int32: ids, and the bits of fp32 log-probabilities, so that both are sent as one tensor."""
    return torch.cat([ids_TK.to(torch.int32), logprobs_TK.float().view(torch.int32)], 1)


@dataclass(frozen=True)
class Teacher:
    """A teacher with an engine. weights: the engine's; or, if the engine is the student's, its `base` without adapters,
    or the `average` of the trained weights."""

    engine: Engine
    weights: Literal["own", "base", "average"] = "own"

    def read(self, documents: Sequence[Document]) -> dict[int, Tensor]:
        """Index -> last hidden states [T, H] (Engine.last_hidden) of this rank's documents in the plan of the teacher's
        mesh and budget. Raises as check_hidden. Collective."""
        with flight.computing(self.name):
            plan, local = self.engine.plan_step(documents)
            with self._reading():
                hidden = self.engine.last_hidden(plan, local)
            for index, states in hidden.items():
                check_hidden(states, local[index], self.name)
        return hidden

    @property
    def name(self) -> str:
        """Of this teacher, for messages."""
        if self.weights == "own":
            return f"the teacher {self.engine.config.model.path}"
        return f"the teacher, the student's {self.weights}"

    def head(self, student: Engine) -> TeacherHead | None:
        """teacher_head of this teacher's weights. Collective."""
        with self._reading():
            return teacher_head(self.engine, student)

    def _reading(self) -> AbstractContextManager[None]:
        if self.weights == "base":
            return self.engine.without_adapter()
        return self.engine.averaged() if self.weights == "average" else nullcontext()


def check_hidden(states: Tensor, document: Document, teacher: str) -> None:
    """Raises FloatingPointError if hidden states are not finite, and RuntimeError if their number is not that of the
    document's tokens. teacher: its name."""
    if states.ndim != 2 or len(states) != len(document):
        raise RuntimeError(
            f"{teacher} returns hidden states of shape {tuple(states.shape)} for {document.source or 'a document'} "
            f"of {len(document)} tokens"
        )
    if not all(read(states.isfinite().all()[None], lambda: [True])):
        raise FloatingPointError(
            f"{teacher} returns hidden states that are not finite, for {document.source or 'a document'}. Check its "
            "weights, or set teacher.param_dtype=fp32."
        )


def teacher_head(teacher: Engine, student: Engine) -> TeacherHead | None:
    """The teacher's head: the rows of this rank's shard of the student's vocabulary, on the student's device; None on
    ranks that compute no loss (mesh.pp). Tokens that only one of both vocabularies has are omitted. Collective."""
    weight, bias = teacher.head_weights()
    rows = int(student.built.config.get_text_config().vocab_size)
    return head_for(TeacherHead(weight, bias, teacher.module.facts.transform, min(rows, len(weight))), student)


def head_for(head_of_teacher: TeacherHead, student: Engine) -> TeacherHead | None:
    """The part of a complete head that a rank of the student needs, on its device; see teacher_head."""
    pipeline = student.pipeline
    if student.mesh.pp is not None and pipeline is not None and student.mesh.pp.rank != pipeline.placement.last:
        return None
    head = student.module.head
    first = 0 if head.shard is None else head.shard.first
    part = head_of_teacher.rows(first, head_of_teacher.vocabulary if head.shard is None else len(head.weight))
    tensors = [None if x is None else x.to(student.device).clone() for x in (part.weight, part.bias)]
    assert tensors[0] is not None
    return replace(part, weight=tensors[0], bias=tensors[1])


def with_teachers(
    teachers: Sequence[TeacherSource],
    chosen: Sequence[int] | None,
    documents: Sequence[Document],
    local: Mapping[int, Document],
    student: Engine,
    received: Mapping[int, Tensor] = {},
) -> dict[int, Document]:
    """This rank's documents with the arrays that DistillationLoss reads. Collective.

    chosen: which teacher each document of the step has; None if there is one. documents: of the step. local: this
    rank's, by their index in the step. received: the outputs for local documents that were read on ranks other than the
    student's.
    """
    read = read_hidden([teacher.read for teacher in teachers], chosen, documents, range(len(documents)))
    is_read = [not isinstance(teacher, RowLists) for teacher in teachers]
    needed = {
        index: document
        for index, document in local.items()
        if is_read[0 if chosen is None else chosen[index]] and index not in received
    }
    arrived = exchange(read, needed, student.mesh.world_group, student.device)
    return with_readings(local, arrived | dict(received), chosen)


def read_hidden(
    readers: Sequence[Callable[[Sequence[Document]], dict[int, Tensor]]],
    chosen: Sequence[int] | None,
    documents: Sequence[Document],
    indices: Sequence[int],
) -> dict[int, Tensor]:
    """Index -> the teachers' outputs for the documents that this rank reads. readers: TeacherSource.read of each
    teacher. chosen, documents: as in with_teachers. indices: of the documents to read, ascending. Collective."""
    hidden: dict[int, Tensor] = {}
    for teacher, reader in enumerate(readers):
        taught = [index for index in indices if chosen is None or chosen[index] == teacher]
        if taught:
            values = reader(documents if len(taught) == len(documents) else choose(documents, taught))
            hidden |= {taught[n]: states for n, states in values.items()}
    return hidden


def with_readings(
    local: Mapping[int, Document], read: Mapping[int, Tensor], chosen: Sequence[int] | None
) -> dict[int, Document]:
    """The documents with their teachers' outputs (TeacherSource.read). All documents get arrays of the same names and
    widths, because a row joins them; narrower arrays are padded."""
    arrays = {
        index: _arrays(read[index])
        if index in read
        else {name: document.arrays[name] for name in (TOP_IDS, TOP_LOGPROBS)}
        for index, document in local.items()
    }
    widths: dict[str, int] = {}
    for of_document in arrays.values():
        for name, values in of_document.items():
            widths[name] = max(widths.get(name, 0), values.shape[1])
    dtypes = {name: values.dtype for of_document in arrays.values() for name, values in of_document.items()}
    out = {}
    for index, document in local.items():
        padded = dict(document.arrays)
        for name, width in widths.items():
            values = arrays[index].get(name, torch.zeros(len(document), 0, dtype=dtypes[name]))
            missing = width - values.shape[1]
            padded[name] = torch.nn.functional.pad(values, (0, missing), value=-1 if name == TOP_IDS else 0)
        if chosen is not None:
            padded[TEACHER] = torch.full((len(document),), chosen[index])
        out[index] = replace(document, arrays=padded)
    return out


def _arrays(values: Tensor) -> dict[str, Tensor]:
    if values.dtype != torch.int32:
        return {HIDDEN: values}
    ids, bits = values.chunk(2, 1)
    return {TOP_IDS: ids, TOP_LOGPROBS: bits.contiguous().view(torch.float32)}


def exchange(
    read: Mapping[int, Tensor],
    needed: Mapping[int, Document],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[int, Tensor]:
    """The tensors [T, ...] of the documents `needed`, which ranks may have read elsewhere; each comes from the first
    rank that has it, so that all have the same bits. In a simulation each rank has read what it needs. Collective.

    Documents may have other inner shapes (several teachers); each shape is exchanged by itself.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world == 1:
        return {index: read[index] for index in needed}
    lengths = {index: len(document) for index, document in needed.items()}
    local = ({index: (tuple(x.shape[1:]), x.dtype) for index, x in read.items()}, lengths)
    by_rank: list[tuple[dict[int, tuple[tuple[int, ...], torch.dtype]], dict[int, int]]] = [({}, {})] * world
    if is_simulated():
        by_rank[rank] = local
    else:
        with waiting():
            dist.all_gather_object(by_rank, local, group=group)
    owner: dict[int, int] = {}
    kinds: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
    for source, (kinds_there, _) in enumerate(by_rank):
        for index, kind in kinds_there.items():
            owner.setdefault(index, source)
            kinds.setdefault(index, kind)
    out: dict[int, Tensor] = {}
    for kind in sorted(set(kinds.values()), key=str):
        shape, dtype = kind
        needs = [sorted(index for index in lengths_there if kinds[index] == kind) for _, lengths_there in by_rank]
        sent = [[index for index in indices if owner[index] == rank] for indices in needs]
        received = [[index for index in needs[rank] if owner[index] == source] for source in range(world)]
        parts = [read[index] for indices in sent for index in indices]
        with host_memory():
            joined = torch.cat(parts) if parts else torch.zeros(0, *shape, dtype=dtype)
        joined = joined.to(device)
        counts = [sum(by_rank[target][1][index] for index in indices) for target, indices in enumerate(sent)]
        expected = [sum(lengths[index] for index in indices) for indices in received]
        with waiting():
            arrived = GroupCommunicator(group).all_to_all(joined, counts, expected).cpu()
        order = [index for indices in received for index in indices]
        out |= dict(zip(order, arrived.split([lengths[index] for index in order]), strict=True))
    return out
