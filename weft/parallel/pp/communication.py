"""Communication between the stages of a pipeline: hidden states onward, their gradients back, and the sum of gradients
of parameters that two stages hold (a head that is tied to the embedding).

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

from weft.launch import flight
from weft.launch.simulated import has_ended
from weft.launch.timing import waiting
from weft.parallel.mesh import P2PChannel, PPAxis, local_shard
from weft.parallel.pp.model import Pipeline
from weft.parallel.pp.schedule import Placement
from weft.parallel.shards.cuts import AnyShardSpec, ShardSpecs, full_shape


class P2PMessage(NamedTuple):
    """Hidden states (onward), or their gradient, of one micro-batch. stage: the receiver."""

    onward: bool
    stage: int
    micro: int


class P2PCommunicator:
    """One rank's sends and receives. send() does not wait; receive() waits for a message that was requested before."""

    def __init__(
        self,
        axis: PPAxis,
        placement: Placement,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: int,
    ) -> None:
        """width: H. dtype: of hidden states between layers. parts: number of ranks that divide the tokens of a row."""
        self.axis, self.placement, self.width, self.parts = axis, placement, width, parts
        self.dtype, self.device = dtype, device
        self._pending: dict[P2PMessage, tuple[Tensor, Any]] = {}
        self._local_messages: dict[P2PMessage, Tensor] = {}  # messages between stages of this rank
        self._sent: list[tuple[Tensor, Any]] = []
        self._connected = device.type == "cpu"

    def connect(self) -> None:
        """Open the connections, once, in an order that cannot deadlock: NCCL opens each at its first message, and
        blocks the thread until the other end does, too."""
        if self._connected:
            return
        self._connected = True
        value = torch.zeros(1, device=self.device)
        for onward in (True, False):
            # Each pair of ranks once, in the same order on all ranks.
            ranks = [self.placement.rank_of(stage) for stage in range(self.placement.stages)]
            ranks = ranks if onward else ranks[::-1]
            for source, end in dict.fromkeys((a, b) for a, b in pairwise(ranks) if a != b):
                group = self.axis.channels[P2PChannel.between(onward, source, end)]
                if self.axis.rank == source:
                    _wait(dist.isend(value, group=group, group_dst=end), self.device)
                elif self.axis.rank == end:
                    _wait(dist.irecv(value, group=group, group_src=source), self.device)

    def request(self, message: P2PMessage, shape: Sequence[int]) -> None:
        """Begin to receive a message for a stage of this rank, unless that has begun or this rank is the sender. shape:
        [B, T] of the row. Messages of one sender and direction must be requested in the order in which they are sent.
        """
        source = self.placement.neighbour(message.stage, not message.onward)
        if source is None or message in self._pending:
            return
        rank = self.placement.rank_of(source)
        if rank == self.axis.rank:
            return
        buffer = torch.empty(self._shape(shape), dtype=self.dtype, device=self.device)
        group = self.axis.channels[P2PChannel.between(message.onward, rank, self.axis.rank)]
        self._pending[message] = buffer, dist.irecv(buffer, group=group, group_src=rank)

    def receive(self, message: P2PMessage) -> Tensor | None:
        """The tensor of a requested message, once it has arrived; None for a stage without a sender (the first stage
        onward, the last stage back)."""
        if message in self._local_messages:
            return self._local_messages.pop(message)
        pending = self._pending.pop(message, None)
        if pending is None:
            return None
        buffer, work = pending
        _wait(work, self.device)
        return buffer

    def send(self, stage: int, onward: bool, micro: int, tensor: Tensor | None, shape: Sequence[int]) -> None:
        """Send a stage's hidden states to the next stage (onward), or their gradient to the previous one. shape: as in
        `request`. Raises RuntimeError for another shape or dtype, which would end the other rank without a message."""
        target = self.placement.neighbour(stage, onward)
        if target is None:
            return
        tensor_name = "hidden states" if onward else "the gradient of hidden states"
        if tensor is None or tuple(tensor.shape) != self._shape(shape) or tensor.dtype != self.dtype:
            actual = "nothing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise RuntimeError(f"{tensor_name} are {actual}, and not {self.dtype} of shape {list(self._shape(shape))}")
        rank, sent = self.placement.rank_of(target), tensor.detach().contiguous()
        if rank == self.axis.rank:
            self._local_messages[P2PMessage(onward, target, micro)] = sent
            return
        group = self.axis.channels[P2PChannel.between(onward, self.axis.rank, rank)]
        self._sent = [(buffer, work) for buffer, work in self._sent if not has_ended(work)]
        self._sent.append((sent, dist.isend(sent, group=group, group_dst=rank)))

    def finish(self) -> None:
        """Wait until all messages have left."""
        for _, work in self._sent:
            _wait(work, self.device)
        self._sent.clear()

    def _shape(self, row: Sequence[int]) -> tuple[int, ...]:
        return (row[0], row[1] // self.parts, self.width)


def _wait(work: Any, device: torch.device) -> None:
    """Wait for a send or receive. On a CPU for at most train.timeout, which torch applies to the group of all ranks
    only; on an accelerator the device waits, not this thread."""
    limit = flight.recorder.limit
    with waiting():
        if device.type == "cpu" and limit is not None:
            work.wait(timedelta(seconds=limit))
        else:
            work.wait()


@torch.no_grad()
def sum_shared_gradients(module: nn.Module, pipeline: Pipeline, axis: PPAxis) -> None:
    """Sum the gradients of parameters that the ranks of the first and the last stage both hold, once per step.
    Collective over these two, the first and the last rank of pp; nothing is done if one rank has both stages."""
    named = dict(module.named_parameters())
    shared = [named[name] for name in sorted(pipeline.shared_params(axis.rank)) if name in named]
    shared = [parameter for parameter in shared if parameter.requires_grad]
    works, received = [], []
    peer = axis.size - 1 - axis.rank
    later = axis.channels[P2PChannel.between(True, 0, axis.size - 1)]
    earlier = axis.channels[P2PChannel.between(False, axis.size - 1, 0)]
    for parameter in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = local_shard(parameter.grad).contiguous()
        received.append(torch.empty_like(gradient))
        if axis.rank == 0:
            works.append(dist.isend(gradient, group=later, group_dst=peer))
            works.append(dist.irecv(received[-1], group=earlier, group_src=peer))
        else:  # in the order of the other rank, as NCCL needs it
            works.append(dist.irecv(received[-1], group=later, group_src=peer))
            works.append(dist.isend(gradient, group=earlier, group_dst=peer))
    for work in works:
        _wait(work, shared[0].device)
    for parameter, peer_gradient in zip(shared, received, strict=True):
        assert parameter.grad is not None
        local_shard(parameter.grad).add_(peer_gradient)


def gather_over_stages(
    pipeline: Pipeline,
    axis: PPAxis,
    device: torch.device,
    names: Iterable[str],
    shards: Mapping[str, Tensor | None],
    cuts: ShardSpecs,
    gather_full: Callable[[Tensor, AnyShardSpec | None], Tensor],
) -> Iterator[tuple[str, Tensor | None]]:
    """Yields (name, whole tensor) for these names of the whole model, on every stage, gathered one by one; None if the
    stage that holds the name has no tensor for it (such as a missing gradient). Collective.

    shards: of this stage. cuts: how tp and ep divide them. gather_full: gathers a tensor from its shards, in its dtype.
    """
    local_shapes = {n: (full_shape(n, t, cuts), t.dtype) for n, t in shards.items() if t is not None}
    shapes_by_rank: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}] * axis.size
    dist.all_gather_object(shapes_by_rank, local_shapes, group=axis.group)
    for name in names:
        stages = pipeline.holders[name]
        shard = shards.get(name) if axis.rank in stages else None
        tensor = None if shard is None else gather_full(shard, cuts.get(name)).contiguous()
        if name not in shapes_by_rank[stages[0]]:
            yield name, None
            continue
        if axis.rank != stages[0]:
            shape, dtype = shapes_by_rank[stages[0]][name]
            tensor = torch.empty(shape, dtype=dtype, device=device)
        assert tensor is not None
        dist.broadcast(tensor, group=axis.group, group_src=stages[0])
        yield name, tensor
