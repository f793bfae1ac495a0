"""What travels between the stages of a pipeline: hidden states onward, their gradients back, and gradients of what two
stages hold (a head that is tied to the embedding).

Shapes come from the plan, which all stages know, and never from a message. B batch, T tokens of a row, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.cluster.simulated import has_ended
from weft.models.pipeline import Pipeline
from weft.models.placement import Placement
from weft.parallel.mesh import PipelineAxis, own_part
from weft.sharding.cuts import AnyCut, Cuts, full_shape
from weft.telemetry import flight
from weft.telemetry.timing import waiting


class Message(NamedTuple):
    """Hidden states (onward), or their gradient, of a micro-batch, to a stage."""

    onward: bool
    stage: int
    micro: int


class Link:
    """One rank's ends of what travels. Sending waits for nobody; receiving waits for what was asked for before."""

    def __init__(
        self,
        axis: PipelineAxis,
        placement: Placement,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: int,
    ) -> None:
        """width: H. dtype: of hidden states between layers. parts: so many ranks divide the tokens of a row."""
        self.axis, self.placement, self.width, self.parts = axis, placement, width, parts
        self.dtype, self.device = dtype, device
        self._asked: dict[Message, tuple[Tensor, Any]] = {}
        self._own: dict[Message, Tensor] = {}  # from one stage of this rank to another
        self._sent: list[tuple[Tensor, Any]] = []
        self._connected = device.type == "cpu"

    def connect(self) -> None:
        """Make the connections, once, in an order in which no rank waits for one that waits for it: NCCL makes each at
        its first message, and holds up the thread until the other end does."""
        if self._connected:
            return
        self._connected = True
        value = torch.zeros(1, device=self.device)
        for onward in (True, False):
            for source, end in self._pairs(onward):
                group = self.axis.channels[onward, source < end]
                if self.axis.place == source:
                    _wait(dist.isend(value, group=group, group_dst=end), self.device)
                elif self.axis.place == end:
                    _wait(dist.irecv(value, group=group, group_src=source), self.device)

    def _pairs(self, onward: bool) -> list[tuple[int, int]]:
        """(rank that sends, rank that receives), each once, in an order that all know."""
        ranks = [self.placement.rank_of(stage) for stage in range(self.placement.stages)]
        ranks = ranks if onward else ranks[::-1]
        return list(dict.fromkeys((a, b) for a, b in pairwise(ranks) if a != b))

    def ask(self, message: Message, shape: Sequence[int]) -> None:
        """Begin to receive what a stage of this rank needs, unless that has begun or comes from this rank. shape: [B,
        T] of its row. From each rank, in each direction, it is asked for in the order in which it is sent."""
        source = self.placement.neighbour(message.stage, not message.onward)
        if source is None or message in self._asked:
            return
        rank = self.placement.rank_of(source)
        if rank == self.axis.place:
            return
        buffer = torch.empty(self._shape(shape), dtype=self.dtype, device=self.device)
        group = self.axis.channels[message.onward, rank < self.axis.place]
        self._asked[message] = buffer, dist.irecv(buffer, group=group, group_src=rank)

    def receive(self, message: Message) -> Tensor | None:
        """What was asked for, once it is there; None at the end of the pipeline that it would come from."""
        if message in self._own:
            return self._own.pop(message)
        found = self._asked.pop(message, None)
        if found is None:
            return None
        buffer, work = found
        _wait(work, self.device)
        return buffer

    def send(self, stage: int, onward: bool, micro: int, tensor: Tensor | None, shape: Sequence[int]) -> None:
        """Send what a stage of this rank has computed for the next one, or for the one before. shape: as in `ask`.
        RuntimeError for another shape or dtype, which would end the other rank without a word."""
        target = self.placement.neighbour(stage, onward)
        if target is None:
            return
        what = "hidden states" if onward else "the gradient of hidden states"
        if tensor is None or tuple(tensor.shape) != self._shape(shape) or tensor.dtype != self.dtype:
            found = "nothing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise RuntimeError(f"{what} are {found}, and not {self.dtype} of shape {list(self._shape(shape))}")
        rank, sent = self.placement.rank_of(target), tensor.detach().contiguous()
        if rank == self.axis.place:
            self._own[Message(onward, target, micro)] = sent
            return
        group = self.axis.channels[onward, self.axis.place < rank]
        self._sent = [(kept, work) for kept, work in self._sent if not has_ended(work)]
        self._sent.append((sent, dist.isend(sent, group=group, group_dst=rank)))

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for _, work in self._sent:
            _wait(work, self.device)
        self._sent.clear()

    def _shape(self, row: Sequence[int]) -> tuple[int, ...]:
        return (row[0], row[1] // self.parts, self.width)


def _wait(work: Any, device: torch.device) -> None:
    """On a CPU for as long as any collective may take (train.timeout), which torch gives to the group of all ranks
    alone; elsewhere the device waits, and not this thread."""
    limit = flight.own.limit
    with waiting():
        if device.type == "cpu" and limit is not None:
            work.wait(timedelta(seconds=limit))
        else:
            work.wait()


@torch.no_grad()
def sum_shared_gradients(module: nn.Module, pipeline: Pipeline, axis: PipelineAxis) -> None:
    """Sum the gradients of what the ranks of the first and the last stage hold alike, once per step. Collective over
    both, which are the first and the last rank where they are two."""
    named = dict(module.named_parameters())
    shared = [named[name] for name in sorted(pipeline.shared(axis.place)) if name in named]
    shared = [parameter for parameter in shared if parameter.requires_grad]
    works, others = [], []
    other = axis.size - 1 - axis.place
    for parameter in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = own_part(parameter.grad).contiguous()
        others.append(torch.empty_like(own))
        if axis.place == 0:
            works.append(dist.isend(own, group=axis.onward, group_dst=other))
            works.append(dist.irecv(others[-1], group=axis.back, group_src=other))
        else:  # in the same order, as NCCL connects the two
            works.append(dist.irecv(others[-1], group=axis.onward, group_src=other))
            works.append(dist.isend(own, group=axis.back, group_dst=other))
    for work in works:
        _wait(work, shared[0].device)
    for parameter, theirs in zip(shared, others, strict=True):
        assert parameter.grad is not None
        own_part(parameter.grad).add_(theirs)


def of_all_stages(
    pipeline: Pipeline,
    axis: PipelineAxis,
    device: torch.device,
    names: Iterable[str],
    held: Mapping[str, Tensor | None],
    cuts: Cuts,
    whole: Callable[[Tensor, AnyCut | None], Tensor],
) -> Iterator[tuple[str, Tensor | None]]:
    """(name, whole tensor) of these names of the whole model, on every stage, gathered one by one; None where the stage
    that holds the name has no tensor of it. Collective.

    held: the shards of this stage. cuts: how tp and ep divide them. whole: gathers one, in its dtype.
    """
    mine = {n: (full_shape(n, t, cuts), t.dtype) for n, t in held.items() if t is not None}
    known: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}] * axis.size
    dist.all_gather_object(known, mine, group=axis.onward)
    for name in names:
        stages = pipeline.holders[name]
        own = held.get(name) if axis.place in stages else None
        found = None if own is None else whole(own, cuts.get(name)).contiguous()
        if name not in known[stages[0]]:
            yield name, None
            continue
        if axis.place != stages[0]:
            shape, dtype = known[stages[0]][name]
            found = torch.empty(shape, dtype=dtype, device=device)
        assert found is not None
        dist.broadcast(found, group=axis.onward, group_src=stages[0])
        yield name, found
