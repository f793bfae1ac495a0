"""Teachers on separate ranks (teacher.ranks): the data that they send to the student's ranks.

H is a teacher's hidden width, F the bytes of its dtype. For a document of T tokens, T bytes are sent that mark the
trained tokens, and H x F bytes for each trained token: the complete last hidden states, so that divergences compare
complete distributions. Logits would need vocabulary / H times as many bytes, and lists of likely tokens would be
another loss. A rank that computed a document sends it from host to host to each rank that trains it, as soon as it has
computed the complete step. The store of the exchange (frozen_ranks.py) contains only which rank sends which document.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.step_plan.plan import StepPlan
from weft.engine.teachers import Teacher, head_for
from weft.launch import flight
from weft.launch.process import Ranks, join_sides
from weft.launch.timing import waiting
from weft.models import hf
from weft.models.facts import logit_transform
from weft.ops.divergence import TeacherHead
from weft.recipes.frozen_ranks import FrozenSide

HEADS = "heads"  # replaces the name of a data set
_REPEATED = 8  # number of finished requests that each request lists; at most one of them is new
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class RemoteTeacher:
    """A TeacherSource whose outputs come from RemoteTeachers.received. whole_head: on the host."""

    path: str
    whole_head: TeacherHead

    def read(self, documents: Sequence[Document]) -> dict[int, Tensor]:
        return {}

    def head(self, student: Engine) -> TeacherHead | None:
        return head_for(self.whole_head, student)


class RemoteTeachers:
    """The student's side, created once the teachers are ready. paths: of the remote teachers, by their number in
    distill.named; the others are not models. Collective on both sides, like `heads`."""

    def __init__(self, side: FrozenSide, student: Engine, paths: Mapping[int, str]) -> None:
        self.side, self.paths, self.device = side, paths, student.device
        self._first = side.ranks.world  # the first teacher's rank
        side.ask(HEADS, range(len(paths)))  # at this request the other side joins
        self._link = join_sides(side.ranks)
        self._data_ranks = [0] * side.ranks.world  # of each rank of the student
        dist.all_gather_object(self._data_ranks, student.mesh.loss_rank, group=side.ranks.group)
        self._done: deque[int] = deque(maxlen=_REPEATED)  # requests whose answers have arrived

    def heads(self, student: Engine) -> dict[int, RemoteTeacher]:
        """The teachers, by number. Collective."""
        number, heads = self._answer(HEADS, range(len(self.paths)), {})
        vocabulary = int(student.built.config.get_text_config().vocab_size)
        source = self._first + self.side.ranks.rank % self.side.ranks.others
        out = {}
        for (teacher, path), (shape, dtype, has_bias) in zip(self.paths.items(), heads, strict=True):
            weight = torch.empty(shape, dtype=_DTYPES[dtype])
            bias = torch.empty(shape[0], dtype=_DTYPES[dtype]) if has_bias else None
            for part in (weight, bias):
                if part is not None:
                    self._link.recv([_as_bytes(part)], source, number).wait()
            transform = logit_transform(hf.read_config(path))
            out[teacher] = RemoteTeacher(path, TeacherHead(weight, bias, transform, min(vocabulary, shape[0])))
        return out

    def announce(self, name: str, indices: Sequence[int], plan: StepPlan, chosen: Sequence[int] | None) -> None:
        """Requests a later step's documents. chosen: the teacher of each. Any thread may call it."""
        if any(needs := self._needs(plan, chosen)):
            self.side.ask(name, indices, needs=needs, done=list(self._done))

    def received(
        self,
        name: str,
        indices: Sequence[int],
        plan: StepPlan,
        chosen: Sequence[int] | None,
        local: Mapping[int, Document],
    ) -> dict[int, Tensor]:
        """Index -> hidden states [T, H] of this rank's documents with a remote teacher, zeros at untrained tokens.
        name, indices: of the step's documents. Collective."""
        if not any(needs := self._needs(plan, chosen)):
            return {}
        number, sent = self._answer(name, indices, {"needs": needs, "done": list(self._done)})
        by_source: dict[int, list[int]] = {}
        for index in needs[self.side.ranks.rank]:
            by_source.setdefault(sent[str(index)][0], []).append(index)
        sizes = {
            index: len(local[index]) + rows * width * _DTYPES[dtype].itemsize
            for index in needs[self.side.ranks.rank]
            for _, rows, width, dtype in [sent[str(index)]]
        }
        arriving = {
            source: torch.empty(sum(sizes[index] for index in numbers), dtype=torch.uint8)
            for source, numbers in by_source.items()
        }
        with waiting():
            works = [self._link.recv([x], self._first + source, number) for source, x in arriving.items()]
            for work in works:
                work.wait()
        self._done.append(number)
        out = {}
        for source, numbers in by_source.items():
            parts = arriving[source].split([sizes[index] for index in numbers])
            for index, part in zip(numbers, parts, strict=True):
                _, _, width, dtype = sent[str(index)]
                out[index] = unpack(part, len(local[index]), width, _DTYPES[dtype])
        return out

    def _answer(self, name: str, indices: Sequence[int], keys: Mapping[str, Any]) -> tuple[int, Any]:
        """(Number of a request, the data to send)."""
        flight.enter("teacher")
        number, sent = json.loads(self.side.answer(name, indices, **keys))
        return number, sent

    def _needs(self, plan: StepPlan, chosen: Sequence[int] | None) -> list[list[int]]:
        """For each rank of the student: its documents with a remote teacher, ascending."""
        remote = {i for i in range(len(plan.documents)) if (0 if chosen is None else chosen[i]) in self.paths}
        rows = [sorted(remote.intersection(i for row in plan.rows_of_rank(n) for i in row)) for n in range(plan.ranks)]
        return [rows[data_rank] for data_rank in self._data_ranks]


class TeachersSender:
    """The teachers' side. An answer lists the rank that sends each document: {index: [rank, trained tokens, width,
    dtype]}."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._link: dist.ProcessGroupGloo | None = None
        self._sending: dict[int, list[tuple[dist.Work, Tensor]]] = {}

    def send(self, number: int, request: Mapping[str, Any], read: Mapping[int, Tensor]) -> bytes:
        """Starts to send this rank's outputs for a request. Returns the answer. Collective on the teachers' ranks."""
        for arrived in request["done"]:
            for work, _ in self._sending.pop(arrived, ()):
                work.wait()
        packed = {index: pack(states) for index, states in read.items()}
        local_kinds = {
            index: (rows, states.shape[1], str(states.dtype))
            for index, states in read.items()
            for rows in [(len(packed[index]) - len(states)) // (states.shape[1] * states.dtype.itemsize)]
        }
        by_rank: list[dict[int, tuple[int, int, str]]] = [{}] * self.ranks.world
        dist.all_gather_object(by_rank, local_kinds, group=self.ranks.group)
        senders: dict[int, tuple[int, int, int, str]] = {}
        for rank, of_rank in enumerate(by_rank):
            for index, kind in of_rank.items():
                senders.setdefault(index, (rank, *kind))
        for target, needed in enumerate(request["needs"]):
            if missing := [index for index in needed if index not in senders]:
                raise RuntimeError(
                    f"no teacher computed document {request['indices'][missing[0]]} of {request['name']}"
                )
            parts = [packed[index] for index in needed if senders[index][0] == self.ranks.rank]
            if parts:
                self._send(torch.cat(parts), target, number)
        return json.dumps((number, senders)).encode()

    def send_heads(self, number: int, teachers: Iterable[Teacher]) -> bytes:
        """Sends the heads of the teachers to each rank of the student. Collective on both sides."""
        self._link, heads = join_sides(self.ranks), list[tuple[list[int], str, bool]]()
        for teacher in teachers:
            weight, bias = (None if x is None else x.cpu().contiguous() for x in teacher.engine.head_weights())
            assert weight is not None
            heads.append((list(weight.shape), str(weight.dtype), bias is not None))
            for target in range(self.ranks.rank, self.ranks.others, self.ranks.world):
                for part in (weight, bias):
                    if part is not None:
                        self._send(_as_bytes(part), target, number)
        return json.dumps((number, heads)).encode()

    def _send(self, content: Tensor, target: int, number: int) -> None:
        assert self._link is not None
        self._sending.setdefault(number, []).append((self._link.send([content], target, number), content))


def pack(states: Tensor) -> Tensor:
    """Bytes [T + trained x H x F] of hidden states [T, H], which are zeros at untrained tokens."""
    is_trained = (states != 0).any(1)
    return torch.cat([is_trained.view(torch.uint8), _as_bytes(states[is_trained].contiguous())])


def unpack(content: Tensor, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """The hidden states [tokens, width] of `pack`."""
    states = torch.zeros(tokens, width, dtype=dtype)
    states[content[:tokens].view(torch.bool)] = content[tokens:].clone().view(dtype).view(-1, width)
    return states


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as [bytes] uint8."""
    return tensor.view(-1).view(torch.uint8)
